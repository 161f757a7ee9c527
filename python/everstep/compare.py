"""Compares two states, in values and types."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Generator, Tensor

from .sharded import is_sharded
from .tensors import local, same_bits


def _sharding(tensor: Any) -> Any:
    """Returns how a tensor is sharded; ``None`` if it is not."""
    return (tensor.shape, tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None


def difference(
    saved: Any, found: Any, path: str = "", same: dict[tuple[int, int], tuple[Any, Any]] | None = None
) -> str | None:
    """Returns where two states differ first (``/exp_avg``, ``[3]``; empty for the states
    themselves); ``None`` if they are the same.

    Args:
        same: containers that were found to be the same, by their identities. Some occur many times.
    """
    same = {} if same is None else same
    if (id(saved), id(found)) in same:
        return None
    at = _difference(saved, found, path, same)
    if at is None and isinstance(saved, (Mapping, list, tuple, deque)):
        same[id(saved), id(found)] = saved, found
    return at


def _difference(saved: Any, found: Any, path: str, same: dict[tuple[int, int], tuple[Any, Any]]) -> str | None:
    if isinstance(saved, Tensor):
        if not isinstance(found, Tensor) or _sharding(saved) != _sharding(found):
            return path
        part, other = local(saved), local(found)
        return None if part is other or same_bits(part, other) else path
    if type(saved) is not type(found):
        return path
    if isinstance(saved, float):
        return None if struct.pack("d", saved) == struct.pack("d", found) else path
    if isinstance(saved, Mapping):
        for key in saved.keys() | found.keys():
            at = f"{path}/{key}"
            inner = at if key not in saved or key not in found else difference(saved[key], found[key], at, same)
            if inner is not None:
                return inner
        return None
    if isinstance(saved, (list, tuple, deque)):
        if len(saved) != len(found) or getattr(saved, "maxlen", None) != getattr(found, "maxlen", None):
            return path
        pairs = enumerate(zip(saved, found, strict=True))
        return next((d for i, (a, b) in pairs if (d := difference(a, b, f"{path}[{i}]", same)) is not None), None)
    if type(saved).__module__ == "numpy":
        equal = saved.dtype == found.dtype and saved.shape == found.shape and saved.tobytes() == found.tobytes()
        return None if equal else path
    if isinstance(saved, Generator):
        return difference(saved.get_state(), found.get_state(), path, same)
    return None if saved == found or saved != saved else path
