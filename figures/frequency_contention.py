"""The checkpoint interval keeps to its overhead when a neighbour uses the disk.

Also when steps become four times shorter and longer again (CheckFreq §4.3, Table 5). The measured
frequency is compared with one that was right at the beginning. The loop waits for its writes (no
agent). Overhead is the time beyond undisturbed steps, over ten checkpoints after twenty to adapt.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everstep._internal import Rate
from figures.bound import Bound

ROOT = Path(__file__).resolve().parent.parent
BUDGET = 0.05
STEP = 0.02
#: Checkpoints to adapt, and those that are measured afterwards.
ADAPT, LOOK = 20, 10


def _run(every: int, phases: list[tuple[int, float]], checkpoints: int) -> list[dict[str, Any]]:
    # Runs on the real disk, not in memory.
    scratch = ROOT / "target" / "contended"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    plan = ",".join(f"{on}:{seconds}:{checkpoints}" for on, seconds in phases)
    line = [
        sys.executable,
        "figures/scripts/contended.py",
        "--out",
        str(scratch),
        "--every",
        str(every),
        "--budget",
        str(BUDGET),
        "--phases",
        plan,
    ]
    try:
        subprocess.run(line, cwd=ROOT, check=True, timeout=1500)
        return [json.loads(row) for row in (scratch / "intervals.jsonl").read_text().splitlines()]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _overhead(rows: list[dict[str, Any]], phase: int) -> tuple[float, int, float]:
    """Returns the overhead in percent, the steps between checkpoints and their cost.

    All are over the last checkpoints of a phase.
    """
    last = [r for r in rows if r["phase"] == phase][-LOOK:]
    ideal = sum((r["steps"] + 1) * r["quiet"] for r in last)
    spent = sum(r["cost"] + (r["steps"] + 1) * r["quiet"] for r in last)
    return (
        (spent / ideal - 1) * 100,
        int(statistics.median(r["steps"] + 1 for r in last)),
        statistics.median(r["cost"] for r in last),
    )


def measure(soak: bool) -> Iterator[Bound]:
    yield Bound(
        "example", _example(), "steps for a checkpoint that costs one step, at 5 % (CheckFreq's example)", "=", 20
    )
    count = ADAPT + LOOK
    ours = _run(0, [(0, STEP), (1, STEP), (0, STEP), (0, STEP / 4), (0, STEP)], count)
    names = ["alone", "neighbour", "alone-again", "faster-steps", "slower-steps"]
    seen = {name: _overhead(ours, n) for n, name in enumerate(names)}
    for name, (overhead, every, cost) in seen.items():
        what = f"% (every {every} steps, {cost * 1e3:.0f} ms each)"
        yield Bound(f"{name}-at-most", round(overhead, 2), what, "<=", BUDGET * 100 + 0.5)
        yield Bound(f"{name}-at-least", round(overhead, 2), what, ">=", BUDGET * 100 - 0.5)
    down = seen["alone-again"][1] / seen["neighbour"][1]
    yield Bound("back-down", round(down, 2), "of the steps apart that the neighbour made necessary", "<=", 0.6)
    frozen = _run(seen["alone"][1], [(0, STEP), (1, STEP)], LOOK)
    # Whether the frequency was right is judged by the median checkpoint: the disk stalls now and
    # then, to which a frozen interval does not respond.
    usual = statistics.median(100 * r["cost"] / ((r["steps"] + 1) * r["quiet"]) for r in frozen if r["phase"] == 0)
    what = f"% (always as often as it was right alone; the median of {LOOK}, {_overhead(frozen, 0)[0]:.1f} % in all)"
    yield Bound("frozen-alone", round(usual, 2), what, "<=", BUDGET * 150)
    yield Bound("frozen-neighbour", round(_overhead(frozen, 1)[0], 2), "%", ">", 3 * BUDGET * 100)


def _example() -> int:
    rate = Rate(BUDGET, 1.0)
    rate.profile([1.0] * 20)
    rate.begins()
    rate.step(2.0, False)
    rate.written(1.0)
    chosen = rate.every()
    return chosen[0] if chosen else 0
