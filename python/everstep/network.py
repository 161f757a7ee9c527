"""Watches the collectives of a training loop, so that copies of checkpoints do not compete with
them.

This is needed only where copies go to other nodes (sharded state), and works only where the end of
a collective can be observed: with NCCL it is known to the device alone, and copies are spread
evenly instead.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import worker as _worker
from ._internal import Board, NetworkWatch
from .world import number

#: Methods of ``torch.distributed.ProcessGroup`` that collectives called from Python go through,
#: under the names of all versions of torch.
COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "allgather",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base",
    "broadcast", "gather", "gather_single", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter",
)  # fmt: skip

_watch: NetworkWatch | None = None
_crosses: dict[int, bool] = {}
#: Work whose end is observed only when it is waited for; kept alive, so that its id is not reused.
_unfinished: dict[int, Any] = {}


def watch(board: Board, pacing: bool) -> NetworkWatch | None:
    """Watches the collectives of this process. Returns ``None`` where their ends cannot be
    observed."""
    global _watch
    import torch.distributed as dist

    if not _worker.in_group():
        return None
    if not pacing:
        board.open_network()
        return None
    if "nccl" in dist.get_backend():
        return None
    if _watch is None:
        page = Path(os.environ["EVERSTEP_BOARD"])
        _watch = NetworkWatch(board, page.with_name(page.name.removesuffix("board") + "profile"), dist.get_world_size())
        for name in COLLECTIVES:
            method = getattr(dist.ProcessGroup, name, None)
            if method is not None:
                setattr(dist.ProcessGroup, name, _watched(method))
        dist.Work.wait = _waited(dist.Work.wait)  # type: ignore[method-assign]
    return _watch


def _leaves_the_node(group: Any) -> bool:
    """Returns whether some ranks of the group are on another node (ranks are numbered node by
    node)."""
    import torch.distributed as dist

    known = _crosses.get(id(group))
    if known is None:
        try:
            ranks = dist.get_process_group_ranks(group)
        except (KeyError, RuntimeError, ValueError):
            ranks = list(range(dist.get_world_size()))
        world = _worker.world()
        first = world.rank - world.local_rank
        per_node = number("LOCAL_WORLD_SIZE", 1)
        known = _crosses[id(group)] = any(not first <= r < first + per_node for r in ranks)
    return known


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        seen = _watch
        if seen is None or not _leaves_the_node(group):
            return method(group, *args, **kwargs)
        seen.begin()
        try:
            work = method(group, *args, **kwargs)
        except BaseException:
            seen.end()
            raise
        try:
            work.get_future().add_done_callback(lambda _: seen.end())
        except (AttributeError, RuntimeError):
            if work is None:
                seen.end()
            else:
                _unfinished[id(work)] = work  # it is known to be complete only when it is waited for
        return work

    return collective


def _waited(wait: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return wait(work, *args, **kwargs)
        finally:
            if _unfinished.pop(id(work), None) is not None and _watch is not None:
                _watch.end()

    return waited


def iteration(watch: NetworkWatch) -> None:
    """Records a completed step. Work that nothing has waited for may be complete, too."""
    for key, work in list(_unfinished.items()):
        if work.is_completed() and _unfinished.pop(key, None) is not None:
            watch.end()
    watch.iteration()
