"""The attacker's program, as one text for an interpreter that can read none of our files."""

from __future__ import annotations

from pathlib import Path

PARTS = ("base", "files", "processes", "sockets", "loop")


def text() -> str:
    """Returns all parts, each without its imports from the others."""
    here = Path(__file__).parent
    joined = "\n\n".join((here / f"{part}.py").read_text() for part in PARTS)
    return "\n".join(line for line in joined.splitlines() if not line.startswith("from figures.second.base import"))
