"""Determines whether all ranks hold the same state, as far as their objects show it, and which part
of it is rank 0's."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from . import optimizer_state
from .batches import Resumable
from .data.cursor import Cursor
from .data.iterable import ElasticIterable
from .data.sampler import ElasticDistributedSampler
from .sharded import is_sharded

if TYPE_CHECKING:
    from .layout import Layout

#: Objects besides modules and optimizers that change in the same way on all ranks, or, like
#: :class:`Resumable`, are restored only to the rank that saved them.
_ALIKE = (LRScheduler, ReduceLROnPlateau, GradScaler, ElasticDistributedSampler, ElasticIterable, Cursor, Resumable)


def is_replicated(objects: Mapping[str, Any]) -> bool:
    """Returns True when DDP keeps everything that training changes in the modules the same on every
    rank, no tensor is a shard of a larger one, and every other object is known to be the same on
    all ranks. When in doubt, False: a rank then restores only what it saved itself."""
    if not all(map(is_same_on_all_ranks, objects.values())):
        return False
    modules = [_compiled_from(o) for o in objects.values() if isinstance(o, nn.Module)]
    optimizers = [o for o in map(optimizer_state.unwrapped, objects.values()) if optimizer_state.is_complete(o)]
    trained = [p for o in optimizers for p in optimizer_state.parameters_of(o)]
    if any(is_sharded(p) for p in itertools.chain(trained, *(m.parameters() for m in modules))):
        return False
    replicas = [m for m in modules if isinstance(m, DistributedDataParallel)]
    # DDP over only some ranks (pipeline stages, expert parallelism): the others have weights of
    # their own.
    if not replicas or any(m.parameters_to_ignore or not _in_all_ranks(m) for m in replicas):
        return False
    # Another object may be a part of a module in DDP.
    same = {id(p) for m in replicas for p in m.parameters()}
    same |= {id(b) for m in replicas for b in (m.buffers() if m.broadcast_buffers else _synchronized(m))}
    follow = [m for m in modules if _only_follows(m, {id(p) for p in trained})]
    changing = (t for m in modules if m not in follow for t in _changing(m))
    return all(id(t) in same for t in itertools.chain(changing, (p for p in trained if p.requires_grad)))


class Statistics:
    """The modules whose floating-point buffers each rank computes from its own batches, until DDP
    replaces them by rank 0's before the next forward pass."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        modules = {n: _compiled_from(o) for n, o in objects.items() if isinstance(o, nn.Module)}
        replicas = {n: m for n, m in modules.items() if isinstance(m, DistributedDataParallel) and m.broadcast_buffers}
        self._names = [n for n, m in replicas.items() if _has_statistics(m)]

    def report(self, own: Layout, saved: Layout | None) -> None:
        """Prints that rank 0 has those of the other rank that ``saved`` is of."""
        if own.rank == 0 and saved is not None and self._names:
            print(
                f"everstep: rank 0 continues with rank {saved.rank}'s running statistics (buffers of {', '.join(self._names)}): "
                "those of rank 0 were lost; everything else is the same on all ranks",
                file=sys.stderr,
                flush=True,
            )


def _has_statistics(module: nn.Module) -> bool:
    same = {id(b) for b in _synchronized(module)}
    return any(b.is_floating_point() and id(b) not in same for b in _saved_buffers(module))


def is_same_on_all_ranks(obj: Any) -> bool:
    """Returns False for objects of the user, which may be each rank's own: a data reader has a
    position. Whether modules and optimizers are in DDP is not looked at."""
    return isinstance(_unwrapped(obj), (nn.Module, *_ALIKE)) or optimizer_state.is_complete(
        optimizer_state.unwrapped(obj)
    )


def _unwrapped(obj: Any) -> Any:
    """Returns the scheduler inside wrappers that return its state unchanged (Accelerate's), or any
    other object itself."""
    found = obj
    while not isinstance(found, (nn.Module, *_ALIKE)) and (inner := getattr(found, "scheduler", None)) is not None:
        if inner is found or not optimizer_state.passes_on(found, inner):
            return obj
        found = inner
    return found


def _in_all_ranks(module: DistributedDataParallel) -> bool:
    return module.process_group is None or module.process_group.size() == dist.get_world_size()


def _only_follows(module: nn.Module, trained: set[int]) -> bool:
    """Returns whether a module changes only as others do: an average of theirs, or a frozen one
    that does not compute statistics."""
    if any(id(p) in trained for p in module.parameters()):
        return False
    if isinstance(module, AveragedModel):
        return True
    return not any(p.requires_grad for p in module.parameters()) and not any(m.training for m in module.modules())


def _compiled_from(module: nn.Module) -> nn.Module:
    while (inner := getattr(module, "_orig_mod", None)) is not None:
        module = inner
    return module


def _changing(module: nn.Module) -> Iterator[Tensor]:
    """Yields saved tensors that training may change: parameters, unless they are frozen, and
    buffers."""
    yield from (p for p in module.parameters() if p.requires_grad)
    yield from _saved_buffers(module)


def _saved_buffers(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        yield from (b for n, b in part.named_buffers(recurse=False) if n not in part._non_persistent_buffers_set)


def _synchronized(module: nn.Module) -> Iterator[Tensor]:
    """Returns the buffers that are computed from the batches of all ranks."""
    for part in module.modules():
        if isinstance(part, nn.SyncBatchNorm):
            yield from part.buffers(recurse=False)
