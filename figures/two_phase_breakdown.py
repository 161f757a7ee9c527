"""As in CheckFreq's Table 3, each half that moves behind training saves time.

A checkpoint is in the training loop, or its second half or both halves are behind training.

Twice: a device computes, as in the paper, and the processor is idle meanwhile; and the processor
computes, so that work behind training competes with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from figures.bound import Bound
from figures.paired import extra, run


def measure(soak: bool) -> Iterator[Bound]:
    for computes, rounds, options in (("device", 9, ["--device"]), ("processor", 21, [])):
        cost = extra(
            run("none,synchronous,persist-pipelined,everstep", 2 * rounds if soak else rounds, "--steps", "5", *options)
        )
        synchronous, half, both = (round(cost[mode][0], 3) for mode in ("synchronous", "persist-pipelined", "everstep"))
        yield Bound(f"{computes}.synchronous", synchronous, "s lost per checkpoint of 1 GB", ">", half)
        yield Bound(f"{computes}.persist-pipelined", half, "s lost", "<", synchronous)
        yield Bound(f"{computes}.both-pipelined", both, "s lost", "<", half)
