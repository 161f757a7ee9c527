"""Whether all ranks hold the same state, as far as their objects show it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from . import optimizer_state
from .sharded import is_sharded


def is_replicated(objects: Mapping[str, Any]) -> bool:
    """True when DDP keeps everything that training changes in the modules the same on every rank, and no tensor is a shard
    of a larger one. When in doubt, False: a rank then restores only what it saved itself."""
    modules = [_compiled_from(o) for o in objects.values() if isinstance(o, nn.Module)]
    optimizers = [o for o in map(optimizer_state.unwrapped, objects.values()) if optimizer_state.is_complete(o)]
    trained = [p for o in optimizers for p in optimizer_state.parameters_of(o)]
    if any(is_sharded(p) for p in itertools.chain(trained, *(m.parameters() for m in modules))):
        return False
    replicas = [m for m in modules if isinstance(m, DistributedDataParallel)]
    # In a part of the ranks (pipeline stages, expert parallelism), the others have weights of their own.
    if not replicas or any(m.parameters_to_ignore or not _in_all_ranks(m) for m in replicas):
        return False
    # Another object may be a part of a module in DDP.
    same = {id(p) for m in replicas for p in m.parameters()}
    same |= {id(b) for m in replicas for b in (m.buffers() if m.broadcast_buffers else _synchronized(m))}
    follow = [m for m in modules if _only_follows(m, {id(p) for p in trained})]
    changing = (t for m in modules if m not in follow for t in _changing(m))
    return all(id(t) in same for t in itertools.chain(changing, (p for p in trained if p.requires_grad)))


def _in_all_ranks(module: DistributedDataParallel) -> bool:
    return module.process_group is None or module.process_group.size() == dist.get_world_size()


def _only_follows(module: nn.Module, trained: set[int]) -> bool:
    """A module that changes only as others do: an average of theirs, or a frozen one that does not compute statistics."""
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
    """Saved tensors that training may change: parameters, unless they are frozen, and buffers."""
    yield from (p for p in module.parameters() if p.requires_grad)
    for part in module.modules():
        yield from (b for n, b in part.named_buffers(recurse=False) if n not in part._non_persistent_buffers_set)


def _synchronized(module: nn.Module) -> Iterator[Tensor]:
    """Buffers that are computed from the batches of all ranks."""
    for part in module.modules():
        if isinstance(part, nn.SyncBatchNorm):
            yield from part.buffers(recurse=False)
