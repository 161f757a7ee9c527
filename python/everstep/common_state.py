"""Checks that what all ranks should have in common is the same in a checkpoint that is restored to
other ranks, or with another sharding. Independent models have the same names, too."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

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
#: Number of differing tensors that are looked at before the comparison goes on.
COMPARED_MAX = 256
#: Limit on the bytes of several tensors that are read together.
READ_MAX = 64 << 20


class _Tensor(str):
    """Stands for a tensor in a value, by its name."""


def require(checkpoint: Resharded) -> None:
    """Checks that what a rank would get of other ranks is not each rank's own. All ranks must call
    it; each looks at some of those that wrote the checkpoint.

    Raises:
        CheckpointError: naming what differs between two of them.
        DamagedError: when some of it is not what was written.
    """
    if checkpoint.is_alike():
        return
    if (wrong := node_reader.found_by_any(_own_values(checkpoint))) is not None:
        raise CheckpointError(wrong)
    _warn_of_positions(checkpoint)


def _warn_of_positions(checkpoint: Resharded) -> None:
    """Warns of objects that were the same on all ranks and may have counted each rank's own data."""
    here, size = checkpoint.here, checkpoint.whole.world_size
    now = here.layout.world_size
    names = ", ".join(f"{n}=" for n in sorted(here.personal) if BLOB + n in checkpoint.tensors)
    if here.layout.rank == 0 and size != now and names:
        had = f"had the same value on all {size} ranks of the checkpoint" if size > 1 else "was saved by one rank"
        has = f"each of {now} ranks has it" if now > 1 else "the only rank has it"
        warnings.warn(
            f"everstep: {names} {had}, and now {has}; if it is a position in a rank's own share of the data, samples will be "
            "repeated or skipped: use a sampler of everstep.data",
            stacklevel=8,
        )


def _own_values(checkpoint: Resharded) -> str | None:
    """Returns what is each rank's own, in words; ``None`` if nothing is."""
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
    copies: _Copies | None = None
    while found := checkpoint.whole.differences(rank, names, COMPARED_MAX):
        copies = copies or _Copies(checkpoint, rank)
        if (own := copies.first_other([name for name, _ in found])) is not None:
            return next(f for f in found if f[0] == own)
        drifted += found
        names = names[names.index(found[-1][0]) + 1 :]
    if drifted:
        (name, other), more = drifted[0], f" (and {len(drifted) - 1} more)" if len(drifted) > 1 else ""
        warnings.warn(
            f"everstep: {name}{more} differs slightly between ranks {other} and {rank} in the checkpoint, although all ranks should "
            f"have the same values; those of rank {other} are used",
            stacklevel=9,
        )
    return None


class _Copies:
    """A rank's parts of tensors, and what the others have of the same parts. Copies in one model drift
    apart by rounding; those in two models have nothing in common."""

    def __init__(self, checkpoint: Resharded, rank: int) -> None:
        self._checkpoint, self._rank = checkpoint, rank
        self._values = Values(open_shard(checkpoint.path, rank))
        self._places = self._values.places()

    def first_other(self, names: list[str]) -> str | None:
        """Returns the first of these tensors that differs by more than rounding."""
        left = list(names)
        while left:
            # One at least, however large it is.
            count, room = 1, self._values.entries[left[0]].bytes
            while count < len(left) and (room := room + self._values.entries[left[count]].bytes) <= READ_MAX:
                count += 1
            if (other := self._first_other(left[:count])) is not None:
                return other
            del left[:count]
        return None

    def _first_other(self, names: list[str]) -> str | None:
        """Does the same with one pass over each side."""
        self._values.targets.clear()
        read: dict[str, tuple[Tensor, Tensor]] = {}
        parts: list[WantedPart] = []
        for name in names:
            entry, whole = self._values.entries[name], self._checkpoint.tensors[name]
            place = self._places.get(name) or Place.whole(entry.shape)
            own = self._values.room(name)
            if not own.is_floating_point() or entry.dtype != whole.dtype or place.shape != tuple(whole.shape):
                # What precedes it is looked at first.
                break
            other = torch.empty_like(own)
            read[name] = own, other
            parts.append(place.wanted(name, other.data_ptr(), other.nbytes))
        if read:
            own_parts = [Target(name, own.data_ptr(), own.nbytes) for name, (own, _) in read.items()]
            self._checkpoint.whole.copy_of(self._rank, own_parts)
            largest = max(target.bytes for target in own_parts)
            self._checkpoint.whole.read(parts, node_reader.THREADS, largest)
        for name, pair in read.items():
            own, other = (tensor.double() for tensor in pair)
            if not (own - other).abs().max() <= DRIFT_MAX * own.abs().max():
                return name
        return names[len(read)] if len(read) < len(names) else None


def _differs(checkpoint: Resharded, rank: int, name: str) -> bool:
    """Returns whether a rank's value of an object differs from that of the first rank that has
    one."""
    whole, blob = checkpoint.whole, BLOB + name
    names = whole.names(rank)
    if blob not in names or (first := checkpoint.tensors[blob].first) == rank:
        return False
    tensors = [n for n in names if n == name or n.startswith(f"{name}/")]
    if whole.differences(rank, tensors, 1):
        return True
    own, other = (whole.bytes(r, blob) for r in (rank, first))
    # Sets and dicts may have been encoded in another order. Tensors have been compared.
    return own != other and difference(*(decoding.decode(b, _Tensor, finish=False) for b in (own, other))) is not None
