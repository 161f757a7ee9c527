"""The papers' tables as computed here (`crates/replay/examples/papers.rs`), for the figures that bound them."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from harness.cluster import ROOT


def lines(of: str, seeds: int) -> list[dict[str, Any]]:
    """Returns all lines of the given kinds."""
    line = ["cargo", "run", "-q", "--release", "-p", "everstep-replay", "--example", "papers", "--", "-", str(seeds)]
    said = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [found for found in map(json.loads, said.splitlines()) if found["of"] in of.split()]
