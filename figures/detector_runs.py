"""All detectors on the same generated episodes (`crates/fleet/examples/detectors.rs`), for the figures that bound them."""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any

from harness.cluster import ROOT

#: Faulty episodes of each matrix, and as many normal ones, without and with --soak; and node-days of normal data.
EPISODES, NODE_DAYS = (170, 1000), (10_000, 20_000)
MATRICES = ("ours", "faint", "random")


@functools.cache
def lines(soak: bool) -> list[dict[str, Any]]:
    """Everything that it prints."""
    line = [
        "cargo",
        "run",
        "-q",
        "--release",
        "-p",
        "everstep-fleet",
        "--example",
        "detectors",
        "--",
        str(EPISODES[soak]),
        str(NODE_DAYS[soak]),
    ]
    line += MATRICES
    said = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [json.loads(text) for text in said.splitlines()]
