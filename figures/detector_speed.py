"""One thread judges 15 minutes of 1,024 machines and 10 metrics within seconds.

Minder's test as published (every window, all pairs), the robust one, and one more second of the
robust one. Minder's own figure is 3.6 s on 128 cores, including fetching the data.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from figures.bound import Bound
from figures.detector_cost import runs


def measure(soak: bool) -> Iterator[Bound]:
    found = runs(3)
    for name, key, what, limit in (
        ("lstm-vae", "minder_ms", "ms, LSTM-VAE with distances between all pairs", 3000),
        ("robust", "robust_ms", "ms, robust", 60),
        ("tick", "tick_p99_ms", "ms for the next second, 99th percentile", 5),
        ("rings", "ring_mb", "MB of samples kept", 64),
    ):
        samples = tuple(round(run[key], 2) for run in found)
        yield Bound(name, round(statistics.median(samples), 2), f"{what}, median of 3", "<=", limit, samples=samples)
    print(f"4,096 machines, robust: {statistics.median(run['robust_4096_ms'] for run in found):.0f} ms")
