"""The shares of a global batch that the ranks of a world take, equal or not."""

from __future__ import annotations

from dataclasses import dataclass

from .world import world


@dataclass(frozen=True)
class BatchPlan:
    """One rank's part of a global batch.

    It consists of ``micro_steps`` micro-batches of ``micro_batch_size`` samples; the rank's first
    sample is the ``first_sample``-th of the global batch. Ranks may have different numbers of
    micro-batches: gradients are weighted by samples when the mean loss of each micro-batch is
    multiplied by ``loss_scale`` (DDP then divides the sum over ranks by their number).
    """

    global_batch_size: int
    micro_batch_size: int
    micro_steps: int
    first_sample: int
    loss_scale: float
    equal: bool


def batch_plan(
    global_batch_size: int, micro_batch_size: int, *, rank: int | None = None, world_size: int | None = None
) -> BatchPlan:
    """Returns this rank's part of ``global_batch_size`` samples in micro-batches of
    ``micro_batch_size``.

    Raises:
        ValueError: when this number of ranks cannot share the batch; the text gives numbers that
            work.
    """
    w = world()
    rank = w.rank if rank is None else rank
    size = w.world_size if world_size is None else world_size
    if micro_batch_size < 1 or global_batch_size < 1:
        raise ValueError(
            f"a global batch of {global_batch_size} in micro-batches of {micro_batch_size}: both must be at least 1"
        )
    if global_batch_size % micro_batch_size:
        raise ValueError(
            f"a global batch of {global_batch_size} is not a multiple of the micro-batch of {micro_batch_size}: "
            f"use {global_batch_size - global_batch_size % micro_batch_size} or "
            f"{global_batch_size + micro_batch_size - global_batch_size % micro_batch_size}"
        )
    total = global_batch_size // micro_batch_size
    if total < size:
        raise ValueError(
            f"{size} ranks cannot share a global batch of {global_batch_size} in {total} micro-batches of {micro_batch_size}: "
            f"use micro-batches of at most {max(global_batch_size // size, 1)}, or at most {total} ranks"
        )
    each, more = divmod(total, size)
    first = rank * each + min(rank, more)
    scale = size * micro_batch_size / global_batch_size
    return BatchPlan(
        global_batch_size, micro_batch_size, each + (rank < more), first * micro_batch_size, scale, more == 0
    )
