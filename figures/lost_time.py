"""A checkpoint costs at most a third of the time that DCP's asynchronous modes take.

This holds for training time and for processor time. All checkpoints become durable in the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from figures.bound import Bound
from figures.paired import extra, run

PEERS = ("dcp-thread", "dcp-stager", "dcp-process")


def measure(soak: bool) -> Iterator[Bound]:
    found = run(",".join(["none", "everstep", *PEERS]), 25 if soak else 13)
    cost = extra(found)
    print({mode: (round(lost, 3), round(cpu, 2)) for mode, (lost, cpu) in cost.items()}, flush=True)
    for part, what, index in (("lost", "s of training lost", 0), ("cpu", "processor seconds", 1)):
        best = min(PEERS, key=lambda mode: cost[mode][index])
        ours, theirs = max(cost["everstep"][index], 0.0), cost[best][index]
        samples = tuple(found["everstep"].seconds + found["none"].seconds)
        yield Bound(
            part,
            round(ours / theirs, 3),
            f"x the {what} of {best} ({ours:.3f} against {theirs:.3f} per GB)",
            "<=",
            0.333,
            samples=samples,
        )
