"""A flipped bit in one DDP rank's parameters is noticed and the rank named within ten steps.

No rank may be named without a change. Three ranks. Digests are compared at every replicated step,
which the coordinator chooses as soon as the last one is reported; here the period is at most ten
steps.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from everstep._internal import Arena, Entry, SlotLayout, Source, reserve_slot
from figures.bound import Bound
from harness.cluster import cluster

#: Steps within which a comparison must have taken place.
PERIOD = 10
RANKS = 3


def _run(out: Path, clean: int, flips: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    command = ["figures/scripts/flips.py", "--out", str(out), "--clean", str(clean), "--flips", str(flips)]
    with cluster("flips", command, workers=RANKS) as c:
        c.start_all()
        if c.agents[0].wait(900):
            raise RuntimeError(c.output()[-3000:])
        done = [json.loads(line) for line in (out / "flips.jsonl").read_text().splitlines()]
        return done, c.facts("Diverged")


def _capture(size: int) -> tuple[float, float]:
    """Returns the seconds of captures with and without a digest, alternating."""
    data = torch.rand(size // 4)
    layout = SlotLayout([Entry("w", "F32", [size // 4], size)], [Source(data.data_ptr(), size, False)])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        arenas = []
        for shared in (True, False):
            path = f"{scratch}/slot-{int(shared)}"
            reserve_slot(path, size + (1 << 20))
            arenas.append(Arena([path], "digest", 0, 1, 1, shared))
        times: tuple[list[float], list[float]] = ([], [])
        for step in range(1, 42):
            for arena, into in zip(arenas, times, strict=True):
                began = time.perf_counter()
                arena.capture(step, layout, [], None, 2, None, False, False)
                arena.wait()
                into.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def measure(soak: bool) -> Iterator[Bound]:
    clean, flips = (20000, 200) if soak else (5000, 50)
    with tempfile.TemporaryDirectory() as scratch:
        done, named = _run(Path(scratch), clean, flips)
    alarms = sum(1 for n in named if not any(0 < n["step"] - d["step"] <= PERIOD for d in done))
    found, late = 0, []
    for flip in done:
        hit = next((n for n in named if 0 < n["step"] - flip["step"] <= PERIOD), None)
        if hit is not None and hit["ranks"] == [flip["rank"]] and hit["certain"]:
            found += 1
            late.append(hit["step"] - flip["step"])
    yield Bound(
        "named",
        found,
        f"of {flips} flips, the right rank, within {PERIOD} steps (median {statistics.median(late or [0])})",
        ">=",
        flips,
    )
    yield Bound("false-alarms", alarms, f"in {clean} clean steps and those between the flips", "<=", 0)
    for size in (1_000_000, 100_000_000):
        with_, without = _capture(size)
        added, share = (with_ - without) * 1e3, (with_ / without - 1) * 100
        yield Bound(
            f"cost-{size // 1_000_000}MB",
            round(added, 3),
            f"ms more per capture ({without * 1e3:.2f} ms without, {share:.1f} %)",
            "<=",
            0.5,
        )
