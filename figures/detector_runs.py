"""All detectors on the same generated episodes, for the figures that bound them.

See `crates/fleet/examples/detectors.rs`.
"""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any

from harness.cluster import ROOT

#: Faulty episodes per matrix (with as many normal ones) and node-days of normal data, without and
#: with --soak.
EPISODES, NODE_DAYS = (170, 1000), (10_000, 20_000)
MATRICES = ("ours", "faint", "random")


@functools.cache
def lines(soak: bool) -> list[dict[str, Any]]:
    """Returns everything that the program prints."""
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
