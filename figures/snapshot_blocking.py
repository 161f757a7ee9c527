"""A training loop that saves and updates at once waits about as long as a bare copy takes.

Compared with a bare copy and with other savers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from figures import peers
from figures.bound import Bound
from harness.cluster import ROOT

EVERSTEP = str(Path(sys.executable).parent / "everstep")
GB = 10**9


def run(size: int, modes: str, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds per save by mode. The modes alternate in one process."""
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as scratch:
        line = [EVERSTEP, "run", "--standalone", "figures/scripts/savers.py", "--bytes", str(size), "--modes", modes]
        line += ["--rounds", str(rounds), "--out", scratch]
        # Otherwise, the process kept ready for a restart would import torch on one of two cores for
        # the first seconds.
        line[2:2] = ["--max-restarts", "0", "--no-warm"]
        env = {**os.environ, "EVERSTEP_STATE_DIR": f"{scratch}/state", "OMP_NUM_THREADS": "2"}
        done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        found: dict[str, list[float]] = defaultdict(list)
        for row in done.stdout.splitlines():
            if row.startswith("{"):
                said = json.loads(row)
                found[said["mode"]].append(said["seconds"])
        return found


def flash(size: int, rounds: int) -> list[float]:
    """Returns the seconds per save of DLRover's flash checkpoint."""
    line = [peers.python(), "figures/scripts/dlrover_flash.py", str(size), str(rounds)]
    done = subprocess.run(
        line, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "2"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return [json.loads(row)["seconds"] for row in done.stdout.splitlines() if row.startswith("{")]


def measure(soak: bool) -> Iterator[Bound]:
    for size, label in ((GB, "1GB"), (4 * GB, "4GB")):
        tight = run(size, "memcpy,everstep", 15 if soak else 9)
        ratios = [b / a for a, b in zip(tight["memcpy"], tight["everstep"], strict=True)]
        yield Bound(
            f"{label}-over-memcpy",
            round(statistics.median(ratios), 3),
            "x a two-thread copy",
            "<=",
            1.15,
            samples=tuple(ratios),
        )
    middle = {
        mode: statistics.median(times)
        for mode, times in run(GB, "everstep,dcp-default,dcp-process,torch-save", 5).items()
    }
    print({mode: round(t, 3) for mode, t in middle.items()}, flush=True)
    for mode, limit in (("dcp-default", 0.35), ("dcp-process", 0.7), ("torch-save", 0.35)):
        yield Bound(f"1GB-over-{mode}", round(middle["everstep"] / middle[mode], 3), "x", "<=", limit)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(3):
        ours += run(GB, "everstep", 5)["everstep"]
        theirs += flash(GB, 5)
    ratio = statistics.median(ours) / statistics.median(theirs)
    yield Bound(
        "1GB-over-dlrover-flash",
        round(ratio, 3),
        f"x ({statistics.median(theirs):.3f} s; no checksum, one slot)",
        "<=",
        1.05,
        samples=tuple(ours + theirs),
    )
