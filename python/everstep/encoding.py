"""State that is no tensor, as typed msgpack: loads to exactly what was saved, types included, and never runs code.

A blob is a mark and one msgpack value. ``None``, booleans, integers of 64 bits, floats, strings, bytes, lists, and dicts with string
keys are msgpack's own; every other type is a map of one entry whose key is a number (``_TUPLE``, …). Containers are numbered in the
order in which they are complete, so that one that occurs twice comes back as one object.

Types are exact: a subclass would come back as its base. Whatever is not listed here is refused with its path.
"""

from __future__ import annotations

import enum
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import torch
from torch import Tensor, nn

from . import legacy_encoding
from ._internal import CheckpointError, encode_plain
from .damage import reading
from .tensors import as_real_dtype, device_name, device_named, order_in_memory, raw, real_dtype, storable, stored_as

#: Tensors of a shard with this in front of their names are values of this kind.
BLOB = "__everstep__/"
#: The first byte of a blob; msgpack never writes it.
MARK = b"\xc1"
#: Containers inside containers. The reader's own limit is 511 levels of msgpack, of which one of ours takes up to three.
NESTING_MAX = 100
#: msgpack's limit for one string of bytes.
BYTES_MAX = (1 << 32) - 1

_TUPLE, _SET, _FROZENSET, _PAIRS, _ORDERED, _DEFAULT, _COUNTER, _DEQUE = range(1, 9)
_BIG_INT, _COMPLEX, _TEXT, _BYTEARRAY, _RANGE, _SLICE, _ELLIPSIS = range(9, 16)
_ARRAY, _SCALAR, _TENSOR, _INLINE, _SIZE, _CONSTANT, _DEVICE, _GENERATOR, _SAME = range(16, 25)

_NUMBERS = frozenset({type(None), bool, int, float})
#: Numbers, strings and times of numpy; no objects and no records.
_NUMPY_KINDS = "biufcSUMm"
_FACTORIES: dict[str, Any] = {
    "None": None,
    **{f.__name__: f for f in (list, dict, set, frozenset, tuple, int, float, bool, str, bytes, bytearray, complex, OrderedDict, Counter, deque)},
}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_CONSTANT_KINDS = (torch.dtype, torch.layout, torch.memory_format)
_CONSTANTS: dict[str, Any] = {str(v): v for v in vars(torch).values() if isinstance(v, _CONSTANT_KINDS)}

#: Where a value is: what it is in, its key or index, and whether that is an index.
Path = tuple["Path | None", Any, bool]


def text_of(path: Path | None) -> str:
    """``data/buffer[3]``; of very long ones the two ends."""
    parts: list[str] = []
    while path is not None:
        above, key, index = path
        shown = key if isinstance(key, str) else repr(key)
        parts.append(f"[{key}]" if index else f"/{shown}" if above is not None else shown)
        path = above
    text = "".join(reversed(parts)).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 300 else f"{text[:150]}…{text[-140:]}"


def name_of(path: Path | None) -> str:
    """The name of a tensor at this place."""
    parts: list[str] = []
    while path is not None:
        path, key, _ = path
        parts.append(str(key))
    return "/".join(reversed(parts))


#: Takes a tensor out of a value: its memory, the sharded tensor that this is a part of, and its place. Returns its name.
TakeTensor = Callable[[Tensor, "Tensor | None", "Path"], str]


def encode(value: Any, path: Path = (None, "state", False), take: TakeTensor | None = None, *, sharded: bool = False) -> bytes:
    """``value`` as bytes.

    Args:
        path: where it is, for errors.
        take: stores a tensor beside the blob; without it tensors are part of the blob.
        sharded: takes this rank's part of sharded tensors, which whoever loads the value makes whole again.

    Raises:
        CheckpointError: naming the place of what cannot be saved.
    """
    return _encode(value, path, take, sharded)[0]


def encode_part(value: Any, path: Path) -> bytes | None:
    """``value`` for :func:`join`, without tensors; ``None`` when it refers to a container, whose number is another in the whole."""
    blob, shares = _encode(value, path, None, False)
    return None if shares else blob


def _encode(value: Any, path: Path, take: TakeTensor | None, sharded: bool) -> tuple[bytes, bool]:
    """The blob, and whether a container occurs twice in it."""
    if (blob := encode_plain(value)) is not None:
        return blob, False
    encoder = _Encoder(take, sharded)
    try:
        return MARK + msgpack.packb(encoder.value(value, path), strict_types=True), encoder.shares
    except RecursionError as e:
        raise CheckpointError(f"{text_of(path)} is nested too deeply to be saved") from e


def join(head: bytes, key: str, value: bytes) -> bytes:
    """The blob of a dict with one more entry at its end, from those of the dict and of the value. Up to 15 entries; neither may refer to
    a container of the other."""
    return MARK + bytes([head[1] + 1]) + head[2:] + bytes(msgpack.packb(key)) + value[1:]


