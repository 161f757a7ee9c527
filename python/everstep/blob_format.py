"""The format of state that is not a tensor: typed msgpack.

A blob is a mark and one msgpack value. ``None``, booleans, integers of 64 bits, floats, strings,
bytes, lists, and dicts with string keys are msgpack's own; every other type is a map of one entry
whose key is a number (``TUPLE``, …). Containers are numbered in the order in which they are
complete, so that one that occurs twice is decoded as one object.

Types are exact: a subclass would be decoded as its base.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any

import torch

#: Prefix of the names of the tensors of a shard that are such values.
BLOB = "__everstep__/"
#: The first byte of a blob; msgpack never writes it.
MARK = b"\xc1"

TUPLE, SET, FROZENSET, PAIRS, ORDERED, DEFAULT, COUNTER, DEQUE = range(1, 9)
BIG_INT, COMPLEX, TEXT, BYTEARRAY, RANGE, SLICE, ELLIPSIS = range(9, 16)
ARRAY, SCALAR, TENSOR, INLINE, SIZE, CONSTANT, DEVICE, GENERATOR, SAME = range(16, 25)

NUMBERS = frozenset({type(None), bool, int, float})
#: Numbers, strings and times of numpy; no objects and no records.
NUMPY_KINDS = "biufcSUMm"
#: Factories that a ``defaultdict`` may have.
_MAKERS = (
    list,
    dict,
    set,
    frozenset,
    tuple,
    int,
    float,
    bool,
    str,
    bytes,
    bytearray,
    complex,
    OrderedDict,
    Counter,
    deque,
)
FACTORIES: dict[str, Any] = {"None": None, **{made.__name__: made for made in _MAKERS}}
FACTORY_NAMES = {factory: name for name, factory in FACTORIES.items()}
CONSTANT_KINDS = (torch.dtype, torch.layout, torch.memory_format)
CONSTANTS: dict[str, Any] = {str(v): v for v in vars(torch).values() if isinstance(v, CONSTANT_KINDS)}
