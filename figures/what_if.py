"""A simulated history, exported as records of incidents, keeps its goodput when read back.

The goodput computed from the records is compared with the goodput of the history.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound

TRACE = "gen:weibull,nodes=64,days=120,mtbf=120d,repair=lognormal:0.2d:1d"


def _goodputs(options: list[str]) -> dict[str, float]:
    said = subprocess.run(
        ["everstep", "simulate", *options, "--json"], capture_output=True, text=True, check=True
    ).stdout
    return {policy["policy"]: policy["goodput"]["mean"] for policy in json.loads(said)["policies"]}


def measure(soak: bool) -> Iterator[Bound]:
    worst, cases = 0.0, 0
    for policy in ("everstep", "wait", "elastic", "spares:4", "gemini"):
        for seed in range(20 if soak else 4):
            with tempfile.TemporaryDirectory() as into:
                path = Path(into) / "incidents.jsonl"
                there = _goodputs(
                    ["--trace", TRACE, "--policies", policy, "--seeds", "1", "--seed", str(seed), "--export", str(path)]
                )[policy]
                found = _goodputs(["--from-incidents", str(path), "--policies", "wait"])["recorded"]
            apart = abs(found - there) * 100
            print(f"{policy}, seed {seed}: {there * 100:.2f} % then, {found * 100:.2f} % read back")
            worst, cases = max(worst, apart), cases + 1
    yield Bound("worst", round(worst, 3), f"points apart at worst of {cases} histories under 5 policies", "<=", 0.5)
