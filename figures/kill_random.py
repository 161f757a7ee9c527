"""SIGKILL of random workers, also amid captures and restores, changes no loss and no weight."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from figures.kills import disturb
from harness.cluster import cluster
from harness.training import differences

SEED, WORKERS = 20261121, 2


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
            with cluster(
                f"kill-{name}", [*command, str(out)], workers=WORKERS, options=["--max-restarts", "1000"]
            ) as c:
                done = disturb(c, [("random", "capture", "restore")[i % 3] for i in range(kills)], rng)
                codes += c.wait(400)
                attempts = len(c.facts("GenerationStarted")) - 1
                leaks = c.leaks()
            wrong = differences(calm, out, WORKERS, steps)
        total += len(done)
        kinds += done
        yield Bound(f"{name}.exit-codes", sum(map(abs, codes)), "", "=", 0)
        yield Bound(f"{name}.extra-attempts", attempts - len(done), "restarts beyond one per kill", "=", 0)
        yield Bound(
            f"{name}.different", len(wrong), "losses or final weights that differ", "=", 0, samples=tuple(wrong[:5])
        )
        yield Bound(f"{name}.leaks", len(leaks), "processes or arenas left", "=", 0, samples=tuple(leaks))
    yield Bound("kills", total, f"kills: { ({k: kinds.count(k) for k in sorted(set(kinds))}) }", ">=", 20)
    yield Bound("inside-capture", kinds.count("capture"), "kills", ">=", 3)
    yield Bound("inside-restore", kinds.count("restore"), "kills", ">=", 3)
