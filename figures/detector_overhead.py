"""Detecting, accounting and explaining cost microseconds per step.

The agent of 8 workers has a bound as well. A step of the training thread contains a data
loader, a section and an update.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import EVERSTEP, ROOT, cluster, descendants

STEPS, TIMES = 10_000, 10


def _loop(*arguments: str, options: tuple[str, ...] = ()) -> float:
    """Returns the microseconds per step, as the median of ten tenths."""
    with tempfile.TemporaryDirectory() as scratch:
        line = [
            str(EVERSTEP),
            "run",
            "--standalone",
            *options,
            "figures/scripts/watched_loop.py",
            str(STEPS),
            *arguments,
        ]
        out = subprocess.run(
            line,
            cwd=ROOT,
            env={**os.environ, "EVERSTEP_STATE_DIR": scratch},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        found = re.search(r"us ([\d.]+)", out)
        assert found, out
        return float(found.group(1))


def _shares(seconds: float, workers: int) -> tuple[float, float]:
    """Returns the percentage of a core that the agent and the coordinator use."""
    ticks = os.sysconf("SC_CLK_TCK")

    def used(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    with cluster(
        "detectors", ["figures/scripts/plain_ddp.py", "--steps", "100000", "--pause", "0.5"], workers=workers
    ) as c:
        c.start_all()
        c.wait_for(lambda: c.runs(workers, warm=True), 300, "eight workers")
        time.sleep(5)
        pids = c.agents[0].pid, c.coordinator_pid()
        assert pids[0] not in descendants(pids[1])
        before = [used(p) for p in pids]
        time.sleep(seconds)
        agent, coordinator = ((used(p) - b) / ticks / seconds * 100 for p, b in zip(pids, before, strict=True))
    return agent, coordinator


def measure(soak: bool) -> Iterator[Bound]:
    pairs = [(_loop("--plain", options=("--no-preload",)), _loop()) for _ in range(TIMES)]
    costs = [w - o for o, w in pairs]
    yield Bound(
        "per-step",
        round(statistics.median(costs), 2),
        f"us on the training thread, median of {TIMES} alternations ({min(costs):.1f} to {max(costs):.1f}); "
        f"a step is {statistics.median(o for o, _ in pairs):.1f} us without",
        "<=",
        20,
        samples=tuple(pairs),
    )
    agent, coordinator = _shares(120 if soak else 60, 8)
    print(f"coordinator: {coordinator:.2f} % of a core")
    yield Bound("agent", round(agent, 2), "% of a core for the agent of eight workers", "<=", 1)
