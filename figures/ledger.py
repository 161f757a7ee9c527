"""The time ledger agrees with what is known about a run second by second.

The run has an evaluation, a wait for data and a kill, and the coordinator is killed on the way.
Goodput is compared with the result from the script's own log lines.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures.bound import Bound
from harness.cluster import EVERSTEP, ROOT, Cluster, cluster

STEPS, PAUSE = 600, 0.15
EVAL_AT, EVAL, STALL_AT, STALL = 150, 60.0, 300, 30.0
WORKERS = 2


def _goodput(c: Cluster, *options: str) -> dict[str, Any]:
    line = [str(EVERSTEP), "goodput", c.job, "--json", *options]
    done = subprocess.run(line, env=c.env, capture_output=True, text=True, check=True, timeout=60)
    return dict(json.loads(done.stdout)["jobs"][0])


def _own_words(out: Path) -> tuple[float, float]:
    """Returns the rank-seconds of new steps according to the script's log, and those of its loader.

    Each step counts up to the median of all.
    """
    productive, data = 0.0, 0.0
    for rank in range(WORKERS):
        begins: dict[int, float] = {}
        waits: dict[int, float] = {}
        ends: dict[int, list[tuple[float, float]]] = {}
        for line in (out / f"log-{rank}").read_text().splitlines():
            kind, step, value = line.split()[0], int(line.split()[1]), float(line.split()[2])
            if kind == "begin":
                begins[step] = value
            elif kind == "data":
                waits[step] = value
            elif kind == "end":
                # The time between two steps belongs to the checkpoint and is not part of a step.
                ends.setdefault(step, []).append((begins[step], value))
        data += sum(waits.values())
        took = {
            s: min(e - b - waits.get(s, 0.0) - (EVAL if s == EVAL_AT else 0.0) for b, e in all_)
            for s, all_ in ends.items()
        }
        usual = statistics.median(took.values())
        productive += sum(min(t, usual) for t in took.values())
    return productive, data


def _exactness() -> Iterator[Bound]:
    run = subprocess.run(
        ["cargo", "test", "-q", "-p", "everstep-core", "--test", "ledger"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    yield Bound(
        "random-histories.failed",
        int(run.returncode != 0),
        "of 1500 random histories, in which each sum is exact and no total shrinks",
        "=",
        0,
    )


@dataclass(frozen=True)
class Job:
    """What a job's accounts said, and what a clock outside measured."""

    codes: list[int]
    #: Rank-seconds by a clock outside.
    held: float
    #: When a worker was killed.
    killed: float
    #: The accounts before and after the coordinator was killed, and at the end.
    before: dict[str, Any]
    after: dict[str, Any]
    found: dict[str, Any]
    incidents: int


def _job(scratch: str) -> Job:
    command = [
        "figures/scripts/accounted.py",
        "--out",
        scratch,
        "--steps",
        str(STEPS),
        "--pause",
        str(PAUSE),
        "--eval-at",
        str(EVAL_AT),
        "--eval",
        str(EVAL),
        "--stall-at",
        str(STALL_AT),
        "--stall",
        str(STALL),
    ]
    with cluster("ledger", command, nodes=1, workers=WORKERS) as c:
        began = time.time()
        c.start_all()
        c.wait_step(100)
        # The coordinator dies in the middle of the evaluation, which must not affect any sum.
        c.wait_for(lambda: any(w["doing"] == "section eval" for w in c.workers_now().values()), 120, "the evaluation")
        before = _goodput(c)
        pid = int(json.loads((c.store / "endpoint.json").read_text())["pid"])
        os.kill(pid, signal.SIGKILL)
        time.sleep(20)
        after = _goodput(c)
        c.wait_step(STALL_AT + 60, timeout=180)
        killed = c.kill_worker(1, signal.SIGKILL)
        codes = c.wait(300)
        held = (time.time() - began) * WORKERS
        found = _goodput(c)
        opened = c.facts("IncidentOpened")
    return Job(codes, held, killed, before, after, found, len(opened))


def measure(soak: bool) -> Iterator[Bound]:
    yield from _exactness()
    with tempfile.TemporaryDirectory() as scratch:
        job = _job(scratch)
        productive, data = _own_words(Path(scratch))
    found, held = job.found, job.held
    spent = {k: v / 1e6 for k, v in found["spent_us"].items()}
    print(json.dumps({k: round(v, 1) for k, v in spent.items()}), f"killed at {job.killed:.1f}")
    total = sum(found["spent_us"].values())
    yield Bound("run.codes", sum(job.codes), "exit codes", "=", 0)
    yield Bound("sum.off", abs(total - found["held_us"]), "us between the sum of the parts and the whole", "=", 0)
    yield Bound(
        "held.off",
        round(100 * abs(total / 1e6 / held - 1), 2),
        "% between the whole and rank-seconds on a clock outside (starting and ending the agent included)",
        "<=",
        2,
    )
    yield Bound("unknown", round(100 * spent.get("unknown", 0.0) / (total / 1e6), 2), "% of the time", "<=", 1)
    yield Bound(
        "eval.off",
        round(100 * abs(spent.get("eval", 0) / (EVAL * WORKERS) - 1), 2),
        f"% of {EVAL * WORKERS:.0f} rank-s of evaluation",
        "<=",
        2,
    )
    yield Bound(
        "data-stall.off",
        round(100 * abs(spent.get("data_stall", 0) / data - 1), 2),
        f"% of the {data:.1f} rank-s that the loader took by its own clock",
        "<=",
        2,
    )
    lost = sum(spent.get(k, 0.0) for k in ("detect", "decide"))
    yield Bound("kill.incidents", job.incidents, "incidents", "=", 1)
    print(
        f"kill: detect + decide {lost:.2f} rank-s, recompute {spent.get('recompute', 0):.2f}, "
        f"restore {spent.get('restore', 0):.2f}, init {spent.get('init', 0):.1f}"
    )
    ours, theirs = found["goodput"], productive / held
    yield Bound(
        "goodput.apart",
        round(100 * abs(ours - theirs), 2),
        f"points from {100 * theirs:.1f} %, recomputed from the script's own log",
        "<=",
        0.5,
    )
    shrunk = sum(1 for k, v in job.before["spent_us"].items() if job.after["spent_us"].get(k, 0) < v and k != "unknown")
    grown = (job.after["held_us"] - job.before["held_us"]) / 1e6 / WORKERS
    yield Bound("coordinator-killed.shrunk", shrunk, "totals that are less after the coordinator was killed", "=", 0)
    yield Bound(
        "coordinator-killed.held", round(grown, 1), "s of 20 (and the time to ask) accounted for meanwhile", ">=", 5
    )
