"""On a GPU, snapshots of a billion parameters are nearly as fast as a bare copy.

Without a GPU, there are no bounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator

from figures.bound import Bound
from figures.snapshot_blocking import EVERSTEP
from harness.cluster import ROOT


def measure(soak: bool) -> Iterator[Bound]:
    import torch

    if not torch.cuda.is_available():
        print("figure gpu-snapshot: skipped: this machine has no GPU", flush=True)
        return
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as scratch:
        line = [
            EVERSTEP,
            "run",
            "--max-restarts",
            "0",
            "--standalone",
            "figures/scripts/gpu.py",
            "--out",
            scratch,
            "--steps",
            "80" if soak else "40",
        ]
        done = subprocess.run(
            line,
            cwd=ROOT,
            env={**os.environ, "EVERSTEP_STATE_DIR": f"{scratch}/state"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
    rows = [json.loads(row) for row in done.stdout.splitlines() if row.startswith("{")]
    copies = [r for r in rows if "bare" in r]
    share = statistics.median(r["bare"] / r["copied"] for r in copies)
    rate = copies[0]["bytes"] / min(r["copied"] for r in copies) / 1e9
    yield Bound(
        "copy",
        round(share, 3),
        f"of a copy into pinned memory ({rate:.1f} GB/s at best, {torch.cuda.get_device_name()})",
        ">=",
        0.9,
    )
    steps = {arm: statistics.median(r["step"] for r in rows if r.get("arm") == arm) for arm in ("with", "without")}
    cost = (steps["with"] / steps["without"] - 1) * 100
    yield Bound("every-step", round(cost, 2), f"% of a step of {steps['without'] * 1000:.0f} ms", "<=", 2)
