"""Training a metric on a day of 64 machines takes at most a minute and fits unseen windows.

The metric is memory. The error is that of reconstructing unseen windows.
"""

from __future__ import annotations

from collections.abc import Iterator

from figures.bound import Bound
from figures.detector_cost import runs


def measure(soak: bool) -> Iterator[Bound]:
    run = runs(1)[0]
    yield Bound(
        "time",
        round(run["training_ms"] / 1000, 1),
        f"s of CPU for {run['windows']} windows, {run['epochs']} times each",
        "<=",
        60,
    )
    yield Bound("error", round(run["error"], 7), "mean squared error of unseen windows", "<=", 1e-4)
