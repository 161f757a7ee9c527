"""Reads blobs of checkpoints that were made before types were stored exactly (see
:mod:`everstep.encoding`)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgpack
import torch
from torch import Tensor

from .tensors import BY_NAME

#: Limit on values in values. Each takes C's stack.
_NESTING_MAX = 50
_TUPLE, _SET, _BIG_INT, _COMPLEX, _NUMPY, _TENSOR, _TORCH, _PAIRS, _SIZE = range(1, 10)


def decode(data: bytes, tensor: Callable[[str], Any], depth: int = 0) -> Any:
    """Returns the value; ``tensor`` returns each tensor by name, ``depth`` is the number of values
    that it is in."""
    if depth > _NESTING_MAX:
        raise ValueError("its values are nested too deeply")
    return msgpack.unpackb(data, ext_hook=_Decoder(tensor, depth), strict_map_key=False)


def tensor_of(dtype: str, shape: list[int], data: bytes) -> Tensor:
    """Returns a tensor from its bytes."""
    if type(data) is not bytes:
        raise ValueError(f"expected the bytes of a tensor, found {type(data).__name__}")
    if math.prod(shape) * BY_NAME[dtype].itemsize != len(data):
        raise ValueError(f"a tensor of {len(data)} bytes in the checkpoint is not {dtype} {shape}: it is damaged")
    found = torch.empty(shape, dtype=BY_NAME[dtype], device="cpu")
    if data:
        found.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return found


class _Decoder:
    def __init__(self, tensor: Callable[[str], Any], depth: int) -> None:
        self.tensor, self.depth = tensor, depth

    def __call__(self, code: int, data: bytes) -> Any:
        if code == _TENSOR:
            return self.tensor(data.decode())
        if code == _BIG_INT:
            return int(data)
        value = decode(data, self.tensor, self.depth + 1)
        if code == _TUPLE:
            return tuple(value)
        if code == _SET:
            return set(value)
        if code == _COMPLEX:
            return complex(*value)
        if code == _PAIRS:
            return OrderedDict((k, v) for k, v in value)
        if code == _SIZE:
            return torch.Size(value)
        if code == _TORCH:
            kind, text = value
            # Not getattr(), for which torch imports some of its modules.
            found = torch.device(text) if kind == "device" else vars(torch)[text.removeprefix("torch.")]
            if isinstance(found, (torch.device, torch.dtype)):
                return found
        if code == _NUMPY:
            import numpy

            dtype, shape, raw, scalar = value
            if not isinstance(dtype, str) or numpy.dtype(dtype).kind not in "biufc":
                raise ValueError("an array of elements that are not numbers")
            array = numpy.frombuffer(raw, dtype=dtype).reshape(shape).copy()
            return array[()] if scalar else array
        raise ValueError(
            f"unknown type code {code} in the checkpoint: it was written by a newer everstep; install that version"
        )
