"""A training loop that waits for its durable checkpoints (no agent).

Another process comes and goes on the same disk. A step is a timed wait. Writes one line per
interval between two checkpoints into ``OUT/intervals.jsonl``.

``--phases NEIGHBOUR:STEP:CHECKPOINTS,…``: the number of checkpoints, and the seconds per step, with
a neighbour (1) or not (0).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import torch
from torch import nn

import everstep

#: Processes of the neighbour; each writes past the page cache, as fast as it can. Two make a
#: checkpoint about seven times as expensive, which is what is needed. Four stall single checkpoints
#: for seconds, and thirty of these take half an hour.
WRITERS = 2


class Neighbour:
    """Other writes to the same disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []

    def set(self, on: bool) -> None:
        """Starts or stops the writes."""
        if on == bool(self._processes):
            return
        if on:
            for i in range(WRITERS):
                line = (
                    f"while kill -0 {os.getpid()} 2>/dev/null; do dd if=/dev/zero of={self._directory}/neighbour-{i} "
                    "bs=8M count=32 oflag=direct conv=notrunc status=none; done"
                )
                self._processes.append(subprocess.Popen(["bash", "-c", line], start_new_session=True))
            return
        for process in self._processes:
            subprocess.run(["kill", "--", f"-{process.pid}"], check=False)
            process.wait()
        self._processes = []


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--every", type=int, default=0, help="steps between checkpoints; 0 measures")
    p.add_argument("--budget", type=float, default=0.05)
    p.add_argument("--phases", required=True)
    p.add_argument("--megabytes", type=int, default=24)
    a = p.parse_args()
    torch.set_num_threads(1)
    model = nn.ParameterList([torch.randn(a.megabytes * 250_000 // 20) for _ in range(20)])
    ckpt = everstep.CheckpointManager(a.out / "ckpt", persist=a.every or "auto", stall_budget=a.budget, model=model)
    ckpt.restore()
    neighbour = Neighbour(a.out)
    step = 0
    # Seconds of the step whose checkpoint began the interval.
    before = 0.0
    with (a.out / "intervals.jsonl").open("w") as log:
        for number, phase in enumerate(a.phases.split(",")):
            on, seconds, checkpoints = phase.split(":")
            neighbour.set(on == "1")
            times: list[float] = []
            at = time.perf_counter()
            done = 0
            while done <= int(checkpoints):
                time.sleep(float(seconds))
                step += 1
                saved = "disk" in ckpt.step(step).saved
                now = time.perf_counter()
                times.append(now - at)
                at = now
                if saved:
                    # The first one of a phase ends an interval of the previous phase.
                    if done:
                        # The checkpoint that began the interval is in the last step of the previous
                        # one.
                        line = {
                            "phase": number,
                            "steps": len(times) - 1,
                            "cost": before - statistics.median(times[:-1] or times),
                            "quiet": statistics.median(times[:-1] or times),
                        }
                        log.write(json.dumps(line) + "\n")
                        log.flush()
                    before, times = times[-1], []
                    done += 1
    neighbour.set(False)
    ckpt.close()


if __name__ == "__main__":
    main()
