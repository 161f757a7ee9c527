"""Kills of the coordinator while two nodes train cost no step and restart no worker."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import cluster
from harness.training import losses

STEPS = 700


def measure(soak: bool) -> Iterator[Bound]:
    kills = 100 if soak else 12
    steps = STEPS * (8 if soak else 1)
    rng = random.Random(7)
    with tempfile.TemporaryDirectory() as scratch:
        command = ["figures/convnet.py", "--steps", str(steps), "--pause", "0.03", "--out", scratch]
        with cluster("coordinator", command, nodes=2, workers=1, options=["--max-restarts", "3"]) as c:
            c.start_all()
            c.wait_step(20)
            back = []
            for _ in range(kills):
                before = len(c.facts("CoordinatorStarted"))
                when = c.kill_coordinator()
                c.wait_for(lambda before=before: len(c.facts("CoordinatorStarted")) > before, 20, "a new coordinator")
                back.append(c.facts("CoordinatorStarted")[-1]["ts"] - when)
                c.wait_for(lambda: len(c.workers_now()) == 2, 20, "both nodes to be back")
                time.sleep(rng.uniform(0.1, 1.0))
            training = c.step()
            codes = c.wait(300)
            generations = len(c.facts("GenerationStarted"))
        again = [s for rank in range(2) for s in _repeated(Path(scratch), rank)]
    yield Bound("kills", len(back), f"kills in mid-training (step {training} of {steps} after the last)", ">=", 10)
    yield Bound("steps-lost", len(again), "steps computed twice", "=", 0)
    yield Bound("workers-restarted", generations - 1, "restarts", "=", 0)
    yield Bound("exit-codes", sum(codes), "", "=", 0)
    yield Bound("back-median", round(sorted(back)[len(back) // 2], 3), "s", "<=", 2.0, samples=tuple(back))
    with tempfile.TemporaryDirectory() as scratch:
        command = ["figures/convnet.py", "--steps", "200", "--pause", "0.03", "--out", scratch]
        with cluster("worker-instead", command, nodes=2, workers=1, options=["--max-restarts", "3"]) as c:
            c.start_all()
            c.wait_step(20)
            c.kill_worker(1)
            c.wait(120)
            restarted = len(c.facts("GenerationStarted")) - 1
    yield Bound("worker-killed-instead", restarted, "restarts", "=", 0, control=True)


def _repeated(out: Path, rank: int) -> list[int]:
    lines = (out / f"losses-{rank}.jsonl").read_text().splitlines()
    return list(range(len(lines) - len(losses(out, rank))))
