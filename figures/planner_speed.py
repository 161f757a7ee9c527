"""A plan for a large cluster takes milliseconds in one thread.

100 jobs on 1,250 nodes (10,000 GPUs), all plans for what may happen next, looking one up; and
10,000 GPUs one by one. For comparison, the same with the paper's dynamic program (every number of
units for every job).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from figures import example_runs
from figures.bound import Bound

SEEDS = (1, 2, 3, 4, 5)


def _runs(units: int, most: int) -> list[dict[str, Any]]:
    return [
        found for seed in SEEDS for found in example_runs.lines("everstep-planner", "plans", 100, units, most, seed)
    ]


def _bound(name: str, runs: list[dict[str, Any]], key: str, unit: str, limit: float) -> Bound:
    samples = tuple(round(run[key], 2) for run in runs)
    return Bound(
        name,
        round(statistics.median(samples), 2),
        f"{unit}, median of {len(SEEDS)} problems",
        "<=",
        limit,
        samples=samples,
    )


def measure(soak: bool) -> Iterator[Bound]:
    nodes = _runs(1250, 400)
    print(
        "; ".join(
            f"{run['plans']} plans, {run['table_kib']} KiB, {run['used']} of 1250 nodes used, as the paper has it {run['dense_ms']:.0f} ms"
            for run in nodes
        )
    )
    yield _bound("plan", nodes, "plan_ms", "ms of CPU for one plan of 100 jobs on 1,250 nodes", 5)
    yield _bound("table", nodes, "table_ms", "ms of CPU for all plans for what may happen next", 50)
    yield _bound("lookup", nodes, "lookup_us", "us of CPU to look one up", 10)
    yield _bound(
        "gpus", _runs(10_000, 1500), "plan_ms", "ms of CPU for one plan of 100 jobs on 10,000 GPUs one by one", 250
    )
