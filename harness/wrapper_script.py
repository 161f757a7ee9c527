"""Scripts that run in place of a program and call it: a compiler with more flags, an interpreter
with another library."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, text: str) -> None:
    """Writes the script only if it differs, because a newer compiler makes cargo rebuild
    everything."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
