"""Sharded tensors (torch's ``DTensor``) in the state of an optimizer.

A checkpoint has this rank's part of each, and a note of its sharding. Its mesh is that of its
parameter.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from ._internal import CheckpointError
from .tensors import local

#: Placements by dimension of the mesh (empty: replicated), and the shape of the whole.
Note = tuple[list[str], list[int]]
#: How placements are formatted.
_WRITTEN = re.compile(r"R\Z|S\d{1,3}\Z|P\w+\Z|\?")


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of a tensor that has to be made a sharded one. Without a note, it is sharded
    like its parameter."""

    tensor: Tensor
    note: Note | None = None


def note_from(found: Any) -> Note:
    """Checks a note that was read.

    Raises:
        ValueError: when it is invalid.
    """
    written, shape = found
    good = isinstance(written, list) and all(isinstance(p, str) and _WRITTEN.match(p) for p in written)
    if not good or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("the recorded sharding of a tensor is invalid")
    return written, shape


def is_sharded(tensor: Any) -> bool:
    """Returns whether each rank has a part of the tensor."""
    return getattr(tensor, "_local_tensor", None) is not None


def note_of(tensor: Any) -> Note:
    """Returns what is needed to make a sharded tensor again from its part."""
    return _written(tuple(tensor.placements)), list(tensor.shape)


@lru_cache(maxsize=256)
def _written(placements: tuple[Any, ...]) -> list[str]:
    """Formats a placement: ``S0`` (sharded by dimension 0), ``R`` (replicated), ``Psum`` (to be
    summed); others as torch prints them, after a ``?``."""
    written = []
    for placement in placements:
        kind = type(placement).__name__
        if kind == "Shard":
            written.append(f"S{placement.dim}")
        elif kind == "Replicate":
            written.append("R")
        elif kind == "Partial":
            written.append(f"P{placement.reduce_op}")
        else:
            # It can only be compared with that of the parameter.
            written.append(f"?{placement!r}")
    return written


def is_partial(note: Note) -> bool:
    """Returns whether the parts of all ranks must be reduced to get the tensor."""
    return any(p.startswith("P") or "Partial" in p for p in note[0])


def _read(written: Sequence[str]) -> tuple[Any, ...]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return tuple(Replicate() if p == "R" else Shard(int(p[1:])) if p[0] == "S" else Partial(p[1:]) for p in written)


def made_whole_again(part: Part, parameter: Tensor, place: str, *, as_parameter: bool = False) -> Tensor:
    """Returns the sharded tensor that a part belongs to.

    Args:
        as_parameter: the part had the same place in the whole as that of the parameter, whatever
            the mesh was.

    Raises:
        CheckpointError: naming ``place``, when the parameter is sharded in another way than when it
            was saved.
    """
    own: Any = parameter
    written, shape = part.note or (None, list(own.shape))
    if not is_sharded(own):
        # A single rank has all of it.
        if list(part.tensor.shape) == shape:
            return part.tensor
        raise _otherwise(place)
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    dimensions = own.device_mesh.ndim
    same = shape == list(own.shape)
    as_own = written is None or written == _written(tuple(own.placements))
    if as_parameter and same and not is_partial((written or [], shape)):
        as_own = as_own or not any(p.is_partial() for p in own.placements)
    if not as_own and any(p.startswith("?") for p in written or ()):
        raise _otherwise(place)
    placements = own.placements if as_own else _read(written or ["R"] * dimensions)
    if len(placements) != dimensions:
        raise _otherwise(place)
    if as_own and same:
        sizes: tuple[int, ...] = local(own).shape
    else:
        sizes, _ = compute_local_shape_and_global_offset(tuple(shape), own.device_mesh, placements)
    if tuple(sizes) != tuple(part.tensor.shape):
        raise _otherwise(place)
    stride = own.stride() if same else tuple(_strides(shape))
    return DTensor.from_local(
        part.tensor, own.device_mesh, placements, run_check=False, shape=own.shape.__class__(shape), stride=stride
    )


def _strides(shape: list[int]) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(shape[dim], 1)
    return strides


def _otherwise(place: str) -> CheckpointError:
    return CheckpointError(
        f"{place} is a sharded tensor that does not fit its parameter's sharding here; run with the ranks and the "
        "sharding that the checkpoint was made with"
    )


def rebuilt(
    value: Any,
    parameter: Tensor,
    place: str,
    made: dict[int, tuple[Any, Any]],
    *,
    by_shape: bool,
    as_parameter: Callable[[str], bool],
) -> Any:
    """Returns a parameter's state with its parts made sharded tensors again, at any depth.

    Args:
        made: what was made of each object, by identity, so that an object that occurs twice remains
            one.
        by_shape: the parameter was not sharded when it was saved: what has the shape of its part is
            sharded like it.
        as_parameter: whether the part of this name had the place of the parameter's part.
    """
    if id(value) in made:
        return made[id(value)][1]

    def inside(inner: Any, name: str) -> Any:
        return rebuilt(inner, parameter, name, made, by_shape=by_shape, as_parameter=as_parameter)

    found = value
    if isinstance(value, Part):
        found = made_whole_again(value, parameter, place, as_parameter=as_parameter(place))
    elif isinstance(value, Tensor):
        if by_shape and is_sharded(parameter) and value.shape == local(parameter).shape:
            found = made_whole_again(Part(value), parameter, place)
    elif type(value) in (list, tuple, deque):
        inner = [inside(v, f"{place}/{i}") for i, v in enumerate(value)]
        if any(a is not b for a, b in zip(inner, value, strict=True)):
            found = deque(inner, value.maxlen) if isinstance(value, deque) else type(value)(inner)
    elif isinstance(value, dict):
        for key, inner_value in value.items():
            value[key] = inside(inner_value, f"{place}/{key}")
    # The original is kept alive, too, so that its identity is not reused.
    made[id(value)] = value, found
    return found
