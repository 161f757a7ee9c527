"""What DCP saves, as tensors of a shard, with their places in global tensors."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._internal import CheckpointError, Entry, Shard
from ..blob_format import BLOB
from ..damage import reading
from ..layout import EXTRA, LAYOUT, RNG
from ..state import DTYPES, Item
from ..tensors import storable
from . import nesting
from .foreign import cover

#: The tensor of a shard that contains where its tensors belong.
TABLE = BLOB + "dcp"
_OBJECT = TABLE + "/"
VERSION = 1
#: Limit on the dimensions of a tensor.
DIMENSIONS_MAX = 64


@dataclass(frozen=True)
class Piece:
    """A block of a tensor, or with ``tensor=None`` another object (as DCP pickles it)."""

    fqn: str
    tensor: Tensor | None
    #: Shape of the whole tensor, and where the block begins in it.
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    pickled: bytes = b""

    @property
    def name(self) -> str:
        """The name, unique among all ranks' pieces."""
        if self.tensor is None:
            return _OBJECT + self.fqn
        whole = tuple(self.tensor.shape) == self.shape
        return self.fqn if whole else f"{self.fqn}@{','.join(map(str, self.offsets))}"

    @property
    def bytes(self) -> int:
        """The length in bytes."""
        return len(self.pickled) if self.tensor is None else self.tensor.numel() * self.tensor.element_size()


def pickled(value: Any) -> bytes:
    """Pickles an object that is not a tensor, as DCP does. Only DCP's planner ever reads it."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def of_object(fqn: str, value: Any) -> list[Piece]:
    """Returns this rank's pieces of one value of a flattened state dict."""
    local = getattr(value, "_local_tensor", None)
    if local is not None and hasattr(value, "device_mesh"):
        return _of_dtensor(fqn, value, local)
    if hasattr(value, "local_shards"):
        shards = value.local_shards()
        return [Piece(fqn, s.tensor.detach(), tuple(value.size()), tuple(s.metadata.shard_offsets)) for s in shards]
    if isinstance(value, Tensor):
        return [Piece(fqn, value.detach(), tuple(value.shape), (0,) * value.dim())]
    return [Piece(fqn, None, pickled=pickled(value))]


def _of_dtensor(fqn: str, value: Any, local: Tensor) -> list[Piece]:
    from torch.distributed.tensor import Shard as Sharded
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    at = value.device_mesh.get_coordinate()
    # Of equal copies, the first is saved.
    if at is None or any(
        c and not isinstance(p, Sharded) and not hasattr(p, "split_factor")
        for c, p in zip(at, value.placements, strict=True)
    ):
        return []
    shape, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    part = local.detach()
    if tuple(part.shape) != tuple(shape):
        raise CheckpointError(
            f"{fqn}: the local part has shape {tuple(part.shape)}, but {tuple(shape)} by its placements"
        )
    return [Piece(fqn, part, tuple(value.shape), tuple(offsets))] if part.numel() or not value.numel() else []


def items(pieces: Iterable[Piece], mappings: Mapping[str, Any]) -> list[Item]:
    """Returns the pieces and their table as items of a snapshot.

    Raises:
        CheckpointError: naming a tensor that cannot be saved exactly.
    """
    found, rows, objects = [], [], []
    for piece in pieces:
        if piece.tensor is not None and piece.name.startswith(BLOB):
            raise CheckpointError(
                f"{piece.fqn} has a name that begins with {BLOB}, which is everstep's own; rename it in the state"
            )
        if piece.tensor is None:
            found.append(Item(piece.name, torch.frombuffer(bytearray(piece.pickled), dtype=torch.uint8), True))
            objects.append(piece.fqn)
            continue
        tensor = storable(piece.tensor, partial(str, piece.fqn))
        dtype = str(tensor.dtype).removeprefix("torch.")
        sizes = list(tensor.shape)
        if tensor.dtype not in DTYPES:
            # A dtype without a name in safetensors is stored as bytes.
            tensor = tensor.contiguous().view(-1).view(torch.uint8)
        found.append(Item(piece.name, tensor, False))
        rows.append([piece.name, piece.fqn, dtype, list(piece.shape), list(piece.offsets), sizes])
    if deep := next((name for name, path in mappings.items() if len(path) > nesting.DEPTH_MAX), None):
        raise CheckpointError(f"{deep} is nested more than {nesting.DEPTH_MAX} levels deep, which cannot be saved")
    try:
        nesting.check(map(tuple, mappings.values()))
    except ValueError as e:
        raise CheckpointError(
            f"the state cannot be saved: {e}; torch.distributed.checkpoint does not tell keys apart that look the same, "
            "such as 1 and '1'"
        ) from None
    found.sort(key=lambda i: -i.tensor.element_size())
    table = json.dumps(
        {"version": VERSION, "pieces": rows, "objects": objects, "mappings": {k: list(v) for k, v in mappings.items()}}
    )
    return [*found, Item(TABLE, torch.frombuffer(bytearray(table.encode()), dtype=torch.uint8), True)]


@dataclass(frozen=True)
class Stored:
    """A block in a shard."""

    shard: int
    name: str
    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass
class Table:
    """The contents of a checkpoint."""

    blocks: list[Stored]
    #: Shard and name of each object, by fully qualified name.
    objects: dict[str, tuple[int, str]]
    #: Keys of the nested state dict, by fully qualified name.
    mappings: dict[str, tuple[Any, ...]]


def read_table(directory: str, shards: list[Shard]) -> Table:
    """Reads and verifies the tables of all shards.

    Raises:
        CheckpointError: when a shard was not made by DCP.
    """
    table = Table([], {}, {})
    for number, shard in enumerate(shards):
        try:
            data = shard.bytes(TABLE)
        except CheckpointError as e:
            if not any(entry.name == TABLE for entry in shard.entries()):
                raise CheckpointError(
                    f"{directory} was not saved through DCP: read it with everstep.CheckpointManager"
                ) from e
            raise
        with reading(f"the table of {shard.path}"):
            said = json.loads(data)
        with reading(f"the table of {shard.path}"):
            if said["version"] != VERSION:
                raise CheckpointError(
                    f"{directory} has tables of version {said['version']}, but this everstep reads version {VERSION}; "
                    "install the everstep version that wrote it"
                )
            entries = {entry.name: entry for entry in shard.entries()}
            for row in said["pieces"]:
                table.blocks.append(_stored(number, row, entries))
            names = {row[0] for row in said["pieces"]}
            if len(names) < len(said["pieces"]):
                raise ValueError("two parts of tensors have the same bytes")
            for fqn in said["objects"]:
                if entries[_OBJECT + fqn].dtype != "U8":
                    raise ValueError(f"{fqn} is not an object")
                table.objects.setdefault(fqn, (number, _OBJECT + fqn))
            mappings = {fqn: _path(path) for fqn, path in said["mappings"].items()}
            nesting.check(mappings.values())
            table.mappings.update(mappings)
            if mixed := [name for name in (RNG, EXTRA, LAYOUT) if BLOB + name in entries]:
                raise ValueError(f"the shard has {BLOB}{mixed[0]}, which only a CheckpointManager saves")
            if forgotten := sorted(entries.keys() - names - {TABLE, *(_OBJECT + fqn for fqn in said["objects"])}):
                raise ValueError(f"the shard has {forgotten[0]}, which the table does not list")
    with reading(f"the tables of {directory}"):
        _check(table)
    return table


def _path(path: Any) -> tuple[str | int, ...]:
    # Numbers are indices of lists.
    good = path and len(path) <= nesting.DEPTH_MAX and type(path[0]) is str
    if not good or not all(type(p) is str or (type(p) is int and p >= 0) for p in path):
        raise ValueError("an invalid path")
    return tuple(path)


def _numbers(row: Any) -> tuple[int, ...]:
    if len(row) > DIMENSIONS_MAX or not all(type(n) is int and 0 <= n < 1 << 62 for n in row):
        raise ValueError("an invalid shape")
    return tuple(row)


def _stored(number: int, row: Any, entries: Mapping[str, Entry]) -> Stored:
    """Checks a row of a table against the shard's own index."""
    name, fqn, said, *numbers = row
    shape, offsets, sizes = map(_numbers, numbers)
    dtype = getattr(torch, said)
    if not isinstance(name, str) or not isinstance(fqn, str) or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{said!r} is not a dtype")
    stored = entries[name]
    same = stored.dtype == DTYPES[dtype] and tuple(stored.shape) == sizes if dtype in DTYPES else stored.dtype == "U8"
    if not same or math.prod(sizes) * dtype.itemsize != stored.bytes:
        raise ValueError(f"{name} is not stored as {dtype} {sizes}")
    if not len(shape) == len(offsets) == len(sizes) or any(
        o + n > all_ for o, n, all_ in zip(offsets, sizes, shape, strict=True)
    ):
        raise ValueError(f"{name} lies outside of {fqn}")
    return Stored(number, name, fqn, dtype, shape, offsets, sizes)


def _check(table: Table) -> None:
    """Checks that the blocks of each tensor cover it; of equal copies, the first counts."""
    tensors: dict[str, dict[tuple[int, ...], Stored]] = {}
    for block in table.blocks:
        blocks = tensors.setdefault(block.fqn, {})
        first = next(iter(blocks.values()), block)
        if (first.shape, first.dtype) != (block.shape, block.dtype) or blocks.setdefault(
            block.offsets, block
        ).sizes != block.sizes:
            raise ValueError(f"{block.fqn} has different shapes or dtypes in different shards")
    for fqn, blocks in tensors.items():
        if fqn in table.objects:
            raise ValueError(f"{fqn} is a tensor and an object")
        if not cover(next(iter(blocks.values())).shape, [(b.offsets, b.sizes) for b in blocks.values()]):
            raise ValueError(f"the parts of {fqn} are not all of it")
    values = tensors.keys() | table.objects.keys()
    # A planner may leave out values that have a place in the state.
    if table.mappings and (unknown := sorted(values - table.mappings.keys())):
        raise ValueError(f"{unknown[0]} has no place in the state")
    for fqn, path in table.mappings.items():
        # The name that torch's flatten_state_dict() gives it: a loader derives the names from the
        # places.
        if fqn != ".".join(map(str, path)):
            raise ValueError(f"{fqn} has the place of {'.'.join(map(str, path))!r} in the state")
