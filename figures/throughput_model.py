"""The throughput model predicts published measurements that it was not fitted to.

Also with one measured point per model, and which layouts it predicts to fit into memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from figures import example_runs
from figures.bound import Bound


def _error(points: list[dict[str, Any]]) -> float:
    return statistics.mean(abs(p["off"]) for p in points) * 100


def measure(soak: bool) -> Iterator[Bound]:
    points = example_runs.lines("everstep-planner", "throughput_points")
    for p in points:
        print(
            f"{p['source']:8} {p['hardware']:8} {p['model']:6} {p['layout']:<45} "
            f"{p['off'] * 100:+6.1f} % {p['memory_gb']:5.0f} GB {p['split']}"
        )
    for hardware, limit in (("a100-80", 6), ("h100", 7)):
        fit = [p for p in points if p["hardware"] == hardware and p["split"] == "fit"]
        yield Bound(
            f"{hardware}.fit",
            round(_error(fit), 2),
            f"% off on average, {len(fit)} points that it was fitted to",
            "<=",
            limit,
        )
    held = [p for p in points if p["split"] == "held-out"]
    worst = max(held, key=lambda p: abs(p["off"]))
    yield Bound(
        "a100-80.held-out",
        round(_error(held), 2),
        f"% off on average, {len(held)} points that it has not seen "
        f"(worst {worst['off'] * 100:+.1f} %: {worst['source']} {worst['model']})",
        "<=",
        6,
    )
    ran = sum(not p["fits"] for p in points)
    yield Bound("memory.refused", ran, f"of {len(points)} layouts that were run are said not to fit", "=", 0)
