"""Snapshots within `stall_budget` slow a loop of 20-ms steps by at most 1 %.

Every other block of steps runs without the manager, in one process. The additional time of the loop
is compared with what `everstep goodput` reports. The part of a step in which the loop only computes
is excluded from both, because it only drifts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures.bound import Bound
from figures.paired import middle_half
from harness.cluster import ROOT

BIN = Path(sys.executable).parent
MB = 1_000_000
BUDGET = 0.01


def run(size: int, blocks: int, *options: str) -> dict[str, Any]:
    """Returns what the script found, in seconds.

    Also the total additional time of the loop, and the seconds of `checkpoint_stall` that
    `everstep goodput` counts.
    """
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as scratch:
        line = [
            str(BIN / "everstep"),
            "run",
            "--standalone",
            "--name",
            "steps",
            "--no-warm",
            "--max-restarts",
            "0",
            "figures/scripts/small_steps.py",
        ]
        line += ["--bytes", str(size), "--blocks", str(blocks), "--out", scratch, *options]
        env = {
            **os.environ,
            "EVERSTEP_STATE_DIR": f"{scratch}/state",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        found: dict[str, Any] = json.loads(next(row for row in done.stdout.splitlines() if row.startswith("{")))
        asked = subprocess.run(
            [line[0], "goodput", "steps", "--json"], env=env, capture_output=True, text=True, check=True
        )
        # A block that was interrupted by something else counts like the others.
        more = found["first"] + found["block"] * len(found["pairs"]) * middle_half(found["pairs"])
        return {**found, "more": more, "stalled": stalled(json.loads(asked.stdout))}


def stalled(goodput: dict[str, Any]) -> float:
    """Returns the seconds in which checkpoints held up the only rank."""
    return float(goodput["jobs"][0]["spent_us"]["checkpoint_stall"]) / 1e6


def by_call(found: dict[str, Any]) -> float:
    """Returns the median seconds of a call."""
    return float(found["call"])


def goodput(part: str, found: list[dict[str, Any]]) -> Bound:
    """Returns how far apart goodput's stall and the paired difference are, in all processes
    together.

    The paired difference of one process has a standard error of a fifth at 50 MB, with either sign.
    """
    apart = sorted(round(100 * (f["stalled"] / f["more"] - 1), 1) for f in found)
    stalled, more = (1e3 * sum(f[name] for f in found) for name in ("stalled", "more"))
    what = f"goodput's stall and the paired difference ({stalled:.0f} and {more:.0f} ms; process by process {apart} %)"
    return Bound(f"{part}-goodput", round(100 * abs(stalled / more - 1), 1), f"% between {what}", "<=", 10)


def measure(soak: bool) -> Iterator[Bound]:
    blocks = 60 if soak else 24
    for part, shape in (("1MB", "gpt"), ("1MB-tensors", "linear")):
        # With what the host runs beside this machine, the same process takes 0.39 ms or 0.56 ms.
        several = sorted((run(MB, blocks // 2, "--every", "1", "--shape", shape) for _ in range(5)), key=by_call)
        each = several[len(several) // 2]
        size, tensors = each["bytes"] / MB, each["tensors"]
        yield Bound(
            part,
            round(each["call"] * 1e3, 3),
            f"ms per ckpt.step, a snapshot each, {size:.2g} MB in {tensors} tensors "
            f"(median of {[round(e['call'] * 1e3, 3) for e in several]}, each the median of a process)",
            "<=",
            0.5,
            samples=tuple(each["pairs"]),
        )
        ratios = sorted(round(e["call"] / e["clone"], 2) for e in several)
        what = (
            f"of what it takes to call state_dict() and clone each tensor, in the same processes (median of {ratios})"
        )
        yield Bound(f"{part}-to-clone", statistics.median(ratios), what, "<=", 1)
        paired = sorted(round(e["paired"] * 1e3, 3) for e in several)
        what = f"ms that a step takes longer than without (median of {paired})"
        yield Bound(f"{part}-paired", statistics.median(paired), what, "<=", 0.5)
        yield goodput(part, several)
    for megabytes in (10, 50):
        # Few of their steps have a snapshot: with 120 blocks, the standard error of the cost of 50
        # MB was 9 %. Three processes, because one interruption within a call counts in goodput in
        # full, and in the middle half of the pairs not at all.
        budgeted = [run(megabytes * MB, 10 * blocks) for _ in range(3)]
        slower = sorted(round(100 * b["paired"] / b["step"], 2) for b in budgeted)
        steps = 1e3 * statistics.median(b["step"] for b in budgeted)
        yield Bound(
            f"{megabytes}MB",
            slower[1],
            f"% slower than steps of {steps:.1f} ms without (median of {slower})",
            "<=",
            100 * BUDGET,
            samples=tuple(pair for b in budgeted for pair in b["pairs"]),
        )
        yield goodput(f"{megabytes}MB", budgeted)
