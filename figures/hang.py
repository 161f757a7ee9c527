"""A worker that is alive but makes no progress is detected within seconds and restarted.

It is stopped, holds the interpreter, or stays on one line forever.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import ROOT, Cluster, cluster, descendants

STEPS, DETECT = 400, 2.0
COMMAND = ["figures/convnet.py", "--steps", str(STEPS), "--pause", "0.03"]


def _noticed(c: Cluster, began: float, timeout: float) -> float:
    """Returns the seconds from the beginning of the silence to the incident."""
    opened = c.wait_for(
        lambda: next((f for f in c.facts("IncidentOpened") if f["ts"] >= began), None), timeout, "the hang"
    )
    return float(opened["ts"]) - began


def _stopped(c: Cluster) -> float:
    c.start_all()
    c.wait_step(30)
    return c.kill_worker(1, signal.SIGSTOP)


def _torchrun_silence(out: Path, watch: float) -> float:
    """Returns for how long torchrun reports nothing after one of its workers was stopped."""
    torchrun = Path(sys.executable).parent / "torchrun"
    line = [
        str(torchrun),
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        *COMMAND,
        "--plain",
        "--out",
        str(out),
    ]
    with tempfile.TemporaryFile() as log:
        run = subprocess.Popen(
            line, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        )
        try:
            at, deadline = out / "at-1", time.monotonic() + 60
            while not (at.exists() and int(at.read_text() or 0) > 30) and time.monotonic() < deadline:
                time.sleep(0.05)
            workers = [p for p in descendants(run.pid) if b"convnet" in Path(f"/proc/{p}/cmdline").read_bytes()]
            size, began = os.fstat(log.fileno()).st_size, time.monotonic()
            os.kill(workers[-1], signal.SIGSTOP)
            while time.monotonic() - began < watch and os.fstat(log.fileno()).st_size == size and run.poll() is None:
                time.sleep(0.1)
            return time.monotonic() - began
        finally:
            for pid in [*descendants(run.pid), run.pid]:
                os.kill(pid, signal.SIGKILL)
            run.wait()


def measure(soak: bool) -> Iterator[Bound]:
    limit = DETECT + 1.0  # steps are far shorter than a third of the detect timeout
    for kind in ("stopped", "gil", "line"):
        with tempfile.TemporaryDirectory() as scratch:
            extra = [] if kind == "stopped" else ["--spin", kind, "--spin-at", "60"]
            with cluster(f"hang-{kind}", [*COMMAND, *extra, "--out", scratch], options=["--max-restarts", "3"]) as c:
                if kind == "stopped":
                    began = _stopped(c)
                else:
                    c.start_all()
                    mark = Path(scratch) / "spun"
                    c.wait_for(lambda mark=mark: mark.exists() and mark.read_text(), why="the spin")
                    began = float(mark.read_text())
                seconds = _noticed(c, began, 60)
                codes = c.wait(180)
                generations = len(c.facts("GenerationStarted"))
                leaks = c.leaks()
            yield Bound(f"{kind}.noticed", round(seconds, 3), "s", "<=", limit)
            recovered = int(not any(codes) and generations == 2 and not leaks)
            yield Bound(f"{kind}.recovered", recovered, "finished after one restart, nothing left", "=", 1)
    with tempfile.TemporaryDirectory() as scratch:
        options = ["--max-restarts", "3", "--detect-timeout", "60s"]
        with cluster("hang-off", [*COMMAND, "--out", scratch], options=options) as c:
            began = _stopped(c)
            try:
                seconds = _noticed(c, began, limit + 2)
            except TimeoutError:
                seconds = limit + 2
        yield Bound("detection-off.noticed", round(seconds, 3), "s", "<=", limit, control=True)
    with tempfile.TemporaryDirectory() as scratch:
        yield Bound("torchrun-beside.silent", round(_torchrun_silence(Path(scratch), 30.0), 1), "s", ">=", 30)
