"""SIGKILL of the writer at any point of the copy leaves a whole step, never a torn one.

A step is never torn or mixed, and the previous one always remains.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from figures import transfer
from figures.bound import Bound
from figures.scripts.writer import TENSORS, WORDS, content
from harness.cluster import ROOT


def measure(soak: bool) -> Iterator[Bound]:
    from everstep import _internal

    kills = 3000 if soak else 1000
    rng = random.Random(20261121)
    torn = lost = in_writing = 0
    size = WORDS * 8
    with transfer.memory() as memory:
        paths = [str(memory / f"slot-{i}") for i in range(3)]
        for path in paths:
            _internal.reserve_slot(path, _internal.bytes_per_slot(TENSORS * size, 64 << 10))
        newest = 0
        for _ in range(kills):
            line = [sys.executable, "-m", "figures.scripts.writer", ",".join(paths), str(newest)]
            child = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE)
            assert child.stdout is not None
            said = int(child.stdout.readline())
            time.sleep(rng.uniform(0, 0.012))
            child.send_signal(signal.SIGKILL)
            said = max([said, *(int(x) for x in child.stdout.read().split(b"\n")[:-1] if x)])
            child.wait()
            for path in paths:
                with open(path, "rb") as f:
                    in_writing += f.read(16)[8] == 1
            arena = _internal.Arena(paths, "writer", 0, 1, 2)
            held = [step for step, _ in arena.held()]
            lost += not held or held[0] < said or len(held) < 2
            for step in held:
                shard = arena.shard(step)
                shard.verify()
                torn += any(shard.bytes(f"t{i}") != content(step, i) for i in rng.sample(range(TENSORS), 6))
            newest = held[0]
    yield Bound("kills", kills, f"of the writer, {in_writing} of them in the middle of a copy", ">=", 1000)
    yield Bound("torn", torn, "sealed slots that do not hold one step, whole", "=", 0)
    yield Bound("lost", lost, "times that the newest sealed step or the one before was not there", "=", 0)
