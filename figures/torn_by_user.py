"""Weights that the script writes to while a snapshot is copied are never sealed torn.

The script writes in thirteen ways. Such a write is never sealed or restored.
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
WAYS = (
    "ema", "load-state-dict", "copy", "foreach", "fused", "compiled", "scaler-skip", "data-copy", "numpy", "numpy-element",
    "inference-mode", "data-swap", "attribute",
)  # fmt: skip


def lives(way: str, steps: int, kills: int, *options: str) -> list[dict[str, Any]]:
    """Returns what each life of the script observed. It kills itself in the copy window."""
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as scratch:
        line = [
            str(BIN / "everstep"),
            "run",
            "--standalone",
            "--no-warm",
            "--max-restarts",
            str(kills),
            "figures/scripts/torn.py",
            "--way",
            way,
        ]
        line += ["--steps", str(steps), "--kills", str(kills), "--out", scratch, *options]
        env = {
            **os.environ,
            "EVERSTEP_STATE_DIR": f"{scratch}/state",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        found = [json.loads(row) for row in done.stdout.splitlines() if row.startswith("{")]
        if done.returncode or len(found) != kills + 1:
            raise RuntimeError(f"{way}: {done.stderr[-3000:]}")
        return found


def measure(soak: bool) -> Iterator[Bound]:
    steps, kills = (200, 10) if soak else (12, 1)
    torn, restored, gap, rows, looked = 0, 0, 0, [], 0
    for way in WAYS:
        found = lives(way, steps, kills)
        torn += sum(life["torn"] for life in found)
        restored += sum(life["restored_torn"] for life in found)
        looked += sum(life["kept"] for life in found)
        gap = max(gap, *(life["gap"] for life in found))
        rows.append(
            (
                way,
                sum(life["due"] for life in found),
                sum(life["kept"] for life in found),
                sum(life["discarded"] for life in found),
            )
        )
    print(rows, flush=True)
    yield Bound(
        "restored",
        restored,
        f"torn snapshots restored in {len(WAYS)} ways with {kills} kills each",
        "=",
        0,
        samples=tuple(rows),
    )
    yield Bound("sealed", torn, f"torn ones among {looked} that were sealed", "=", 0)
    yield Bound("gap", gap, "steps between sealed snapshots, at most", "<=", 10)
    quiet = lives("none", steps * 2, kills)
    kept = 100 * sum(life["kept"] for life in quiet) / sum(life["due"] for life in quiet)
    yield Bound("kept", round(kept, 1), "% of due snapshots when nobody writes", ">=", 95)
    blind = lives("data-copy", steps, kills, "--blind")
    yield Bound("without-the-check", sum(life["torn"] for life in blind), "torn snapshots sealed", "=", 0, control=True)
