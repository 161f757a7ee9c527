"""FSDP1: each parameter is a range of a flat parameter, which contains many of them.

``FullyShardedDataParallel.state_dict`` would gather whole parameters at each step. Instead, each
rank's own shard is taken from memory, with where its pieces belong
(torch.distributed.fsdp._flat_param, ``_ShardParamInfo``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ._internal import CheckpointError
from .tensor_places import Place

#: Parts of names that wrappers add.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def _wrapped(module: nn.Module) -> list[tuple[str, Any]]:
    """Returns FSDP1's wrappers inside a module, by name. Nothing is imported if FSDP1 is not
    used."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return (
        []
        if fsdp is None
        else [(n, m) for n, m in module.named_modules() if isinstance(m, fsdp.FullyShardedDataParallel)]
    )


def is_flat(module: nn.Module) -> bool:
    """Returns whether some of its parameters are in FSDP1's flat parameters."""
    return bool(_wrapped(module))


def clean(name: str) -> str:
    """Returns the name of a parameter or buffer without wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _pieces(module: nn.Module) -> dict[str, tuple[Tensor, Place]]:
    """Returns this rank's pieces of flat parameters, by the names of their parameters."""
    found: dict[str, tuple[Tensor, Place]] = {}
    for prefix, wrapper in _wrapped(module):
        handle = wrapper._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        if not handle._use_orig_params:
            raise CheckpointError(
                "FullyShardedDataParallel without use_orig_params=True has no parameters of its own; pass use_orig_params=True"
            )
        flat = handle.flat_param
        # Before the first forward pass, the flat parameter itself is the shard.
        shard = getattr(flat, "_local_shard", None)
        shard = flat.detach() if shard is None else shard
        base = f"{prefix}." if prefix else ""
        for fqn, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
            first, count, at = (
                (info.intra_param_start_idx, info.numel_in_shard, info.offset_in_shard) if info.in_shard else (0, 0, 0)
            )
            found[clean(base + fqn)] = shard[at : at + count], Place(tuple(shape), (first,), (count,), True)
        for shared in flat._shared_param_infos:
            # Tied parameters: one piece, two names.
            name, other = (
                clean(".".join(filter(None, (prefix, *parts))))
                for parts in (
                    (shared.module_name, shared.param_name),
                    (shared.prim_module_name, shared.prim_param_name),
                )
            )
            if other in found:
                found[name] = found[other]
    return found


def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, Place | None]]:
    """Yields (name, this rank's memory, where it belongs) of all parameters and persistent buffers;
    no place for whole ones."""
    pieces = _pieces(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        own = clean(name)
        if own.rpartition(".")[2] == "_flat_param":
            continue
        piece = pieces.get(own)
        yield (own, parameter.detach(), None) if piece is None else (own, *piece)
    for prefix, inner in module.named_modules():
        for key, buffer in inner._buffers.items():
            if buffer is not None and key not in inner._non_persistent_buffers_set:
                yield clean(f"{prefix}.{key}" if prefix else key), buffer, None


def places(module: nn.Module) -> dict[str, Place]:
    """Returns where this rank's pieces belong, by the names of their parameters."""
    return {name: place for name, (_, place) in _pieces(module).items()}


def fits(tensor: Tensor, place: Place) -> bool:
    """Returns whether an optimizer's state is split as the parameter is."""
    return place.flat and tuple(tensor.shape) == place.sizes
