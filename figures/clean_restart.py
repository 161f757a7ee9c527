"""After a kill, every restart succeeds at the first attempt, in about torchrun's time.

The time runs from the kill to the next new step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import ROOT, Cluster, cluster, descendants

PEER_TRIALS = 6
PATIENCE = 40.0


def _trial(c: Cluster, index: int) -> tuple[float, bool]:
    """Returns the seconds from the kill to the next new step, and whether one attempt was
    enough."""
    before = len(c.facts("GenerationStarted"))
    if index % 10 == 9:
        when = c.kill_node(0)  # hosts MASTER_ADDR
        c.start(0)
    else:
        when = c.kill_worker(index % 2)
    step = c.wait_for(lambda: next((f for f in c.facts("FirstStep") if f["ts"] > when), None), 90, "a new step")
    return float(step["ts"]) - when, len(c.facts("GenerationStarted")) == before + 1


def _torchrun_trial() -> tuple[float, bool]:
    """Does the same under torchrun. Returns (seconds, one attempt)."""
    torchrun = Path(sys.executable).parent / "torchrun"
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as log:
        out = Path(scratch)
        line = [str(torchrun), "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "figures/convnet.py", "--plain",
                "--steps", "100000", "--pause", "0.02", "--out", str(out)]  # fmt: skip
        run = subprocess.Popen(
            line, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        )

        def workers() -> list[int]:
            found = []
            for pid in descendants(run.pid):
                try:
                    if b"convnet" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(pid)
                except OSError:
                    pass
            return found

        def wait(marks: list[Path], deadline: float) -> bool:
            while time.monotonic() < deadline and run.poll() is None:
                if all(m.exists() for m in marks):
                    return True
                time.sleep(0.02)
            return False

        try:
            marks = [out / "at-0", out / "at-1"]
            if not wait(marks, time.monotonic() + 60):
                return PATIENCE, False
            first = set(workers())
            when = time.monotonic()
            os.kill(max(first), signal.SIGKILL)
            while set(workers()) & first and time.monotonic() - when < PATIENCE:
                time.sleep(0.02)
            for m in marks:
                m.unlink(missing_ok=True)
            seen: set[int] = set()
            while time.monotonic() - when < PATIENCE and run.poll() is None and not all(m.exists() for m in marks):
                seen |= set(workers())
                time.sleep(0.02)
            good = all(m.exists() for m in marks)
            return time.monotonic() - when, good and len(seen | set(workers())) <= 2
        finally:
            for pid in [*descendants(run.pid), run.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            run.wait()


def measure(soak: bool) -> Iterator[Bound]:
    trials = 200 if soak else 50
    ours: list[tuple[float, bool]] = []
    peer: list[tuple[float, bool]] = []
    with tempfile.TemporaryDirectory() as scratch:
        command = ["figures/convnet.py", "--steps", "1000000", "--pause", "0.02", "--out", scratch]
        with cluster("restart", command, nodes=2, workers=1, options=["--max-restarts", "100000"]) as c:
            c.start_all()
            c.wait_step(5)
            ours = [_trial(c, i) for i in range(trials)]
    peer = [_torchrun_trial() for _ in range(PEER_TRIALS)]
    times = sorted(t for t, _ in ours)
    theirs = sorted(t for t, _ in peer)
    clean = sum(good for _, good in ours)
    yield Bound("clean", clean, f"of {trials} restarts in one attempt", ">=", trials)
    yield Bound(
        "median",
        round(statistics.median(times), 2),
        f"s to the next new step (max {times[-1]:.2f})",
        "<=",
        15,
        samples=tuple(times),
    )
    peer_clean = sum(good for _, good in peer)
    yield Bound(
        "torchrun-beside.clean",
        peer_clean,
        f"of {PEER_TRIALS} in one attempt",
        "<=",
        PEER_TRIALS,
        samples=tuple(theirs),
    )
    yield Bound(
        "ratio", round(statistics.median(times) / statistics.median(theirs), 2), "of torchrun's median", "<=", 1.25
    )
