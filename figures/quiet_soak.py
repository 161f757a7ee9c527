"""Half an hour of a healthy but irregular run has no incident.

Then one worker is stopped: one incident.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator

from figures.bound import Bound
from harness.cluster import cluster


def measure(soak: bool) -> Iterator[Bound]:
    steps, base = (5200, 0.3)
    command = ["figures/scripts/quiet.py", "--steps", "1000000", "--base", str(base)]
    with (
        tempfile.TemporaryDirectory() as scratch,
        cluster("quiet", [*command, "--out", scratch, "--steps", str(steps + 2000)], workers=2) as c,
    ):
        began = time.monotonic()
        c.start_all()
        while (time.monotonic() - began < 1800 or c.step() < steps) and not c.facts("IncidentOpened"):
            time.sleep(5)
            if time.monotonic() - began > 3600:
                break
        minutes, reached = (time.monotonic() - began) / 60, c.step()
        early = c.facts("IncidentOpened")
        print(early)
        c.kill_worker(1, signal.SIGSTOP)
        c.wait_for(lambda: len(c.facts("FirstStep")) > 1 + len(early), 120, "the recovery")
        time.sleep(10)
        all_ = c.facts("IncidentOpened")
    yield Bound("minutes", round(minutes, 1), "min", ">=", 30)
    yield Bound(
        "steps",
        reached,
        "steps: jitter 40 %, 10 stalls of 10 steps' time, 5 evaluations of 30 that nobody announces, a first step of 50",
        ">=",
        5000,
    )
    yield Bound("quiet.incidents", len(early), "incidents", "=", 0)
    yield Bound("stopped.incidents", len(all_) - len(early), "incident after one worker was stopped", "=", 1)
