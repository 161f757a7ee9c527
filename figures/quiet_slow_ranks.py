"""On a busy machine, healthy ranks are rarely reported as slow; a slow one is, within ten steps."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import Cluster, cluster

SCRIPT = "figures/scripts/slow_ranks.py"
#: Busy neighbours compute for this many seconds, then rest for as many.
TURNS = (3.0, 11.0, 40.0)
#: Steps of a job with a slow rank from the first slow one on.
SLOW_STEPS = 60


def _busy(turn: float) -> None:
    while True:
        until = time.monotonic() + turn
        while time.monotonic() < until:
            pass
        time.sleep(turn)


@contextlib.contextmanager
def _neighbours() -> Iterator[None]:
    processes = [multiprocessing.Process(target=_busy, args=(turn,), daemon=True) for turn in TURNS[:2]]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _announced(c: Cluster) -> list[dict[str, object]]:
    return [f for f in c.facts("SlowRank") if f["slow"]]


def _healthy(workers: int, seconds: float) -> tuple[int, float]:
    """Returns the number of announcements, and the minutes that it really took."""
    with (
        tempfile.TemporaryDirectory() as out,
        cluster(f"calm-{workers}", [SCRIPT, "--out", out, "--steps", "1000000"], workers=workers) as c,
    ):
        c.start_all()
        c.wait_step(5)
        began = time.monotonic()
        with _neighbours():
            while time.monotonic() - began < seconds:
                time.sleep(1)
        minutes = (time.monotonic() - began) / 60
        return len(_announced(c)), minutes


def _slow(times: float, begins: int, seed: int) -> int:
    """Returns the steps from the first slow one to its announcement; all slow steps and one more if
    there was none."""
    line = [
        SCRIPT,
        "--out",
        "{out}",
        "--steps",
        str(begins + SLOW_STEPS),
        "--base",
        "0.3",
        "--slow-from",
        str(begins),
        "--times",
        str(times),
        "--seed",
        str(seed),
    ]
    with tempfile.TemporaryDirectory() as out, cluster("slow", [x.replace("{out}", out) for x in line], workers=2) as c:
        c.start_all()
        # The job may end before.
        with contextlib.suppress(RuntimeError):
            c.wait_for(lambda: [f for f in _announced(c) if f["rank"] == 1], 120, "rank 1 to be named")
        named = [f for f in _announced(c) if f["rank"] == 1]
        if not named:
            return SLOW_STEPS + 1
        steps = [line.split() for line in (Path(out) / "steps-1").read_text().splitlines()]
        done = [int(step) for step, at in steps if float(at) <= float(named[0]["ts"])]
        return max(done, default=0) - begins + 1


def measure(soak: bool) -> Iterator[Bound]:
    seconds = 1800 if soak else 100
    for workers in (2, 4):
        lines, minutes = _healthy(workers, seconds)
        allowed = max(1.0, minutes / 10)
        yield Bound(
            f"{workers}-ranks.lines",
            lines,
            f"announcements in {minutes:.1f} min, ranks with jitter beside busy neighbours",
            "<=",
            allowed,
        )
    # The outcome depends on the jitter: by chance, ten steps of a rank that needs 1.8 times as long
    # may take no longer than the other rank's. So each bound is for the median of jobs with new
    # seeds.
    seed = int(time.time())
    print(f"seed {seed}")
    for times, trials in ((1.8, 5), (2.5, 3)):
        for begins in (12, 40):
            took = sorted(_slow(times, begins, seed + 10 * trial) for trial in range(trials))
            yield Bound(
                f"slow-{times:g}-from-{begins}",
                statistics.median(took),
                f"steps until the slow rank is named, median of {trials} jobs (of all: {took})",
                "<=",
                10,
                samples=tuple(took),
            )
