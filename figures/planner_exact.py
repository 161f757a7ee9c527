"""The planner finds the best of all possible plans.

Up to five jobs on up to ten units, in all three modes, with dips, minima and ties.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator

from figures.bound import Bound
from harness.cluster import ROOT


def measure(soak: bool) -> Iterator[Bound]:
    cases = 1_000_000 if soak else 120_000
    line = ["cargo", "test", "-q", "--release", "-p", "everstep-planner", "--test", "planner", "--", "--nocapture"]
    run = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "PROPTEST_CASES": str(cases)}
    )
    found = re.search(r"planner: (\d+) problems with floor, (\d+) with paper, (\d+) with fair", run.stdout)
    modes = [int(n) for n in found.groups()] if found else [0, 0, 0]
    tables = re.search(r"planner: (\d+) plans in tables", run.stdout)
    print(run.stdout[-2000:] if run.returncode else f"floor, paper, fair: {modes}")
    yield Bound("instances", sum(modes), f"random problems (each mode at least {min(modes)})", ">=", 100_000)
    yield Bound(
        "wrong",
        int(run.returncode != 0),
        "of them: another plan than the best of all, or than the first of equals; other by the order of jobs; not idempotent",
        "=",
        0,
    )
    yield Bound(
        "table.plans",
        int(tables[1]) if tables else 0,
        "plans in tables, each equal to the plan that would be made",
        ">=",
        100_000,
    )
