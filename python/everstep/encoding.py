"""State that is no tensor, as typed msgpack: loads to exactly what was saved, and never runs code."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgpack

from ._internal import CheckpointError

#: Tensors of a shard with this in front of their names are values of this kind.
BLOB = "__everstep__/"
_TUPLE, _SET, _BIG_INT, _COMPLEX, _NUMPY, _TENSOR, _TORCH, _PAIRS, _SIZE = range(1, 10)


class TensorRef:
    """Stands for a tensor that is stored beside the blob, under ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name


def encode(value: Any) -> bytes:
    """``value`` as bytes. Raises :class:`CheckpointError` for types that cannot be saved safely."""
    return msgpack.packb(_plain(value), default=_extension, strict_types=True)


def encode_pair(key: str, encoded: bytes) -> bytes:
    """A key and its value, which is encoded already, for :func:`join_pairs`."""
    return msgpack.packb(key) + encoded


def join_pairs(*pairs: bytes) -> bytes:
    """The dict of up to 15 pairs, as :func:`encode` writes it."""
    return bytes([0x80 | len(pairs)]) + b"".join(pairs)


def decode(data: bytes, tensor: Callable[[str], Any]) -> Any:
    """The value; ``tensor`` is asked for each :class:`TensorRef` by name."""
    hook = _Decoder(tensor)
    return msgpack.unpackb(data, ext_hook=hook, strict_map_key=False)


def _plain(value: Any) -> Any:
    """Subclasses that msgpack's strict types would refuse although nothing is lost."""
    if isinstance(value, dict):
        if all(isinstance(k, (str, int, bytes)) and not isinstance(k, bool) for k in value):
            return {k: _plain(v) for k, v in value.items()}
        return msgpack.ExtType(_PAIRS, encode([[k, v] for k, v in value.items()]))
    if type(value) is list:
        return [_plain(v) for v in value]
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        return msgpack.ExtType(_BIG_INT, str(value).encode())
    if isinstance(value, (tuple, set, frozenset)):
        return _extension(value)
    return value


def _extension(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Size):
        return msgpack.ExtType(_SIZE, encode(list(value)))
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, encode(list(value)))
    if isinstance(value, (set, frozenset)):
        return msgpack.ExtType(_SET, encode(sorted(value, key=repr)))
    if isinstance(value, complex):
        return msgpack.ExtType(_COMPLEX, encode([value.real, value.imag]))
    if isinstance(value, TensorRef):
        return msgpack.ExtType(_TENSOR, value.name.encode())
    if torch is not None and isinstance(value, (torch.dtype, torch.device)):
        return msgpack.ExtType(_TORCH, encode([type(value).__name__, str(value)]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biufc":
        array = numpy.asarray(value)
        scalar = isinstance(value, numpy.generic)
        return msgpack.ExtType(_NUMPY, encode([array.dtype.str, list(array.shape), array.tobytes(), scalar]))
    if isinstance(value, (int, float, str, bytes)):
        return value.__class__.__mro__[-2](value)  # a subclass such as an IntEnum: its plain value
    raise CheckpointError(
        f"state of type {type(value).__module__}.{type(value).__qualname__} cannot be saved without pickle; "
        "give numbers, strings, bytes, lists, tuples, sets, dicts, numpy arrays or tensors in state_dict()"
    )


class _Decoder:
    def __init__(self, tensor: Callable[[str], Any]) -> None:
        self.tensor = tensor

    def __call__(self, code: int, data: bytes) -> Any:
        if code == _TENSOR:
            return self.tensor(data.decode())
        if code == _BIG_INT:
            return int(data)
        value = decode(data, self.tensor)
        if code == _TUPLE:
            return tuple(value)
        if code == _SET:
            return set(value)
        if code == _COMPLEX:
            return complex(*value)
        if code == _PAIRS:
            return OrderedDict((k, v) for k, v in value)
        if code == _SIZE:
            import torch

            return torch.Size(value)
        if code == _TORCH:
            import torch

            kind, text = value
            return torch.device(text) if kind == "device" else getattr(torch, text.removeprefix("torch."))
        if code == _NUMPY:
            import numpy

            dtype, shape, raw, scalar = value
            array = numpy.frombuffer(raw, dtype=dtype).reshape(shape).copy()
            return array[()] if scalar else array
        raise CheckpointError(f"unknown type code {code}: written by a newer everstep; install that version")
