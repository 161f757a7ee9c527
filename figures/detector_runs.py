"""All detectors on the same generated episodes, for the figures that bound them.

See `crates/fleet/examples/detectors.rs`.
"""

from __future__ import annotations

import functools
from typing import Any

from figures import example_runs

#: Faulty episodes per matrix (with as many normal ones) and node-days of normal data, without and
#: with --soak.
EPISODES, NODE_DAYS = (170, 1000), (10_000, 20_000)
MATRICES = ("ours", "faint", "random")


@functools.cache
def lines(soak: bool) -> list[dict[str, Any]]:
    """Returns everything that the program prints."""
    return example_runs.lines("everstep-fleet", "detectors", EPISODES[soak], NODE_DAYS[soak], *MATRICES)