def decode(data: bytes, tensor: Callable[[str], Any], *, finish: bool = True) -> Any:
    """The value; ``tensor`` is asked for each tensor by name.

    Without ``finish`` the tensors are those of ``tensor`` or share their memory, so that they can be filled afterwards.

    Raises:
        DamagedError: when the bytes are not those of a value.
    """
    with reading("a value in the checkpoint, which is damaged, or of a newer everstep,"):
        if data[:1] != MARK:
            return legacy_encoding.decode(data, tensor)
        tree = msgpack.unpackb(data[1:], strict_map_key=False)
        return _Decoder(tensor, finish).value(tree)


def _refused(path: Path, kind: type, advice: str) -> CheckpointError:
    return CheckpointError(f"{text_of(path)} is of type {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickle; {advice}")


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
    """Only what msgpack has itself."""
    kinds = set(map(type, values))
    return kinds <= _NUMBERS and (int not in kinds or all(type(v) is not int or -(1 << 63) <= v < 1 << 64 for v in values))


def _is_ascii(values: list[Any]) -> bool:
    """Only strings that are UTF-8 without a look at each."""
    return set(map(type, values)) == {str} and "".join(values).isascii()


class _Encoder:
    def __init__(self, take: TakeTensor | None, sharded: bool) -> None:
        self._take, self._sharded = take, sharded
        self._depth = 0
        self.shares = False
        #: Inside keys and elements of sets, which must be equal to what they were, not the same object.
        self._keys = 0
        #: Numbers of complete containers by identity. They are kept alive: an identity may be used again.
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []
        self._open: set[int] = set()

    def value(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind is int:
            if -(1 << 63) <= value < 1 << 64:
                return value
            return {_BIG_INT: value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)}
        if value is None or kind is bool or kind is float:
            return value
        if kind is str:
            return value if _is_utf8(value) else {_TEXT: value.encode("utf-8", "surrogatepass")}
        if kind is bytes:
            return self._bytes(value, path)
        if kind is tuple and _is_numbers(value):
            # Nobody can tell two equal ones apart: they have no identity to keep.
            return {_TUPLE: list(value)}
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
            raise CheckpointError(f"{text_of(path)}: a {type(value).__name__} is a key, or in a set, by its identity, which cannot be saved; use a name or a number")
        number = self._seen.get(key)
        if number is not None:
            self.shares = True
            return {_SAME: number}
        if key in self._open:
            raise CheckpointError(f"{text_of(path)} contains itself, which cannot be saved")
        if self._depth == NESTING_MAX:
            raise CheckpointError(f"{text_of(path)} is nested more than {NESTING_MAX} levels deep, which cannot be saved")
        self._open.add(key)
        self._depth += 1
        encoded = encode(self, value, path)
        self._depth -= 1
        self._open.discard(key)
        self._seen[key] = len(self._alive)
        self._alive.append(value)
        return encoded

    def items(self, values: Iterable[Any], path: Path) -> list[Any]:
        """Elements of a sequence."""
        values = list(values)
        if _is_numbers(values) or _is_ascii(values):
            return values
        return [self.value(v, (path, i, True)) for i, v in enumerate(values)]

    def hashed(self, value: Any, path: Path) -> Any:
        """A key, or an element of a set."""
        self._keys += 1
        encoded = self.value(value, path)
        self._keys -= 1
        return encoded

    def elements(self, values: Iterable[Any], path: Path) -> list[Any]:
        """Elements of a set."""
        return [self.hashed(v, (path, v, False)) for v in values]

    def pairs(self, value: Any, path: Path) -> list[Any]:
        """Keys and values of a mapping, one after the other."""
        flat: list[Any] = []
        for key, inner in value.items():
            flat.append(self.hashed(key, (path, key, False)))
            flat.append(self.value(inner, (path, key, False)))
        return flat

    def dict(self, value: Any, path: Path) -> Any:
        """A dict: msgpack's own where its keys are."""
        if all(type(k) is str for k in value) and _is_utf8("".join(value)):
            return {k: self.value(v, (path, k, False)) for k, v in value.items()}
        return {_PAIRS: self.pairs(value, path)}

    def attributes(self, value: Any, path: Path) -> Any:
        """What was set on a container beside its content (torch keeps versions of modules in ``state_dict()._metadata``)."""
        return self.value(dict(vars(value)), (path, "__dict__", False)) if vars(value) else None

    def _other(self, value: Any, kind: type, path: Path) -> Any:
        if isinstance(value, Tensor):
            return self._container(value, path, _Encoder._tensor)
        if kind is complex:
            return {_COMPLEX: [value.real, value.imag]}
        if kind is range:
            return {_RANGE: [self.value(v, path) for v in (value.start, value.stop, value.step)]}
        if kind is slice:
            return {_SLICE: [self.value(v, path) for v in (value.start, value.stop, value.step)]}
        if value is ...:
            return {_ELLIPSIS: None}
        if kind in _CONSTANT_KINDS:
            return {_CONSTANT: str(value)}
        if kind is torch.device:
            return {_DEVICE: str(value)}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            if kind is numpy.ndarray:
                return self._container(value, path, _Encoder._array)
            if issubclass(kind, numpy.generic) and kind.__module__ == "numpy":
                return {_SCALAR: self._numpy(value, path)}
        raise _refused(path, kind, _advice(value))

    def _numpy(self, value: Any, path: Path) -> list[Any]:
        import numpy

        # An empty string of its own has no size; as an array it has.
        array = numpy.asarray(value)
        dtype = array.dtype
        if dtype.kind not in _NUMPY_KINDS or numpy.dtype(dtype.str) != dtype or dtype.metadata:
            raise CheckpointError(f"{text_of(path)} is of numpy's {dtype!r}, which cannot be saved; convert it to numbers or strings")
        if isinstance(value, (str, bytes)) and value[-1:] in ("\0", b"\0"):
            raise CheckpointError(f"{text_of(path)} is a numpy string that ends with NUL, which numpy drops; convert it to str or bytes")
        return [dtype.str if numpy.dtype(dtype.str).char == dtype.char else dtype.str[0] + dtype.char, self._bytes(array.tobytes("C"), path)]

    def _array(self, value: Any, path: Path) -> Any:
        fortran = value.flags.f_contiguous and not value.flags.c_contiguous
        return {_ARRAY: [*self._numpy(value, path), list(value.shape), fortran]}

    def _tensor(self, value: Tensor, path: Path) -> Any:
        part = getattr(value, "_local_tensor", None)
        if part is not None and not self._sharded:
            raise CheckpointError(f"{text_of(path)} is a sharded tensor (DTensor), which only modules and optimizers can have; save to_local()")
        if part is None and type(value) not in (Tensor, nn.Parameter):
            raise _refused(path, type(value), _advice(value))
        if any(getattr(value, "names", ())):
            raise CheckpointError(f"{text_of(path)} is a tensor with named dimensions, which cannot be saved; save rename(None)")
        own = storable(value if part is None else part, lambda: text_of(path))
        note: dict[str, Any] = {}
        if (dtype := real_dtype(own)) is not None:
            note["dtype"] = dtype
        if part is None:
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
            return {_INLINE: [dtype, shape, self._bytes(raw(own).numpy().tobytes(), path), note]}
        name = self._take(own, None if part is None else value, path)
        if not _is_utf8(name):
            raise CheckpointError(f"{text_of(path)} is a tensor whose name is not valid Unicode; rename its keys")
        return {_TENSOR: [name, note] if note else name}

    def size(self, value: Any, path: Path) -> Any:
        return {_SIZE: self.items(value, path)}

    def generator(self, value: torch.Generator, path: Path) -> Any:
        return {_GENERATOR: [str(value.device), self._bytes(value.get_state().numpy().tobytes(), path)]}

    def default(self, value: Any, path: Path) -> Any:
        try:
            factory = _FACTORY_NAMES[value.default_factory]
        except (KeyError, TypeError):
            raise CheckpointError(
                f"{text_of(path)} is a defaultdict whose default_factory {value.default_factory!r} cannot be saved without pickle; "
                f"use one of {', '.join(_FACTORIES)}, or save dict(...)"
            ) from None
        return {_DEFAULT: [factory, self.pairs(value, path)]}


