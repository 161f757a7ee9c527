"""The cost of the detectors (`crates/fleet/examples/detector_cost.rs`), for the figures that bound it."""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any

from harness.cluster import ROOT


@functools.cache
def runs(times: int) -> list[dict[str, Any]]:
    """Runs the program ``times`` times, one after the other."""
    line = ["cargo", "run", "-q", "--release", "-p", "everstep-fleet", "--example", "detector_cost"]
    return [
        json.loads(subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
        for _ in range(times)
    ]
