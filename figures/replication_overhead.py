"""A copy of every step at another node slows training by at most 1 %.

The copies share the network with the collectives of the training loop. Two hosts in network
namespaces with 500 Mbit/s between them. FSDP2 with real collectives; computing is a timed wait. All
ways of sending alternate in one run (see ``figures/scripts/overlap.py``). Each must have copied a
step before the next is over.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures.bound import Bound
from figures.hosts import hosts
from figures.kill_matrix import Hosts
from figures.scripts.overlap import WARM

RATE = 500e6 / 8
#: The share of the rate that remains for data after Ethernet, IP and TCP headers.
PAYLOAD = 0.95


def _run(rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch, hosts(2, "500mbit") as names:
        command = ["figures/scripts/overlap.py", "--out", scratch, "--rounds", str(rounds)]
        c = Hosts(names, "overlap", command)
        try:
            c.start_all()
            for agent in c.agents.values():
                agent.wait(1500)
            return [json.loads(line) for line in (Path(scratch) / "steps.jsonl").read_text().splitlines()]
        finally:
            c.close()


def _error(times: list[float]) -> float:
    """Returns the standard error of a median."""
    return 1.2533 * statistics.stdev(times) / len(times) ** 0.5


def measure(soak: bool) -> Iterator[Bound]:
    rows = _run(8 if soak else 3)
    times: dict[str, list[float]] = {}
    for before, row in itertools.pairwise(rows):
        # The first step after a change of mode still has traffic of the previous one.
        if row["step"] > WARM + 1 and row["arm"] == before["arm"]:
            times.setdefault(row["arm"], []).append(row["seconds"])
    middle = {arm: statistics.median(t) for arm, t in times.items()}
    cost = {arm: (m / middle["none"] - 1) * 100 for arm, m in middle.items()}
    length, spans = next(r["profile"] for r in rows if r["profile"])
    idle, size = sum(spans), rows[-1]["bytes"]
    share = size / (idle * RATE * PAYLOAD) * 100
    yield Bound(
        "idle-bytes-used",
        round(share, 1),
        f"% of what {idle:.2f} s idle of {length:.2f} s take ({100 - share:.0f} % left)",
        "<=",
        80,
    )
    yield Bound("idle-bytes-needed", round(share, 1), f"% ({size / 1e6:.0f} MB each step)", ">=", 50)
    n = len(times["ours"])
    yield Bound(
        "ours",
        round(cost["ours"], 2),
        f"% of a step of {middle['none']:.3f} s ({n} steps)",
        "<=",
        1,
        samples=tuple(times["ours"] + times["none"]),
    )
    yield Bound(
        "pacing-off", round(cost["unpaced"], 2), "% (the mechanism off)", ">=", 5, samples=tuple(times["unpaced"])
    )
    for slower, faster, sense in (("unpipelined", "ours", ">="), ("blocking", "unpipelined", ">")):
        # The noise is reported, but does not widen the bound.
        noise = 2 * (_error(times[slower]) ** 2 + _error(times[faster]) ** 2) ** 0.5 / middle["none"] * 100
        what = f"% over {faster}, itself {cost[slower]:.2f} % (two standard errors: {noise:.2f})"
        yield Bound(slower, round(cost[slower] - cost[faster], 2), what, sense, 0, samples=tuple(times[slower]))
