"""Reads tensors of a checkpoint straight to the memory of parameters and buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._internal import CheckpointError, Shard, Target
from .module_state import mismatch
from .tensors import as_real_dtype, assign, real_dtype, same_bits

if TYPE_CHECKING:
    from .healing import HealingShard
    from .resharded import Resharded
    from .values import Values


def is_plain(tensor: Tensor) -> bool:
    """Returns whether bytes can be copied straight to the tensor."""
    return tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()


def _by_memory(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Groups the names of tensors whose memory overlaps (tied parameters, views of one buffer)."""
    groups: list[list[str]] = [[name] for name, t in tensors.items() if not t.numel()]
    device, end = None, 0
    placed = ((str(t.device), t.data_ptr(), name, t) for name, t in tensors.items() if t.numel())
    for where, at, name, tensor in sorted(placed, key=lambda p: p[:3]):
        reach = (
            at
            + (1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)))
            * tensor.element_size()
        )
        if where == device and at < end:
            groups[-1].append(name)
            end = max(end, reach)
        else:
            groups.append([name])
            device, end = where, reach
    return groups


def fill(shard: Shard | HealingShard | Resharded, into: dict[str, Tensor], values: Values) -> None:
    """Reads ``into`` and the targets of ``values`` in one pass.

    Args:
        into: tensors of modules, by name. They may be strided, on a device, or share memory with
            each other.

    Raises:
        CheckpointError: when a tensor has another dtype or shape in the checkpoint, and when
            tensors that share memory had different values.
    """
    for name, tensor in into.items():
        # Bytes are copied unchanged, and the check of names may have left some tensors out.
        entry = values.entries[name]
        if (wrong := mismatch((entry.dtype, entry.shape), tensor, name)) is not None:
            raise CheckpointError(wrong)
    aside: list[str] = []
    compared: list[str] = []
    direct = dict[str, Tensor]()
    for group in _by_memory(into):
        first, *rest = group
        places = {(into[n].data_ptr(), into[n].nbytes) for n in group}
        if len(places) == 1 and all(is_plain(into[n]) for n in group):
            direct[first] = into[first]
            compared += rest
        else:
            aside += group
            # A copy to a device need not be compared, memory of several tensors must be.
            compared += [n for n in group if rest or into[n].device.type == "cpu"]
    stored = {name: values.room(name) for name in dict.fromkeys(aside + compared)}
    direct.update(values.targets)
    shard.copy_to([Target(name, t.data_ptr(), t.nbytes) for name, t in direct.items()])

    def right(name: str) -> Tensor:
        dtype = real_dtype(into[name])
        return stored[name] if dtype is None else as_real_dtype(stored[name], dtype)

    with torch.no_grad():
        for name in aside:
            assign(into[name], right(name))
        for name in compared:
            if not same_bits(right(name), into[name]):
                raise CheckpointError(
                    f"{name} was not restored: it shares its memory with another entry of the model (tied or overlapping "
                    "tensors), for which the checkpoint has different values; tie them as they were when it was saved"
                )
