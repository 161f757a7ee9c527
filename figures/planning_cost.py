"""Planning where a large job's state goes and comes from takes little CPU time.

256 ranks with 1,000 sharded tensors each. Saving: what one rank does beyond its own bytes, and what
the publishing rank does for all (DCP: the coordinator gathers all plans, dedups them, makes the
global plan and its metadata). Loading on 192 ranks: opening the checkpoint, whose headers are
verified, and one rank's plan (DCP: reading the metadata and one rank's plan). Processor seconds,
both in the same run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import ROOT

SCRIPT = "figures/scripts/planning.py"
RANKS, TENSORS, NEW = 256, 1000, 192


def _seconds(what: str, scratch: Path) -> dict[str, float]:
    line = [sys.executable, SCRIPT, what, str(scratch), str(RANKS), str(TENSORS), str(NEW)]
    done = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True, timeout=1200)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(soak: bool) -> Iterator[Bound]:
    scratch = ROOT / "target" / "planning"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        saved = _seconds("save", scratch)
        loads = [_seconds("load", scratch) for _ in range(3)]
        theirs = _seconds("dcp", scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    load = sorted(loads, key=lambda x: x["load"])[1]
    yield Bound(
        "save",
        round(saved["rank"] + saved["publish"], 3),
        f"CPU-s on one rank and to publish (DCP's coordinator: {theirs['save']:.1f})",
        "<=",
        0.2,
    )
    yield Bound(
        "load",
        round(load["load"], 3),
        f"CPU-s to open it and plan one rank's part, {load['runs']:.0f} runs (DCP: {theirs['load']:.1f})",
        "<=",
        0.2,
        samples=tuple(x["load"] for x in loads),
    )
    yield Bound(
        "less-than-dcp",
        round((theirs["save"] + theirs["load"]) / (saved["rank"] + saved["publish"] + load["load"]), 1),
        "times",
        ">=",
        20,
    )
