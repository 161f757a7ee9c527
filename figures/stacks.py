"""When one rank hangs, the stacks of all ranks are grouped, with the odd one first.

In a line of Python, in C with the interpreter released, in C with the interpreter held; or stopped,
so that it cannot respond. Requested by hand before any incident, and reported with the incident.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures.bound import Bound
from harness.cluster import EVERSTEP, Cluster, cluster

RANKS, ODD = 4, 2
#: What the odd rank's stack contains. The others' is in the backward pass (DDP's collectives).
PLACES = {"line": "faulty.py", "c": "faulty.py", "gil": "match", "stopped": ""}


def _by_hand(c: Cluster) -> tuple[list[dict[str, Any]], float]:
    began = time.monotonic()
    done = subprocess.run(
        [str(EVERSTEP), "stacks", c.job, "--json"], env=c.env, capture_output=True, text=True, check=False, timeout=30
    )
    return json.loads(done.stdout)["groups"], time.monotonic() - began


def _right(groups: list[dict[str, Any]], place: str) -> bool:
    """Returns whether all ranks are in a group and the odd one is alone, first and at its place."""
    every = sorted(r for g in groups for r in g["ranks"])
    first = groups[0] if groups else {"ranks": [], "stack": []}
    at = any(place in frame for frame in first["stack"][:2]) if place else not first["stack"]
    return every == list(range(RANKS)) and first["ranks"] == [ODD] and at


def measure(soak: bool) -> Iterator[Bound]:
    slowest = 0.0
    for kind, place in PLACES.items():
        with (
            tempfile.TemporaryDirectory() as scratch,
            cluster(
                f"stacks-{kind}",
                ["figures/scripts/faulty.py", "--out", scratch],
                workers=RANKS,
                options=["--max-restarts", "3"],
            ) as c,
        ):
            c.start_all()
            c.wait_step(30, 180)
            if kind == "stopped":
                c.kill_worker(ODD, signal.SIGSTOP)
            else:
                (Path(scratch) / f"fail-0-{ODD}").write_text(kind)
                c.wait_for((Path(scratch) / f"failed-0-{ODD}").exists, 30, kind)
            time.sleep(0.5)
            groups, took = _by_hand(c)
            slowest = max(slowest, took)
            c.wait_for(lambda: c.facts("IncidentOpened"), 60, "the hang")
            c.wait_for(lambda: c.facts("FirstStep")[1:], 120, "the recovery")
            text = subprocess.run(
                [str(EVERSTEP), "explain", "--job", c.job], env=c.env, capture_output=True, text=True, check=False
            ).stdout
            told = [line for line in text.splitlines() if line.startswith("Stacks")]
            print("\n".join(line for line in text.splitlines() if "rank" in line))
        yield Bound(f"{kind}.by-hand", int(_right(groups, place)), "all ranks grouped, the odd one on top", "=", 1)
        word = f"rank {ODD}" + (": no answer" if kind == "stopped" else " in ")
        yield Bound(
            f"{kind}.explained",
            int(len(told) == 1 and word in told[0] and place in told[0] + text),
            "the odd rank first in everstep explain",
            "=",
            1,
        )
    yield Bound("by-hand.seconds", round(slowest, 2), "s from asking to the answer of all ranks, at worst", "<=", 4)
