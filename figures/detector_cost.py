"""The cost of the detectors (`crates/fleet/examples/detector_cost.rs`), for the figures that bound
it."""

from __future__ import annotations

import functools
from typing import Any

from figures import example_runs


@functools.cache
def runs(times: int) -> list[dict[str, Any]]:
    """Runs the program ``times`` times, one after the other."""
    return [found for _ in range(times) for found in example_runs.lines("everstep-fleet", "detector_cost")]
