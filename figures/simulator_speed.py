"""Simulating a year takes minutes for 1,000 nodes, and less than a gigabyte for 10,000.

1,000 nodes for a year under six policies with 20 seeds; 10,000 nodes for a year.
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator

from figures.bound import Bound

POLICIES = "everstep,unicron,wait,elastic,spares:16,gemini"


def _run(nodes: int, policies: str, seeds: int) -> tuple[float, float]:
    """Returns the CPU seconds and the peak memory in MB."""
    trace = f"gen:weibull,nodes={nodes},days=365,mtbf=260d,others=3.3"
    line = ["everstep", "simulate", "--trace", trace, "--policies", policies, "--seeds", str(seeds), "--json"]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, line
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def measure(soak: bool) -> Iterator[Bound]:
    resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, memory = _run(1000, POLICIES, 20)
    yield Bound(
        "thousand", round(cpu, 1), f"CPU-s for 1,000 nodes, a year, 6 policies, 20 seeds ({memory:.0f} MB)", "<=", 120
    )
    cpu, memory = _run(10_000, "everstep", 1)
    yield Bound("ten-thousand", round(memory / 1024, 3), f"GB for 10,000 nodes, a year ({cpu:.1f} CPU-s)", "<=", 1)
