"""Encodes state that is not a tensor, so that it is decoded exactly, types included, without
running any code.

A value without a code in :mod:`everstep.blob_format` is refused with its path.
"""

from __future__ import annotations

import enum
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import torch
from torch import Tensor, nn

from ._internal import CheckpointError, encode_plain
from .blob_format import (
    ARRAY,
    BIG_INT,
    BYTEARRAY,
    COMPLEX,
    CONSTANT,
    CONSTANT_KINDS,
    COUNTER,
    DEFAULT,
    DEQUE,
    DEVICE,
    ELLIPSIS,
    FACTORIES,
    FACTORY_NAMES,
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
from .sharded import note_of
from .tensors import device_name, order_in_memory, raw, real_dtype, storable, stored_as
from .value_limits import HASHED_ELEMENTS_MAX, hashed_elements, hidden_method

#: Limit on nested containers. The reader's own limit is 511 levels of msgpack, of which one of ours
#: takes up to three.
NESTING_MAX = 100
#: msgpack's limit for one string of bytes.
BYTES_MAX = (1 << 32) - 1

#: The place of a value: the place of its container, its key or index, and whether that is an index.
Path = tuple["Path | None", Any, bool]


def text_of(path: Path | None) -> str:
    """Formats a path: ``data/buffer[3]``; of a very long one, both ends."""
    parts: list[str] = []
    while path is not None:
        above, key, index = path
        shown = key if isinstance(key, str) else repr(key)
        parts.append(f"[{key}]" if index else f"/{shown}" if above is not None else shown)
        path = above
    text = "".join(reversed(parts)).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 300 else f"{text[:150]}…{text[-140:]}"


def name_of(path: Path | None) -> str:
    """Returns the name of a tensor at this place."""
    parts: list[str] = []
    while path is not None:
        path, key, _ = path
        parts.append(str(key))
    return "/".join(reversed(parts))


#: Takes a tensor out of a value: its memory, the sharded tensor that this is a part of, and its
#: place. Returns its name.
TakeTensor = Callable[[Tensor, "Tensor | None", "Path"], str]


def encode(
    value: Any, path: Path = (None, "state", False), take: TakeTensor | None = None, *, sharded: bool = False
) -> bytes:
    """Encodes ``value``.

    Args:
        path: where it is, for errors.
        take: stores a tensor beside the blob; without it, tensors are part of the blob.
        sharded: takes this rank's part of sharded tensors, which the reader makes whole again.

    Raises:
        CheckpointError: naming the place of what cannot be saved.
    """
    return _encode(value, path, take, sharded)[0]


def encode_part(value: Any, path: Path) -> bytes | None:
    """Encodes ``value`` for :func:`join`, without tensors; ``None`` if it refers to a container,
    whose number would be another in the whole."""
    blob, shares = _encode(value, path, None, False)
    return None if shares else blob


def _encode(value: Any, path: Path, take: TakeTensor | None, sharded: bool) -> tuple[bytes, bool]:
    """Returns the blob, and whether a container occurs twice in it."""
    if (blob := encode_plain(value)) is not None:
        return blob, False
    encoder = _Encoder(take, sharded)
    try:
        return MARK + msgpack.packb(encoder.value(value, path), strict_types=True), encoder.shares
    except RecursionError as e:
        raise CheckpointError(f"{text_of(path)} is nested too deeply to be saved") from e


def join(head: bytes, key: str, value: bytes) -> bytes:
    """Returns the blob of a dict with one more entry at its end, from those of the dict and of the
    value. The dict has up to 15 entries; neither may refer to a container of the other."""
    return MARK + bytes([head[1] + 1]) + head[2:] + bytes(msgpack.packb(key)) + value[1:]


def _refused(path: Path, kind: type, advice: str) -> CheckpointError:
    return CheckpointError(
        f"{text_of(path)} is of type {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickle; {advice}"
    )


def _advice(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return "save its value or name"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "save it as a tuple, or as a dict (_asdict())"
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return "save its state_dict(), or pass it to CheckpointManager by a name of its own"
    for base in (str, bytes, int, float, complex, list, tuple, dict, set, frozenset, Tensor):
        if isinstance(value, base):
            return f"its class would be lost: convert it to {base.__name__}"
    if callable(value):
        return "leave functions and classes out of state_dict()"
    return "give numbers, strings, bytes, lists, tuples, sets, dicts, numpy arrays or tensors in state_dict()"


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_numbers(values: list[Any] | tuple[Any, ...]) -> bool:
    """Returns whether msgpack encodes all values itself."""
    kinds = set(map(type, values))
    return kinds <= NUMBERS and (
        int not in kinds or all(type(v) is not int or -(1 << 63) <= v < 1 << 64 for v in values)
    )


def _is_ascii(values: list[Any]) -> bool:
    """Returns whether all values are ASCII strings, without a look at each."""
    return set(map(type, values)) == {str} and "".join(values).isascii()


class _Encoder:
    def __init__(self, take: TakeTensor | None, sharded: bool) -> None:
        self._take, self._sharded = take, sharded
        self._depth = 0
        self.shares = False
        #: Inside keys and elements of sets, which must be equal to what they were, not the same
        #: object.
        self._keys = 0
        #: Numbers of complete containers by identity. They are kept alive: an identity may be used
        #: again.
        self._seen: dict[int, int] = {}
        #: Levels in each of them, and in what was encoded last.
        self._levels_in: dict[int, int] = {}
        self._levels = 0
        self._alive: list[Any] = []
        self._open: set[int] = set()

    def value(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind is int:
            if -(1 << 63) <= value < 1 << 64:
                return value
            return {BIG_INT: value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)}
        if value is None or kind is bool or kind is float:
            return value
        if kind is str:
            return value if _is_utf8(value) else {TEXT: value.encode("utf-8", "surrogatepass")}
        if kind is bytes:
            return self._bytes(value, path)
        if kind is tuple and _is_numbers(value):
            # Two equal tuples of numbers are interchangeable: they have no identity to keep.
            return {TUPLE: list(value)}
        encode = _CONTAINERS.get(kind)
        if encode is not None:
            return self._container(value, path, encode)
        return self._other(value, kind, path)

    @staticmethod
    def _bytes(value: Any, path: Path) -> bytes:
        if len(value) > BYTES_MAX:
            raise CheckpointError(f"{text_of(path)} has {len(value)} bytes, more than {BYTES_MAX}; save it as a tensor")
        return bytes(value)

    def _container(self, value: Any, path: Path, encode: Callable[[_Encoder, Any, Path], Any]) -> Any:
        key = id(value)
        if self._keys and isinstance(value, (Tensor, torch.Generator)):
            raise CheckpointError(
                f"{text_of(path)}: a {type(value).__name__} is a dict key or a set element that hashes by identity, which "
                "cannot be saved; use a name or a number"
            )
        number = self._seen.get(key)
        if number is not None:
            self.shares = True
            self._levels = max(self._levels, self._levels_in[key])
            return {SAME: number}
        if key in self._open:
            raise CheckpointError(f"{text_of(path)} contains itself, which cannot be saved")
        if self._depth == NESTING_MAX:
            raise CheckpointError(
                f"{text_of(path)} is nested more than {NESTING_MAX} levels deep, which cannot be saved"
            )
        self._open.add(key)
        self._depth += 1
        before, self._levels = self._levels, 0
        encoded = encode(self, value, path)
        self._levels += 1
        if self._levels > NESTING_MAX:
            # One that occurs again deeper than before is as deep when it is read.
            raise CheckpointError(
                f"{text_of(path)} is nested more than {NESTING_MAX} levels deep, through containers that occur several times, "
                "which cannot be saved"
            )
        self._levels_in[key] = self._levels
        self._levels = max(before, self._levels)
        self._depth -= 1
        self._open.discard(key)
        self._seen[key] = len(self._alive)
        self._alive.append(value)
        return encoded

    def items(self, values: Iterable[Any], path: Path) -> list[Any]:
        """Encodes the elements of a sequence."""
        values = list(values)
        if _is_numbers(values) or _is_ascii(values):
            return values
        return [self.value(v, (path, i, True)) for i, v in enumerate(values)]

    def hashed(self, value: Any, path: Path) -> Any:
        """Encodes a key, or an element of a set."""
        self._keys += 1
        encoded = self.value(value, path)
        self._keys -= 1
        if not self._keys and hashed_elements(value) > HASHED_ELEMENTS_MAX:
            # The path to the key would be as long as the key.
            raise CheckpointError(
                f"{text_of(path[0])} has a key or an element of a set with more than {HASHED_ELEMENTS_MAX} elements, which "
                "cannot be saved; use a shorter one"
            )
        return encoded

    def elements(self, values: Iterable[Any], path: Path) -> list[Any]:
        """Encodes the elements of a set."""
        return [self.hashed(v, (path, v, False)) for v in values]

    def pairs(self, value: Any, path: Path) -> list[Any]:
        """Encodes keys and values of a mapping, alternating."""
        flat: list[Any] = []
        for key, inner in value.items():
            flat.append(self.hashed(key, (path, key, False)))
            flat.append(self.value(inner, (path, key, False)))
        return flat

    def dict(self, value: Any, path: Path) -> Any:
        """Encodes a dict: as msgpack's own if its keys are strings."""
        if all(type(k) is str for k in value) and _is_utf8("".join(value)):
            return {k: self.value(v, (path, k, False)) for k, v in value.items()}
        return {PAIRS: self.pairs(value, path)}

    def attributes(self, value: Any, path: Path) -> Any:
        """Encodes what was set on a container beside its content (torch keeps versions of modules
        in ``state_dict()._metadata``)."""
        given = dict(vars(value))
        if (hidden := hidden_method(type(value), given)) is not None:
            raise CheckpointError(
                f"{text_of(path)} has the attribute {hidden!r}, which hides a method of {type(value).__name__} or is no name and "
                "cannot be saved; use another name"
            )
        return self.value(given, (path, "__dict__", False)) if given else None

    def _other(self, value: Any, kind: type, path: Path) -> Any:
        if isinstance(value, Tensor):
            return self._container(value, path, _Encoder._tensor)
        if kind is complex:
            return {COMPLEX: [value.real, value.imag]}
        if kind is range:
            return {RANGE: [self.value(v, path) for v in (value.start, value.stop, value.step)]}
        if kind is slice:
            return {SLICE: [self.value(v, path) for v in (value.start, value.stop, value.step)]}
        if value is ...:
            return {ELLIPSIS: None}
        if kind in CONSTANT_KINDS:
            return {CONSTANT: str(value)}
        if kind is torch.device:
            return {DEVICE: str(value)}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            if kind is numpy.ndarray:
                return self._container(value, path, _Encoder._array)
            if issubclass(kind, numpy.generic) and kind.__module__ == "numpy":
                return {SCALAR: self._numpy(value, path)}
        raise _refused(path, kind, _advice(value))

    def _numpy(self, value: Any, path: Path) -> list[Any]:
        import numpy

        # An empty string has no size; as an array, it has one.
        array = numpy.asarray(value)
        dtype = array.dtype
        if dtype.kind not in NUMPY_KINDS or numpy.dtype(dtype.str) != dtype or dtype.metadata:
            raise CheckpointError(
                f"{text_of(path)} is of numpy's {dtype!r}, which cannot be saved; convert it to numbers or strings"
            )
        if isinstance(value, (str, bytes)) and value[-1:] in ("\0", b"\0"):
            raise CheckpointError(
                f"{text_of(path)} is a numpy string that ends with NUL, which numpy drops; convert it to str or bytes"
            )
        return [
            dtype.str if numpy.dtype(dtype.str).char == dtype.char else dtype.str[0] + dtype.char,
            self._bytes(array.tobytes("C"), path),
        ]

    def _array(self, value: Any, path: Path) -> Any:
        fortran = value.flags.f_contiguous and not value.flags.c_contiguous
        return {ARRAY: [*self._numpy(value, path), list(value.shape), fortran]}

    def _tensor(self, value: Tensor, path: Path) -> Any:
        part = getattr(value, "_local_tensor", None)
        if part is not None and not self._sharded:
            raise CheckpointError(
                f"{text_of(path)} is a sharded tensor (DTensor), which only modules and optimizers can have; save to_local()"
            )
        if part is None and type(value) not in (Tensor, nn.Parameter):
            raise _refused(path, type(value), _advice(value))
        if any(getattr(value, "names", ())):
            raise CheckpointError(
                f"{text_of(path)} is a tensor with named dimensions, which cannot be saved; save rename(None)"
            )
        own = storable(value if part is None else part, lambda: text_of(path))
        note: dict[str, Any] = {}
        if (dtype := real_dtype(own)) is not None:
            note["dtype"] = dtype
        if part is not None:
            note["sharded"] = [*note_of(value)]
        else:
            if value.requires_grad:
                note["grad"] = True
            if type(value) is nn.Parameter:
                note["parameter"] = True
            if value.device.type != "cpu":
                note["device"] = device_name(value.device)
            if not self._sharded and (order := order_in_memory(own)) is not None:
                note["order"] = order
                own = own.permute(order)
        if self._take is None:
            dtype, shape = stored_as(own, text_of(path))
            return {INLINE: [dtype, shape, self._bytes(raw(own).numpy().tobytes(), path), note]}
        name = self._take(own, None if part is None else value, path)
        if not _is_utf8(name):
            raise CheckpointError(f"{text_of(path)} is a tensor whose name is not valid Unicode; rename its keys")
        return {TENSOR: [name, note] if note else name}

    def size(self, value: Any, path: Path) -> Any:
        return {SIZE: self.items(value, path)}

    def generator(self, value: torch.Generator, path: Path) -> Any:
        return {GENERATOR: [str(value.device), self._bytes(value.get_state().numpy().tobytes(), path)]}

    def default(self, value: Any, path: Path) -> Any:
        try:
            factory = FACTORY_NAMES[value.default_factory]
        except (KeyError, TypeError):
            raise CheckpointError(
                f"{text_of(path)} is a defaultdict whose default_factory {value.default_factory!r} cannot be saved without pickle; "
                f"use one of {', '.join(FACTORIES)}, or save dict(...)"
            ) from None
        return {DEFAULT: [factory, self.pairs(value, path)]}


_CONTAINERS: dict[type, Callable[[_Encoder, Any, Path], Any]] = {
    list: _Encoder.items,
    dict: _Encoder.dict,
    tuple: lambda e, v, p: {TUPLE: e.items(v, p)},
    set: lambda e, v, p: {SET: e.elements(v, p)},
    frozenset: lambda e, v, p: {FROZENSET: e.elements(v, p)},
    OrderedDict: lambda e, v, p: {ORDERED: [e.pairs(v, p), e.attributes(v, p)]},
    defaultdict: _Encoder.default,
    Counter: lambda e, v, p: {COUNTER: [e.pairs(v, p), e.attributes(v, p)]},
    deque: lambda e, v, p: {DEQUE: [e.items(v, p), v.maxlen]},
    bytearray: lambda e, v, p: {BYTEARRAY: e._bytes(v, p)},
    torch.Size: _Encoder.size,
    torch.Generator: _Encoder.generator,
}
