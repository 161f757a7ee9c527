"""SIGKILL of random workers at random times, and in the middle of captures and restores."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import Cluster, cluster
from harness.training import differences

SEED, WORKERS = 20261121, 2


def _word(path: Path, index: int) -> int:
    """A 64-bit word of a shared page; 0 when the file is not there."""
    try:
        with path.open("rb") as f, mmap.mmap(f.fileno(), 4096, prot=mmap.PROT_READ) as m:
            return int(struct.unpack_from("<Q", m, index * 8)[0])
    except (OSError, ValueError):
        return 0


def _capturing(c: Cluster, rank: int) -> bool:
    """Some slot of the rank is being written (state word 1)."""
    return any(_word(p, 1) == 1 for p in c.memory.glob(f"0/local-{rank}-slot-*"))


def _restoring(c: Cluster, rank: int) -> bool:
    """The rank is inside its restore section (board word 10)."""
    return _word(c.memory / "0" / f"local-{rank}-board", 10) > 0


def _kill(c: Cluster, how: str, rng: random.Random) -> str:
    rank = rng.randrange(WORKERS)
    if how == "random":
        c.worker_pid(rank)
        time.sleep(rng.uniform(0.0, 6.0))
    pid = c.worker_pid(rank)
    if how != "random":
        look = _capturing if how == "capture" else _restoring
        deadline = time.monotonic() + 20
        while not look(c, rank):
            if time.monotonic() > deadline:
                how = "random"
                break
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return "missed"
    return how


def _disturb(c: Cluster, kills: int, rng: random.Random) -> list[str]:
    c.start_all()
    done = []
    for i in range(kills):
        before = len(c.facts("IncidentOpened"))
        how = _kill(c, ("random", "capture", "restore")[i % 3], rng)
        if how != "missed":
            c.wait_for(lambda before=before: len(c.facts("IncidentOpened")) > before, 30, "the kill to be noticed")
            # The next kill may come at any time after the next start, not before it.
            c.wait_for(lambda n=len(done): len(c.facts("GenerationStarted")) >= n + 2, 30, "the next generation")
            done.append(how)
    return done


def measure(soak: bool) -> Iterator[Bound]:
    kills = 60 if soak else 11
    models = {
        "gpt": ["examples/gpt/train.py", "--steps", "700", "--batch", "2", "--persist", "100", "--out"],
        "convnet": ["figures/convnet.py", "--overlap", "--steps", "3000", "--out"],
    }
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    total, kinds = 0, []
    for name, command in models.items():
        steps = int(command[command.index("--steps") + 1])
        with tempfile.TemporaryDirectory() as scratch:
            calm, out = Path(scratch) / "calm", Path(scratch) / "out"
            with cluster(f"calm-{name}", [*command, str(calm)], workers=WORKERS) as c:
                codes = c.start_all().wait(400)
            with cluster(f"kill-{name}", [*command, str(out)], workers=WORKERS, options=["--max-restarts", "1000"]) as c:
                done = _disturb(c, kills, rng)
                codes += c.wait(400)
                attempts = len(c.facts("GenerationStarted")) - 1
                leaks = c.leaks()
            wrong = differences(calm, out, WORKERS, steps)
        total += len(done)
        kinds += done
        yield Bound(f"{name}.exit-codes", sum(map(abs, codes)), "", "=", 0)
        yield Bound(f"{name}.extra-attempts", attempts - len(done), "restarts beyond one per kill", "=", 0)
        yield Bound(f"{name}.different", len(wrong), "losses or final weights that differ", "=", 0, samples=tuple(wrong[:5]))
        yield Bound(f"{name}.leaks", len(leaks), "processes or arenas left", "=", 0, samples=tuple(leaks))
    yield Bound("kills", total, f"kills: {({k: kinds.count(k) for k in sorted(set(kinds))})}", ">=", 20)
    yield Bound("inside-capture", kinds.count("capture"), "kills", ">=", 3)
    yield Bound("inside-restore", kinds.count("restore"), "kills", ">=", 3)
