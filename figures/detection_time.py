"""A fault is an incident within seconds, and a slow rank is named within ten steps.

A machine cut off, a worker killed, an exception, a worker stopped. Unicron: 5.6 s, 1.8 s, 0.3 s,
three steps.
"""

from __future__ import annotations

import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures.bound import Bound
from figures.hosts import hosts, link
from harness.cluster import Cluster, cluster
from harness.machines import Machines

OPTIONS = ["--max-restarts", "1000"]
COMMAND = ["figures/scripts/faulty.py"]


def _incident(c: Cluster, after: float, timeout: float = 30) -> dict[str, Any]:
    return dict(
        c.wait_for(
            lambda: next((f for f in c.facts("IncidentOpened") if f["ts"] >= after - 0.002), None),
            timeout,
            "the incident",
        )
    )


def _stepping(c: Cluster, size: int, ahead: int = 6) -> None:
    """Waits until all ranks of the full world have made some steps of their newest generation."""

    def ready() -> bool:
        status = c.status()
        steps = [w["step"] for w in status.get("workers", []) if w["step"] is not None]
        first, opened = c.facts("FirstStep"), c.facts("IncidentOpened")
        newest = (
            first
            and first[-1]["generation"] == status.get("generation")
            and not (opened and opened[-1]["ts"] > first[-1]["ts"])
        )
        return bool(
            newest
            and status.get("world_size") == size
            and len(steps) == size
            and min(steps) >= first[-1]["step"] + ahead
        )

    c.wait_for(ready, 120, "steps")


def _line(name: str, seconds: list[float], limit: float) -> Iterator[Bound]:
    samples = tuple(round(s, 3) for s in sorted(seconds))
    yield Bound(
        f"{name}.median", round(statistics.median(seconds), 3), f"s of {len(seconds)}", "<=", limit, samples=samples
    )
    yield Bound(f"{name}.worst", round(max(seconds), 3), "s", "<=", limit)


def _cut_off(times: int) -> Iterator[Bound]:
    seconds = []
    with tempfile.TemporaryDirectory() as scratch, hosts(2) as names:
        c = Machines(names, "cut", [*COMMAND, "--out", scratch], options=OPTIONS)
        try:
            c.start_all()
            for _ in range(times):
                _stepping(c, 2)
                at = time.time()
                link(names, 1, "down")
                seconds.append(_incident(c, at)["ts"] - at)
                link(names, 1, "up")
                time.sleep(0.5)
        finally:
            c.close()
    yield from _line("node-cut-off", seconds, 1.5)


def _workers(times: int) -> Iterator[Bound]:
    killed, raised, stopped = [], [], []
    with (
        tempfile.TemporaryDirectory() as scratch,
        cluster("detect", [*COMMAND, "--out", scratch], options=OPTIONS) as c,
    ):
        c.start_all()
        out = Path(scratch)
        for _ in range(times):
            _stepping(c, 2)
            at = c.kill_worker(1, signal.SIGKILL)
            killed.append(_incident(c, at)["ts"] - at)
        for _ in range(times):
            _stepping(c, 2)
            asked = time.time()
            (out / "failed-0-0").unlink(missing_ok=True)
            (out / "fail-0-0").write_text("script-error")
            at = float(
                c.wait_for(
                    lambda: (out / "failed-0-0").exists() and (out / "failed-0-0").read_text(), 20, "the exception"
                )
            )
            raised.append(_incident(c, asked)["ts"] - at)
        for _ in range(times):
            _stepping(c, 2)
            at = c.kill_worker(1, signal.SIGSTOP)
            stopped.append(_incident(c, at)["ts"] - at)
    yield from _line("killed", killed, 0.1)
    yield from _line("exception", raised, 0.1)
    yield from _line("stopped", stopped, 2.5)


def _slow(times: int) -> Iterator[Bound]:
    steps, wrong = [], 0
    with (
        tempfile.TemporaryDirectory() as scratch,
        cluster("slow", ["figures/scripts/heavy.py", "--out", scratch], options=OPTIONS, workers=2) as c,
    ):
        c.start_all()
        _stepping(c, 2, 12)
        for turn in range(times):
            rank = turn % 2
            before, at = c.step(), time.time()
            c.inject("slow", "--rank", str(rank), "--percent", "30", "--for", "40s")
            named = c.wait_for(
                lambda at=at: next((f for f in c.facts("SlowRank") if f["ts"] >= at and f["slow"]), None),
                38,
                "the name",
            )
            steps.append(c.step() - before)
            wrong += int(named["rank"] != rank)
            c.wait_for(
                lambda at=named["ts"]: [f for f in c.facts("SlowRank") if f["ts"] > at and not f["slow"]],
                90,
                "the recovery",
            )
            time.sleep(3)
    print("steps until named:", steps)
    yield Bound("slow.named", max(steps), f"steps at worst, of {times} slowdowns", "<=", 10, samples=tuple(steps))
    yield Bound("slow.wrong", wrong, "names of a rank that is well", "=", 0)


def measure(soak: bool) -> Iterator[Bound]:
    times = 20
    yield from _workers(times)
    yield from _slow(4)
    yield from _cut_off(times)
