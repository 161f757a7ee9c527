"""The robust detector reaches its verdict within minutes of the onset of a fault.

Only visible faults that it names are counted. Minder looks every 8 minutes, with 4 minutes of
continuity.
"""

from __future__ import annotations

from collections.abc import Iterator

from figures.bound import Bound
from figures.detector_runs import lines


def measure(soak: bool) -> Iterator[Bound]:
    for s in lines(soak):
        if s["of"] == "score" and s["method"] == "robust":
            yield Bound(
                f"{s['matrix']}-median",
                s["delay_median_s"],
                f"s from onset to verdict, median of {s['delays']}",
                "<=",
                100,
            )
            yield Bound(f"{s['matrix']}-p95", s["delay_p95_s"], "s, 95th percentile", "<=", 300)
