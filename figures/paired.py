"""Blocks of training with and without a checkpoint, alternating in one process.

See ``figures/scripts/paired.py``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field

from figures.snapshot_blocking import EVERSTEP, GB
from harness.cluster import ROOT


@dataclass
class Blocks:
    """Blocks of one mode: seconds of training, and processor seconds."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def run(modes: str, rounds: int, *options: str, size: int = GB) -> dict[str, Blocks]:
    """Returns the blocks by mode; the modes alternate. ``options`` are those of the script."""
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as scratch:
        line = [
            EVERSTEP,
            "run",
            "--max-restarts",
            "0",
            "--standalone",
            "-m",
            "figures.scripts.paired",
            "--modes",
            modes,
        ]
        line += ["--bytes", str(size), "--rounds", str(rounds), "--out", scratch, *options]
        env = {**os.environ, "EVERSTEP_STATE_DIR": f"{scratch}/state", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Blocks] = defaultdict(Blocks)
    for row in done.stdout.splitlines():
        if row.startswith("{"):
            said = json.loads(row)
            found[said["mode"]].seconds.append(said["seconds"])
            found[said["mode"]].cpu.append(said["cpu"])
    return found


def middle_half(values: list[float]) -> float:
    """Returns the mean without the lowest and the highest quarter.

    The values are of pairs, a few of which were interrupted on one side.
    """
    quarter = len(values) // 4
    return statistics.mean(sorted(values)[quarter : len(values) - quarter])


def extra(found: dict[str, Blocks]) -> dict[str, tuple[float, float]]:
    """Returns the seconds lost and the processor seconds spent per checkpoint.

    Each is the median over the rounds of a block's excess over the block without a checkpoint in
    the same round, because machines drift.
    """
    none = found["none"]

    def more(a: list[float], b: list[float]) -> float:
        return statistics.median(x - y for x, y in zip(a, b, strict=True))

    return {mode: (more(b.seconds, none.seconds), more(b.cpu, none.cpu)) for mode, b in found.items() if mode != "none"}
