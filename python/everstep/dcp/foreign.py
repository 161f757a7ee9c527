"""Reads checkpoints of ``torch.distributed.checkpoint``'s own without running anything of them."""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from .._internal import CheckpointError
from ..damage import reading
from . import nesting, restricted_unpickler, screening
from .restricted_unpickler import Made, Pairs, refused
from .sizes import Allowance, length_of

#: Longest metadata that is read, in bytes.
METADATA_BYTES_MAX = 1 << 30
_META = "torch.distributed.checkpoint.metadata."
#: Every dtype of torch, by the name in a pickle.
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_T = TypeVar("_T")


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Opens a regular file for reading; a FIFO or a device would block or never end.

    Raises:
        CheckpointError: when it is anything else.
        OSError: of the file system.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}") from e
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path} is not a regular file")
    return open(handle, "rb")  # the caller's


def safe_load(data: BinaryIO, what: str) -> Any:
    """Loads what ``torch.save`` wrote, tensors and plain values only.

    Raises:
        CheckpointError: when it contains anything else.
        DamagedError: when it is not such a file.
    """
    with reading(what):
        screening.check(data, what)
        try:
            return torch.load(data, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as e:
            # torch's text recommends loading it unsafely; only the name in it is shown.
            named = re.search(r"GLOBAL ([\w.]+)", str(e))
            raise refused(f"{what} holds {named[1] if named else 'more than tensors and plain values'}") from e
        except (zipfile.BadZipFile, OSError) as e:
            raise ValueError(str(e)) from e


def bounded_load(data: BinaryIO, what: str, allowance: Allowance | None = None) -> Any:
    """Does the same for a file of anyone: what was loaded takes memory in proportion to its length,
    or within the ``allowance`` for several files.

    Raises:
        CheckpointError: when it would take more, or contains anything else.
        DamagedError: when it is not such a file.
    """
    allowance = allowance or Allowance(length_of(data))
    value = safe_load(data, what)
    allowance.take(value, what)
    return value


@dataclass(frozen=True)
class _Place:
    """The bytes of one item."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class _Chunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Whole:
    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: list[_Chunk]


def load(directory: Path) -> dict[str, Any]:
    """Returns the state dict, nested as it was saved.

    Raises:
        CheckpointError: when it cannot be read, or contains what only a pickle could restore.
    """
    with open_regular(directory / ".metadata") as file:
        data = file.read(METADATA_BYTES_MAX + 1)
    if len(data) > METADATA_BYTES_MAX:
        raise CheckpointError(f"the metadata in {directory} is longer than {METADATA_BYTES_MAX} bytes")
    with reading(f"the metadata in {directory}"):
        entries, mappings, places = _metadata(restricted_unpickler.loads(data))
        _check_places(directory, places.values())
        for name, entry in entries.items():
            if isinstance(entry, _Whole):
                _check(name, entry)
    values: dict[str, Any] = {}
    allowance = Allowance(sum(place.length for place in places.values()))
    for name, entry in entries.items():
        with reading(f"{name} in {directory}"):
            values[name] = (
                _tensor(directory, name, entry, places, allowance)
                if isinstance(entry, _Whole)
                else bounded_load(_piece(directory, places[name, None]), name, allowance)
            )
    return nesting.nested(values, mappings)


def _fields(made: Any, kind: str) -> dict[str, Any]:
    """Returns the attributes of an object of DCP."""
    if not isinstance(made, Made) or made.name != kind or not made.called:
        raise ValueError(f"{kind} is missing")
    state = made.state
    if isinstance(state, Pairs):
        return {_as(k, str): v for k, v in state.items}
    if state is None:
        return {}
    raise ValueError(f"{kind} has another state")


def _as(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _size(value: Any) -> tuple[int, ...]:
    if isinstance(value, Made) and value.name == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    if (
        not isinstance(value, (tuple, list))
        or len(value) > 64
        or not all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    ):
        raise ValueError("an invalid shape")
    return tuple(value)


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Pairs) or (isinstance(value, Made) and value.name == "collections.OrderedDict"):
        return value.items
    raise ValueError("a dict is missing")


def _metadata(
    made: Any,
) -> tuple[
    dict[str, _Whole | None], dict[str, tuple[str | int, ...]], dict[tuple[str, tuple[int, ...] | None], _Place]
]:
    """Returns entries by name (``None``: not a tensor), their paths, and where their bytes are."""
    fields = _fields(made, _META + "Metadata")
    entries: dict[str, _Whole | None] = {}
    for name, entry in _pairs(fields["state_dict_metadata"]):
        if _as(name, str) in entries:
            raise ValueError(f"{name} twice")
        kind = entry.name if isinstance(entry, Made) else ""
        entries[name] = (
            None if kind == _META + "BytesStorageMetadata" else _whole(_fields(entry, _META + "TensorStorageMetadata"))
        )
    mappings: dict[str, tuple[str | int, ...]] = {}
    if fields.get("planner_data") is not None:
        for name, path in _pairs(fields["planner_data"]):
            # Before it is part of any text: a tuple of tuples may have any length.
            _as(name, str)
            if (
                not isinstance(path, tuple)
                or not path
                or len(path) > nesting.DEPTH_MAX
                or not all(type(p) in (str, int) for p in path)
            ):
                raise ValueError(f"{name} has no path")
            mappings[name] = path
    places: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
    for index, info in _pairs(fields["storage_data"]):
        key, where = (
            _fields(index, _META + "MetadataIndex"),
            _fields(info, "torch.distributed.checkpoint.filesystem._StorageInfo"),
        )
        if where.get("transform_descriptors"):
            raise refused("it was saved with transforms")
        offset = key.get("offset")
        place = _Place(_as(where["relative_path"], str), _as(where["offset"], int), _as(where["length"], int))
        if (
            os.path.basename(place.file) != place.file
            or place.file in ("", ".", "..")
            or "\0" in place.file
            or min(place.offset, place.length) < 0
        ):
            raise ValueError(f"{place.file!r} lies outside of the checkpoint")
        name = _as(key["fqn"], str)
        places[name, None if entries.get(name) is None else _size(offset if offset is not None else ())] = place
    return entries, mappings, places


def _whole(fields: dict[str, Any]) -> _Whole:
    properties = fields["properties"]
    if (
        not isinstance(properties, Made)
        or properties.name != _META + "TensorProperties"
        or not isinstance(properties.state, tuple)
    ):
        raise ValueError("properties of a tensor are missing")
    named = properties.state[0]
    if not isinstance(named, Made) or named.called or named.name not in _DTYPES:
        raise ValueError("an invalid dtype")
    chunks = []
    for chunk in _as(fields["chunks"], list):
        found = _fields(chunk, _META + "ChunkStorageMetadata")
        chunks.append(_Chunk(_size(found["offsets"]), _size(found["sizes"])))
    return _Whole(_DTYPES[named.name], _size(fields["size"]), chunks)


def _check(name: str, whole: _Whole) -> None:
    """Checks that the chunks of a tensor cover it without overlap."""
    for chunk in whole.chunks:
        if (
            len(chunk.offsets) != len(whole.size)
            or len(chunk.sizes) != len(whole.size)
            or any(o + n > m for o, n, m in zip(chunk.offsets, chunk.sizes, whole.size, strict=True))
        ):
            raise ValueError(f"a part of {name} lies outside of it")
    if not cover(whole.size, [(c.offsets, c.sizes) for c in whole.chunks]):
        raise ValueError(f"the parts of {name} are not all of it")


def cover(size: tuple[int, ...], parts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Returns whether the parts (offsets, sizes), which are within ``size``, cover it without
    overlap."""
    parts = [p for p in parts if 0 not in p[1]]
    if sum(math.prod(sizes) for _, sizes in parts) != math.prod(size):
        return False
    if len(parts) < 2:
        return True
    # Along the dimension with the most offsets, only neighbours can overlap.
    d = max(range(len(size)), key=lambda d: len({offsets[d] for offsets, _ in parts}))
    parts.sort(key=lambda p: p[0][d])
    for n, (offsets, sizes) in enumerate(parts):
        for other, extent in parts[n + 1 :]:
            if other[d] >= offsets[d] + sizes[d]:
                break
            if all(o < b + m and b < o + s for o, s, b, m in zip(offsets, sizes, other, extent, strict=True)):
                return False
    return True


def _check_places(directory: Path, places: Iterable[_Place]) -> None:
    """Checks that items do not share bytes, of which each makes a copy in memory."""
    lengths: Counter[str] = Counter()
    for place in places:
        lengths[place.file] += place.length
    for name, length in lengths.items():
        path = directory / name
        if path.exists() and length > path.stat().st_size:
            raise ValueError(f"its items have {length} bytes of {name}, more than the file has")


def _piece(directory: Path, place: _Place) -> BinaryIO:
    """Opens the bytes of one item."""
    with open_regular(directory / place.file) as file:
        if place.offset + place.length > os.fstat(file.fileno()).st_size:
            raise ValueError(f"{place.file} is shorter than its metadata says")
        file.seek(place.offset)
        return io.BytesIO(file.read(place.length))


def _tensor(directory: Path, name: str, whole: _Whole, places: dict[Any, _Place], allowance: Allowance) -> Tensor:
    pieces = []
    for chunk in whole.chunks:
        piece = bounded_load(_piece(directory, places[name, chunk.offsets]), name, allowance)
        if not isinstance(piece, Tensor) or tuple(piece.shape) != chunk.sizes or piece.dtype != whole.dtype:
            raise ValueError(f"a part of {name} has another type or shape than its metadata says")
        if (
            piece.layout is not torch.strided
            or piece.is_meta
            or piece.numel() * piece.element_size() > piece.untyped_storage().nbytes()
        ):
            raise ValueError(f"a part of {name} has fewer bytes than its shape needs")
        pieces.append((chunk, piece))
    # Memory is allocated only for what can be read.
    tensor = torch.empty(whole.size, dtype=whole.dtype, device="cpu")
    for chunk, piece in pieces:
        tensor[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = piece
    return tensor
