"""The papers' tables as computed here (`crates/replay/examples/papers.rs`), for the figures that
bound them."""

from __future__ import annotations

from typing import Any

from figures import example_runs


def lines(of: str, seeds: int) -> list[dict[str, Any]]:
    """Returns all lines of the given kinds."""
    found = example_runs.lines("everstep-replay", "papers", "-", seeds)
    return [line for line in found if line["of"] in of.split()]
