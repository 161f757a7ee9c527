"""Decodes state that is not a tensor (see :mod:`everstep.blob_format`)."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack
import torch
from torch import nn

from . import legacy_encoding
from ._internal import CheckpointError
from .blob_format import (
    ARRAY,
    BIG_INT,
    BYTEARRAY,
    COMPLEX,
    CONSTANT,
    CONSTANTS,
    COUNTER,
    DEFAULT,
    DEQUE,
    DEVICE,
    ELLIPSIS,
    FACTORIES,
    FROZENSET,
    GENERATOR,
    INLINE,
    MARK,
    NUMBERS,
    NUMPY_KINDS,
    ORDERED,
    PAIRS,
    RANGE,
    SAME,
    SCALAR,
    SET,
    SIZE,
    SLICE,
    TENSOR,
    TEXT,
    TUPLE,
)
from .damage import Unavailable, reading
from .sharded import Note, Part, note_from
from .tensors import as_real_dtype, device_named
from .value_limits import LEVELS_MAX, check_hashed, check_levels, hidden_method

_T = TypeVar("_T")
_LEAVES = NUMBERS | {str, bytes}


def decode(
    data: bytes,
    tensor: Callable[[str], Any],
    *,
    finish: bool = True,
    sharded: Callable[[Any, Note], Any] | None = None,
) -> Any:
    """Returns the value. ``tensor`` returns each tensor by name, and ``sharded`` converts those
    that were sharded.

    Without ``finish``, the tensors are those of ``tensor`` or share their memory, so that they can
    be filled afterwards.

    Raises:
        DamagedError: when the bytes are not those of a value.
        OutOfMemory: when there is not enough memory for the value.
    """
    with reading("a value in the checkpoint, which is damaged, or of a newer everstep,"):
        try:
            if data[:1] != MARK:
                found = legacy_encoding.decode(data, tensor)
                check_levels(found)
                return found
            tree = msgpack.unpackb(data[1:], strict_map_key=False)
            return _Decoder(tensor, finish, sharded).value(tree)
        except MemoryError:
            _check_lengths(data.removeprefix(MARK))
            raise


def _check_lengths(data: bytes) -> None:
    """Refuses lists in lists that each claim to be as long as all of ``data``. msgpack allocates
    them before it reads their elements."""
    unpacker = msgpack.Unpacker(None, max_buffer_size=len(data), strict_map_key=False)
    unpacker.feed(data)
    try:
        unpacker.skip()
    except msgpack.OutOfData as e:
        raise ValueError("it is shorter than the lists in it") from e


class _Decoder:
    def __init__(self, tensor: Callable[[str], Any], finish: bool, sharded: Callable[[Any, Note], Any] | None) -> None:
        self._tensor, self._finish, self._sharded = tensor, finish, sharded
        self._seen: list[Any] = []
        #: Levels in each value in ``_seen``, and in what was decoded last. One that occurs again
        #: deeper than it was counts there, too.
        self._levels_in: list[int] = []
        self._levels = 0

    def value(self, node: Any) -> Any:
        kind = type(node)
        if kind is not list and kind is not dict:
            self._levels = self._levels or 1
            return node
        levels, self._levels = self._levels, 0
        if kind is list:
            found: Any = self._complete(self._items(node))
        elif len(node) != 1 or type(code := next(iter(node))) is not int:
            found = self._complete({k: self.value(v) for k, v in node.items()})
        elif code == SAME:
            self._levels = self._levels_in[node[code]]
            found = self._seen[node[code]]
        elif code == TUPLE and type(node[code]) is list and set(map(type, node[code])) <= NUMBERS:
            found = tuple(node[code])
        else:
            found = self._tagged(code, node[code])
            if code in _NUMBERED:
                self._complete(found)
        if self._levels >= LEVELS_MAX:
            # Earlier versions have saved such values, so it may not be damage.
            raise CheckpointError(
                f"a value in the checkpoint is nested more than {LEVELS_MAX} levels deep, which cannot be restored"
            )
        self._levels = max(levels, self._levels + 1)
        return found

    def _complete(self, found: Any) -> Any:
        self._seen.append(found)
        self._levels_in.append(self._levels)
        return found

    def _items(self, nodes: Any) -> list[Any]:
        items: list[Any] = _as(list, nodes)
        if set(map(type, items)) <= NUMBERS:
            return items
        return [self.value(n) for n in items]

    def _hashed(self, node: Any) -> Any:
        found = self.value(node)
        check_hashed(found)
        return found

    def _pairs(self, nodes: Any) -> list[tuple[Any, Any]]:
        nodes = _as(list, nodes)
        if set(map(type, nodes)) <= NUMBERS:
            flat = self._items(nodes)
        else:
            leaves = set(map(type, nodes[::2])) <= _LEAVES
            flat = [self.value(n) if i % 2 or leaves else self._hashed(n) for i, n in enumerate(nodes)]
        return list(zip(flat[::2], flat[1::2], strict=True))

    def _with_attributes(self, found: Any, attributes: Any) -> Any:
        if attributes is not None:
            more = _as(dict, self.value(attributes))
            if (hidden := hidden_method(type(found), more)) is not None:
                raise ValueError(f"an attribute {hidden} that would hide a method")
            vars(found).update(more)
        return found

    def _tagged(self, code: int, given: Any) -> Any:
        plain = _PLAIN.get(code)
        if plain is not None:
            return plain(given)
        if code in (SET, FROZENSET) and not set(map(type, _as(list, given))) <= _LEAVES:
            return _OF_ITEMS[code]([self._hashed(n) for n in given])
        if code in _OF_ITEMS:
            return _OF_ITEMS[code](self._items(given))
        if code == PAIRS:
            return dict(self._pairs(given))
        if code == ORDERED:
            return self._with_attributes(OrderedDict(self._pairs(given[0])), given[1])
        if code == COUNTER:
            return self._with_attributes(Counter(dict(self._pairs(given[0]))), given[1])
        if code == DEFAULT:
            return defaultdict(FACTORIES[given[0]], self._pairs(given[1]))
        if code == DEQUE:
            return deque(self._items(given[0]), given[1])
        if code == RANGE:
            return range(*self._items(given))
        if code == SLICE:
            return slice(*self._items(given))
        if code == TENSOR:
            name, note = (given, {}) if isinstance(given, str) else given
            return self._finished(self._tensor(name), note)
        if code == INLINE:
            dtype, shape, data, note = given
            return self._finished(legacy_encoding.tensor_of(dtype, shape, data), note)
        raise ValueError(
            f"unknown type code {code} in the checkpoint: it was written by a newer everstep; install that version"
        )

    def _finished(self, tensor: Any, note: dict[str, Any]) -> Any:
        if "sharded" in note:
            how = note_from(note["sharded"])
            tensor = self._finished(tensor, {k: v for k, v in note.items() if k != "sharded"})
            return tensor if self._sharded is None else self._sharded(tensor, how)
        if isinstance(tensor, Part):
            return Part(self._finished(tensor.tensor, note), tensor.note)
        if not isinstance(tensor, torch.Tensor) or not note:
            return tensor
        if "dtype" in note:
            tensor = as_real_dtype(tensor, note["dtype"])
        if "order" in note:
            tensor = tensor.permute(sorted(range(tensor.dim()), key=note["order"].__getitem__))
        if not self._finish:
            return tensor
        if "device" in note:
            tensor = tensor.to(device_named(note["device"]))
        if note.get("parameter"):
            return nn.Parameter(tensor, requires_grad=bool(note.get("grad")))
        return tensor.requires_grad_(bool(note.get("grad")))


def _as(kind: type[_T], given: Any) -> _T:
    """Returns what was given, which has to be of this type: constructors of Python and torch take
    others for something else (``bytearray(n)`` allocates ``n`` bytes)."""
    if type(given) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {type(given).__name__}")
    return given


def _complex(given: Any) -> complex:
    real, imaginary = _as(list, given)
    return complex(_as(float, real), _as(float, imaginary))


def _array(given: Any) -> Any:
    import numpy

    dtype, data, shape, fortran = _as(list, given)
    found = _from_bytes(dtype, shape, data)
    if fortran and not found.itemsize:
        # A copy would give each element a size, and with that all that the shape claims to have.
        return numpy.ndarray(shape, found.dtype, order="F")
    return numpy.asfortranarray(found) if fortran else found


def _scalar(given: Any) -> Any:
    dtype, data = _as(list, given)
    return _from_bytes(dtype, [], data)[()]


def _from_bytes(dtype: Any, shape: Any, data: Any) -> Any:
    import numpy

    kind = numpy.dtype(_as(str, dtype))
    if kind.itemsize == 0 and _as(bytes, data):
        # Empty strings were once written without the size that they have in memory.
        kind = numpy.dtype(f"{dtype[:-1]}1")
    if kind.kind not in NUMPY_KINDS or math.prod(_as(list, shape)) * kind.itemsize != len(_as(bytes, data)):
        raise ValueError(f"an array of {len(data)} bytes in the checkpoint is not {dtype} {shape}: it is damaged")
    found = numpy.ndarray(shape, kind)  # numpy.empty() gives strings without a size one
    if data:
        found.reshape(-1).view("u1")[...] = numpy.frombuffer(data, "u1")
    return found


def _generator(given: Any) -> torch.Generator:
    name, state = _as(list, given)
    wanted = torch.device(_as(str, name))
    device = device_named(name)
    if device.type != wanted.type:
        raise Unavailable(
            f"the checkpoint has the state of a torch.Generator on {wanted.type}, which is not available here; restore it on a machine "
            "that has such a device"
        )
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(_as(bytes, state)), dtype=torch.uint8))
    return generator


_PLAIN: dict[int, Callable[[Any], Any]] = {
    BIG_INT: lambda given: int.from_bytes(_as(bytes, given), "little", signed=True),
    COMPLEX: _complex,
    TEXT: lambda given: _as(bytes, given).decode("utf-8", "surrogatepass"),
    BYTEARRAY: lambda given: bytearray(_as(bytes, given)),
    ELLIPSIS: lambda given: ...,
    ARRAY: _array,
    SCALAR: _scalar,
    CONSTANT: CONSTANTS.__getitem__,
    DEVICE: lambda given: torch.device(_as(str, given)),
    GENERATOR: _generator,
}
_OF_ITEMS: dict[int, Callable[[list[Any]], Any]] = {TUPLE: tuple, SET: set, FROZENSET: frozenset, SIZE: torch.Size}
#: Types that are numbered when they are complete, as in the encoder.
_NUMBERED = {
    TUPLE, SET, FROZENSET, PAIRS, ORDERED, DEFAULT, COUNTER, DEQUE, BYTEARRAY, ARRAY, TENSOR, INLINE, SIZE, GENERATOR,
}  # fmt: skip
