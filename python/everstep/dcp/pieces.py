"""What DCP saves, as tensors of a shard, with where they belong: the global tensors that they are parts of."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._internal import CheckpointError, Shard
from ..encoding import BLOB
from ..state import DTYPES, Item

#: The tensor of a shard that says where its tensors belong.
TABLE = BLOB + "dcp"
_OBJECT = TABLE + "/"
VERSION = 1


@dataclass(frozen=True)
class Piece:
    """A block of a tensor, or with ``tensor=None`` an object that is none (as DCP pickles it)."""

    fqn: str
    tensor: Tensor | None
    #: Shape of the whole tensor, and where the block begins in it.
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    pickled: bytes = b""

    @property
    def name(self) -> str:
        """Unique among all ranks' pieces."""
        if self.tensor is None:
            return _OBJECT + self.fqn
        whole = tuple(self.tensor.shape) == self.shape
        return self.fqn if whole else f"{self.fqn}@{','.join(map(str, self.offsets))}"

    @property
    def bytes(self) -> int:
        """Length."""
        return len(self.pickled) if self.tensor is None else self.tensor.numel() * self.tensor.element_size()


def pickled(value: Any) -> bytes:
    """As DCP stores what is no tensor. Only DCP's planner ever reads it back."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def of_object(fqn: str, value: Any) -> list[Piece]:
    """This rank's pieces of one value of a flattened state dict."""
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
    # Of equal copies the first is saved.
    if at is None or any(c and not isinstance(p, Sharded) and not hasattr(p, "split_factor") for c, p in zip(at, value.placements, strict=True)):
        return []
    shape, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    part = local.detach()
    if tuple(part.shape) != tuple(shape):
        raise CheckpointError(f"{fqn}: the local part has shape {tuple(part.shape)}, its placements say {tuple(shape)}")
    return [Piece(fqn, part, tuple(value.shape), tuple(offsets))] if part.numel() or not value.numel() else []


def items(pieces: Iterable[Piece], mappings: Mapping[str, Any]) -> list[Item]:
    """The pieces and their table as what a snapshot takes."""
    found, rows, objects = [], [], []
    for piece in pieces:
        if piece.tensor is None:
            found.append(Item(piece.name, torch.frombuffer(bytearray(piece.pickled), dtype=torch.uint8), True))
            objects.append(piece.fqn)
            continue
        tensor = piece.tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        sizes = list(tensor.shape)
        if tensor.dtype not in DTYPES:
            # Whatever safetensors has no name for is stored as its bytes.
            tensor = tensor.contiguous().view(-1).view(torch.uint8)
        found.append(Item(piece.name, tensor, False))
        rows.append([piece.name, piece.fqn, dtype, list(piece.shape), list(piece.offsets), sizes])
    found.sort(key=lambda i: -i.tensor.element_size())
    table = json.dumps({"version": VERSION, "pieces": rows, "objects": objects, "mappings": {k: list(v) for k, v in mappings.items()}})
    return [*found, Item(TABLE, torch.frombuffer(bytearray(table.encode()), dtype=torch.uint8), True)]


@dataclass(frozen=True)
class Stored:
    """A block as a shard has it."""

    shard: int
    name: str
    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass
class Table:
    """Everything that a checkpoint has."""

    blocks: list[Stored]
    #: Shard and name of each object, by fully qualified name.
    objects: dict[str, tuple[int, str]]
    #: Keys of the nested state dict, by fully qualified name.
    mappings: dict[str, tuple[Any, ...]]


def read_table(directory: str, shards: list[Shard]) -> Table:
    """The tables of all shards, verified.

    Raises:
        CheckpointError: when a shard was not made by DCP.
    """
    table = Table([], {}, {})
    for number, shard in enumerate(shards):
        try:
            said = json.loads(shard.bytes(TABLE))
        except CheckpointError as e:
            if not any(entry[0] == TABLE for entry in shard.entries()):
                raise CheckpointError(f"{directory} was not saved through DCP: read it with everstep.CheckpointManager") from e
            raise
        if said["version"] != VERSION:
            raise CheckpointError(f"{directory} has tables of version {said['version']}, this everstep reads {VERSION}; install the one that wrote it")
        for name, fqn, dtype, shape, offsets, sizes in said["pieces"]:
            table.blocks.append(Stored(number, name, fqn, getattr(torch, dtype), tuple(shape), tuple(offsets), tuple(sizes)))
        for fqn in said["objects"]:
            table.objects.setdefault(fqn, (number, _OBJECT + fqn))
        table.mappings.update({fqn: tuple(path) for fqn, path in said["mappings"].items()})
    return table
