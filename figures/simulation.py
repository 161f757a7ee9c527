"""Under simulated faults, the control plane keeps every invariant, and every planted bug is
found."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from figures.bound import Bound
from harness.cluster import ROOT
from harness.counts import counts


def _test(arguments: list[str], env: dict[str, str]) -> tuple[int, str]:
    import os

    line = ["cargo", "test", "-q", "-p", "everstep-sim", *arguments, "--", "--nocapture"]
    done = subprocess.run(line, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def measure(soak: bool) -> Iterator[Bound]:
    seeds = 20_000 if soak else 600
    code, text = _test(["--test", "simulation"], {"EVERSTEP_SIM_SEEDS": str(seeds)})
    summary = re.search(r"simulation: (\d+) seeds, (\d+) faults of (\d+) kinds", text)
    kinds = [int(n) for n in re.findall(r"\w+: (\d+)", (re.search(r"simulation faults: \{(.*)\}", text) or [""])[0])]
    ran, faults = (int(summary[1]), int(summary[2])) if summary else (0, 0)
    yield Bound("seeds", ran, "seeds of 32 simulated minutes, 16 nodes", ">=", 500)
    yield Bound("faults-per-seed", faults // max(ran, 1), "faults", ">=", 20)
    yield Bound(
        "kinds", sum(n >= 100 for n in kinds), "kinds injected 100 times or more", ">=", 16, samples=tuple(kinds)
    )
    violations = len(re.findall(r"^seed \d+:", text, re.MULTILINE))
    yield Bound("violations", violations if code == 0 or violations else 1, "violations", "=", 0)
    same = "the_same_seed_gives_the_same_trace ... ok" in text or code == 0
    yield Bound("same-trace", int(same), "equal trace hashes (50 seeds twice)", "=", 1)
    _, text = _test(["--features", "planted", "--test", "planted"], {})
    found = re.findall(r"^planted (\w+): found by (INV-\d+ \w+) at seed (\d+)", text, re.MULTILINE)
    bugs = counts(ROOT)["planted bugs"]
    yield Bound("planted-found", len(found), "planted bugs found within 200 seeds", ">=", bugs, samples=tuple(found))
    yield Bound("planted-violations", len(found), "violations with a bug planted", "=", 0, control=True)
