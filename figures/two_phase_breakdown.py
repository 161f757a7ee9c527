"""CheckFreq's Table 3: a checkpoint in the training loop, its second half behind training, both halves behind training.

As there, a device computes: the processor has nothing to do in the meantime.
"""

from __future__ import annotations

from collections.abc import Iterator

from figures.bound import Bound
from figures.paired import extra, run


def measure(soak: bool) -> Iterator[Bound]:
    cost = extra(run("none,synchronous,persist-pipelined,everstep", 21 if soak else 9, "--device", "--steps", "5"))
    synchronous, half, both = (cost[mode][0] for mode in ("synchronous", "persist-pipelined", "everstep"))
    yield Bound("synchronous", round(synchronous, 3), "s lost per checkpoint of 1 GB", ">=", round(half, 3))
    yield Bound("persist-pipelined", round(half, 3), "s lost", "<=", round(synchronous, 3))
    yield Bound("both-pipelined", round(both, 3), "s lost", "<=", round(half, 3))