_CONTAINERS: dict[type, Callable[[_Encoder, Any, Path], Any]] = {
    list: _Encoder.items,
    dict: _Encoder.dict,
    tuple: lambda e, v, p: {_TUPLE: e.items(v, p)},
    set: lambda e, v, p: {_SET: e.elements(v, p)},
    frozenset: lambda e, v, p: {_FROZENSET: e.elements(v, p)},
    OrderedDict: lambda e, v, p: {_ORDERED: [e.pairs(v, p), e.attributes(v, p)]},
    defaultdict: _Encoder.default,
    Counter: lambda e, v, p: {_COUNTER: [e.pairs(v, p), e.attributes(v, p)]},
    deque: lambda e, v, p: {_DEQUE: [e.items(v, p), v.maxlen]},
    bytearray: lambda e, v, p: {_BYTEARRAY: e._bytes(v, p)},
    torch.Size: _Encoder.size,
    torch.Generator: _Encoder.generator,
}


class _Decoder:
    def __init__(self, tensor: Callable[[str], Any], finish: bool) -> None:
        self._tensor, self._finish = tensor, finish
        self._seen: list[Any] = []

    def value(self, node: Any) -> Any:
        kind = type(node)
        if kind is list:
            return self._complete(self._items(node))
        if kind is not dict:
            return node
        if len(node) == 1 and type(code := next(iter(node))) is int:
            if code == _SAME:
                return self._seen[node[code]]
            if code == _TUPLE and set(map(type, node[code])) <= _NUMBERS:
                return tuple(node[code])
            found = self._tagged(code, node[code])
            return self._complete(found) if code in _NUMBERED else found
        return self._complete({k: self.value(v) for k, v in node.items()})

    def _complete(self, found: Any) -> Any:
        self._seen.append(found)
        return found

    def _items(self, nodes: list[Any]) -> list[Any]:
        return nodes if set(map(type, nodes)) <= _NUMBERS else [self.value(n) for n in nodes]

    def _pairs(self, nodes: list[Any]) -> list[tuple[Any, Any]]:
        flat = [self.value(n) for n in nodes]
        return list(zip(flat[::2], flat[1::2], strict=True))

    def _with_attributes(self, found: Any, attributes: Any) -> Any:
        if attributes is not None:
            vars(found).update(self.value(attributes))
        return found

    def _tagged(self, code: int, given: Any) -> Any:
        plain = _PLAIN.get(code)
        if plain is not None:
            return plain(given)
        if code in _OF_ITEMS:
            return _OF_ITEMS[code](self._items(given))
        if code == _PAIRS:
            return dict(self._pairs(given))
        if code == _ORDERED:
            return self._with_attributes(OrderedDict(self._pairs(given[0])), given[1])
        if code == _COUNTER:
            return self._with_attributes(Counter(dict(self._pairs(given[0]))), given[1])
        if code == _DEFAULT:
            return defaultdict(_FACTORIES[given[0]], self._pairs(given[1]))
        if code == _DEQUE:
            return deque(self._items(given[0]), given[1])
        if code == _RANGE:
            return range(*[self.value(n) for n in given])
        if code == _SLICE:
            return slice(*[self.value(n) for n in given])
        if code == _TENSOR:
            name, note = (given, {}) if isinstance(given, str) else given
            return self._finished(self._tensor(name), note)
        if code == _INLINE:
            dtype, shape, data, note = given
            return self._finished(legacy_encoding.tensor_of(dtype, shape, data), note)
        raise ValueError(f"unknown type code {code} in the checkpoint: it was written by a newer everstep; install that version")

    def _finished(self, tensor: Any, note: dict[str, Any]) -> Any:
        if tensor is None or not note:
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


