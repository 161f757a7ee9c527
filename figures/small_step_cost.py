"""What a snapshot at each step costs a loop of 20-ms steps, and that `stall_budget` counts all of it.

Every other block of steps runs without the manager, in one process. The time that the loop takes longer is compared with what the worker's
board counts, which is what `everstep goodput` calls a stall. The waiting part of a step is left out of both: it only drifts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures.bound import Bound
from harness.cluster import ROOT

BIN = Path(sys.executable).parent
MB = 1_000_000
STEP = 0.02
BUDGET = 0.01


def run(size: int, blocks: int, *options: str) -> dict[str, Any]:
    """Seconds per step."""
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as scratch:
        line = [str(BIN / "everstep"), "run", "--standalone", "--no-warm", "--max-restarts", "0", "figures/scripts/small_steps.py"]
        line += ["--bytes", str(size), "--blocks", str(blocks), "--out", scratch, *options]
        env = {**os.environ, "EVERSTEP_STATE_DIR": f"{scratch}/state", "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
        done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        found: dict[str, Any] = json.loads(next(row for row in done.stdout.splitlines() if row.startswith("{")))
        return found


def measure(soak: bool) -> Iterator[Bound]:
    blocks = 60 if soak else 16
    each = run(MB, blocks, "--every", "1")
    tensors = each["tensors"]
    yield Bound("1MB", round(each["call"] * 1e3, 3), f"ms per ckpt.step, a snapshot each, {tensors} tensors (median)", "<=", 0.5, samples=tuple(each["pairs"]))
    yield Bound("1MB-paired", round(each["paired"] * 1e3, 3), "ms that a step takes longer than without", "<=", 0.5)
    yield Bound("goodput", round(abs(each["stalled"] / each["paired"] - 1) * 100, 1), "% between counted stall and paired difference", "<=", 10)
    for megabytes in (10, 50):
        budgeted = run(megabytes * MB, blocks)
        slower = 100 * budgeted["mean"] / STEP
        yield Bound(f"{megabytes}MB", round(slower, 2), "% slower, all steps", "<=", 100 * BUDGET, samples=tuple(budgeted["pairs"]))
