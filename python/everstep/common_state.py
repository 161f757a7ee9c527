"""Checks that what all ranks should have in common is the same in a checkpoint that is restored to
other ranks, or with another sharding. Independent models have the same names, too."""

from __future__ import annotations

import warnings

import torch

from . import decoding, node_reader
from ._internal import CheckpointError, Target, WantedPart, open_shard
from .blob_format import BLOB
from .compare import difference
from .resharded import Resharded
from .tensor_places import Place
from .values import Values

#: Largest difference of two copies of a tensor that is taken for rounding, relative to its largest
#: element.
DRIFT_MAX = 0.05


class _Tensor(str):
    """Stands for a tensor in a value, by its name."""


def require(checkpoint: Resharded) -> None:
    """Checks that what a rank would get of other ranks is not each rank's own. All ranks must call
    it; each looks at some of those that wrote the checkpoint.

    Raises:
        CheckpointError: naming what differs between two of them.
        DamagedError: when some of it is not what was written.
    """
    if not checkpoint.is_alike() and (wrong := node_reader.found_by_any(_own_values(checkpoint))) is not None:
        raise CheckpointError(wrong)


def _own_values(checkpoint: Resharded) -> str | None:
    here, size = checkpoint.here, checkpoint.whole.world_size
    for rank in range(here.layout.rank, size, here.layout.world_size):
        if (found := _differing_tensor(checkpoint, rank)) is not None:
            return (
                f"{found[0]} has different values on ranks {found[1]} and {rank} in the checkpoint, so each rank had its own: "
                f"run with {size} ranks and the sharding that it was saved with"
            )
        if size == here.layout.world_size:
            # Each rank gets its own.
            continue
        if (own := next((n for n in sorted(here.personal) if _differs(checkpoint, rank, n)), None)) is not None:
            first = checkpoint.tensors[BLOB + own].first
            return (
                f"{own}= has different values on ranks {first} and {rank} in the checkpoint, and everstep cannot divide them among "
                f"{here.layout.world_size} ranks: run with {size} ranks, or leave {own}= out"
            )
    return None


def _differing_tensor(checkpoint: Resharded, rank: int) -> tuple[str, int] | None:
    """Returns the first trained tensor that is not the same on a rank and on another one, and that
    one. Warns of copies that have only drifted apart."""
    names, drifted = sorted(checkpoint.here.trained), list[tuple[str, int]]()
    while (found := checkpoint.whole.difference(rank, names)) is not None:
        if not _has_drifted(checkpoint, rank, found[0]):
            return found
        drifted.append(found)
        names = names[names.index(found[0]) + 1 :]
    if drifted:
        (name, other), more = drifted[0], f" (and {len(drifted) - 1} more)" if len(drifted) > 1 else ""
        warnings.warn(
            f"everstep: {name}{more} differs slightly between ranks {other} and {rank} in the checkpoint, although all ranks should "
            f"have the same values; those of rank {other} are used",
            stacklevel=9,
        )
    return None


def _has_drifted(checkpoint: Resharded, rank: int, name: str) -> bool:
    """Returns whether a rank's part of a tensor is nearly what the others have. Copies in one model
    drift apart by rounding; those in two models have nothing in common."""
    values, whole = Values(open_shard(checkpoint.path, rank)), checkpoint.tensors[name]
    entry = values.entries[name]
    shape = tuple(entry.shape)
    place = values.places().get(name) or Place(shape, (0,) * len(shape), shape)
    own = values.room(name)
    if not own.is_floating_point() or entry.dtype != whole.dtype or place.shape != tuple(whole.shape):
        return False
    other = torch.empty_like(own)
    checkpoint.whole.copy_of(rank, [Target(name, own.data_ptr(), own.nbytes)])
    sizes = [own.numel()] if place.flat else list(place.sizes)
    wanted = WantedPart(name, list(place.offsets), sizes, place.flat, other.data_ptr(), other.nbytes)
    checkpoint.whole.read([wanted], node_reader.THREADS, other.nbytes)
    own, other = own.double(), other.double()
    return bool((own - other).abs().max() <= DRIFT_MAX * own.abs().max())


def _differs(checkpoint: Resharded, rank: int, name: str) -> bool:
    """Returns whether a rank's value of an object differs from that of the first rank that has
    one."""
    whole, blob = checkpoint.whole, BLOB + name
    names = whole.names(rank)
    if blob not in names or (first := checkpoint.tensors[blob].first) == rank:
        return False
    tensors = [n for n in names if n == name or n.startswith(f"{name}/")]
    if whole.difference(rank, tensors) is not None:
        return True
    own, other = (whole.bytes(r, blob) for r in (rank, first))
    # Sets and dicts may have been encoded in another order. Tensors have been compared.
    return own != other and difference(*(decoding.decode(b, _Tensor, finish=False) for b in (own, other))) is not None