def _array(given: list[Any]) -> Any:
    import numpy

    dtype, data, shape, fortran = given
    found = _from_bytes(dtype, shape, data)
    return numpy.asfortranarray(found) if fortran else found


def _scalar(given: list[Any]) -> Any:
    dtype, data = given
    return _from_bytes(dtype, [], data)[()]


def _from_bytes(dtype: str, shape: list[int], data: bytes) -> Any:
    import numpy

    kind = numpy.dtype(dtype)
    if kind.itemsize == 0 and data:
        # Empty strings were once written without the size that they have in memory.
        kind = numpy.dtype(f"{dtype[:-1]}1")
    if not isinstance(dtype, str) or kind.kind not in _NUMPY_KINDS or math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"an array of {len(data)} bytes in the checkpoint is not {dtype} {shape}: it is damaged")
    found = numpy.ndarray(shape, kind)  # numpy.empty() gives strings without a size one
    if data:
        found.reshape(-1).view("u1")[...] = numpy.frombuffer(data, "u1")
    return found


def _generator(given: list[Any]) -> torch.Generator:
    generator = torch.Generator(device_named(given[0]))
    generator.set_state(torch.frombuffer(bytearray(given[1]), dtype=torch.uint8))
    return generator


_PLAIN: dict[int, Callable[[Any], Any]] = {
    _BIG_INT: lambda given: int.from_bytes(given, "little", signed=True),
    _COMPLEX: lambda given: complex(given[0], given[1]),
    _TEXT: lambda given: given.decode("utf-8", "surrogatepass"),
    _BYTEARRAY: bytearray,
    _ELLIPSIS: lambda given: ...,
    _ARRAY: _array,
    _SCALAR: _scalar,
    _CONSTANT: _CONSTANTS.__getitem__,
    _DEVICE: torch.device,
    _GENERATOR: _generator,
}
_OF_ITEMS: dict[int, Callable[[list[Any]], Any]] = {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset, _SIZE: torch.Size}
#: Types that are numbered as they are complete, as :meth:`_Encoder._container` does.
_NUMBERED = {
    _TUPLE, _SET, _FROZENSET, _PAIRS, _ORDERED, _DEFAULT, _COUNTER, _DEQUE, _BYTEARRAY, _ARRAY, _TENSOR, _INLINE, _SIZE, _GENERATOR,
}  # fmt: skip
