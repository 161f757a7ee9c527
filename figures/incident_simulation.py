"""Under faults of all kinds, incidents keep the invariants and blame the cause.

Broken GPUs, errors of workers, two at once, failures during recovery, crash loops, storms of
corrected errors and flapping links, in addition to all the faults of the control plane. Every named
invariant is checked after every event; whatever is blamed must be the cause.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator

from figures.bound import Bound
from harness.cluster import ROOT


def measure(soak: bool) -> Iterator[Bound]:
    seeds = 5000 if soak else 1000
    line = [
        "cargo",
        "test",
        "-q",
        "--release",
        "-p",
        "everstep-sim",
        "--test",
        "simulation",
        "no_seed",
        "--",
        "--nocapture",
    ]
    run = subprocess.run(
        line,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "EVERSTEP_SIM_SEEDS": str(seeds)},
    )
    out = run.stdout + run.stderr
    print("\n".join(found for found in out.splitlines() if found.startswith(("simulation", "seed"))))

    def numbers(pattern: str) -> list[int]:
        found = re.search(pattern, out)
        return [int(n) for n in found.groups()] if found else [0, 0, 0]

    ran, faults, kinds = numbers(r"simulation: (\d+) seeds, (\d+) faults of (\d+) kinds")
    right, wrong, nobody = numbers(r"simulation blames: (\d+) right, (\d+) wrong, (\d+) on nobody")
    yield Bound("seeds", ran, f"seeds, {faults} faults", ">=", 1000)
    yield Bound("kinds", kinds, "kinds of faults", ">=", 30)
    yield Bound(
        "broken",
        len(re.findall(r"^seed \d+:", out, re.MULTILINE)) + int(run.returncode != 0),
        "seeds that break an invariant or do not recover within the bound",
        "=",
        0,
    )
    yield Bound(
        "blamed-wrongly",
        round(100 * wrong / max(right + wrong, 1), 3),
        f"% of {right + wrong} blames ({nobody} incidents are blamed on nobody: only consequences were heard)",
        "<=",
        1,
    )
