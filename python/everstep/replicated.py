"""Whether all ranks hold the same state, as far as their objects show it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import optimizer_state
from .sharded import is_sharded


def is_replicated(objects: Mapping[str, Any]) -> bool:
    """True when DDP keeps everything that training changes in the modules the same on every rank, and no tensor is a shard
    of a larger one. When in doubt, False: a rank then restores only what it saved itself."""
    modules = [_compiled_from(o) for o in objects.values() if isinstance(o, nn.Module)]
    optimizers = [o for o in map(optimizer_state.unwrapped, objects.values()) if optimizer_state.is_complete(o)]
    trained = (p for o in optimizers for p in optimizer_state.parameters_of(o))
    if any(is_sharded(p) for p in itertools.chain(trained, *(m.parameters() for m in modules))):
        return False
    replicas = [m for m in modules if isinstance(m, DistributedDataParallel)]
    if not replicas or any(m.parameters_to_ignore for m in replicas):
        return False
    # Another object may be a part of a module in DDP.
    same = {id(p) for m in replicas for p in m.parameters()}
    same |= {id(b) for m in replicas for b in (m.buffers() if m.broadcast_buffers else _synchronized(m))}
    return all(id(t) in same for m in modules for t in _changing(m))


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
