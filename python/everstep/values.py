"""What a shard holds beside tensors, decoded and checked. ``restore()`` and ``everstep ckpt verify`` both read it here: what one of them
refuses, the other does not call good."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import decoding, module_state, optimizer_value, rng
from ._internal import CheckpointError, DamagedError, Shard
from .blob_format import BLOB
from .damage import reading
from .placed import PARTS, Place, Resharded, parts_from_bytes, read_parts
from .sharded import Part
from .tensors import BY_NAME

if TYPE_CHECKING:
    from ._internal import Entry
    from .healing import HealingShard

RNG, EXTRA, LAYOUT = "rng", "extra", "layout"
#: Names of everstep's own blobs (see :data:`everstep.convert`), which objects cannot have.
RESERVED = {RNG, EXTRA, LAYOUT, "align", "parts", "dcp"}
#: What an object is: it decides what its value has to look like.
MODULE, OPTIMIZER, OTHER = "module", "optimizer", "other"


@dataclass(frozen=True)
class Layout:
    """Whose state a shard is."""

    rank: int
    world_size: int
    replicated: bool
    #: What each object is, by name. Earlier checkpoints do not say.
    kinds: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = self.kinds
        if (
            type(self.rank) is not int
            or type(self.world_size) is not int
            or type(self.replicated) is not bool
            or not 0 <= self.rank < self.world_size
        ):
            raise ValueError("a rank that is none")
        if not isinstance(kinds, dict) or not all(
            type(n) is str and n not in RESERVED and k in (MODULE, OPTIMIZER, OTHER) for n, k in kinds.items()
        ):
            raise ValueError("objects of unknown kinds")


def objects(entries: Mapping[str, Entry]) -> set[str]:
    """Names of objects that have a value in a shard."""
    names = {n.removeprefix(BLOB) for n in entries if n.startswith(BLOB)}
    return {n for n in names - RESERVED if "/" not in n}


def check_step(names: Container[str]) -> None:
    """Raises :class:`DamagedError` where values are missing that every snapshot of a manager has."""
    if missing := [n for n in (EXTRA, RNG) if BLOB + n not in names]:
        raise DamagedError(
            f"there is no {' and no '.join(missing)} in the checkpoint, which everstep always writes", []
        )


class Values:
    """The values of one shard. Tensors in them get memory (``targets``), which whoever wants them fills."""

    def __init__(self, shard: Shard | HealingShard | Resharded) -> None:
        self._shard = shard
        self.entries: dict[str, Entry] = {e[0]: e for e in shard.entries()}
        self.targets: dict[str, Tensor] = {}
        self._blobs: dict[str, bytes] = {}

    def room(self, name: str) -> Tensor:
        """Memory for a tensor of the shard."""
        if name not in self.targets:
            _, dtype, shape, _ = self.entries[name]
            if dtype not in BY_NAME:
                raise CheckpointError(
                    f"{name} is {dtype} in the checkpoint, which this torch does not have; install a newer one"
                )
            self.targets[name] = torch.empty(shape, dtype=BY_NAME[dtype])
        return self.targets[name]

    def has_numbers(self, name: str) -> bool:
        """There are tensors of fractions among the values of an object: weights, moments, averages."""
        return any(
            n.startswith(f"{name}/") and dtype.startswith(("F", "BF", "C"))
            for n, (_, dtype, *_) in self.entries.items()
        )

    def layout(self) -> Layout | None:
        """Whose it is; ``None`` where that is not said.

        Raises:
            DamagedError: when it makes no sense.
        """
        if BLOB + LAYOUT not in self.entries:
            return None
        with reading("the layout of the checkpoint"):
            return Layout(**decoding.decode(self._shard.bytes(BLOB + LAYOUT), lambda name: None))

    def places(self) -> dict[str, Place]:
        """Where the shard's tensors belong, by name.

        Raises:
            DamagedError: when it makes no sense.
        """
        words = None if isinstance(self._shard, Resharded) else self._shard.places()
        if words is None:
            # A slot says so in a tensor only.
            words = parts_from_bytes(self._shard.bytes(PARTS)) if PARTS in self.entries else []
        return read_parts(words, list(self.entries.values()))

    def of_object(self, name: str, kind: str | None) -> Any:
        """The value of an object. Without ``kind`` that of an earlier checkpoint, which is told by what it looks like.

        Raises:
            DamagedError: when it makes no sense.
        """
        value = self._decoded(name)
        if kind is None:
            kind = OPTIMIZER if isinstance(value, dict) and {"state", "groups"} <= value.keys() else OTHER
        if kind == OPTIMIZER:
            optimizer_value.checked(value)
        elif kind == MODULE:
            module_state.checked_beside(value)
        return value

    def of_step(self) -> None:
        """What belongs to the step and to no object.

        Raises:
            DamagedError: when it makes no sense.
        """
        check_step(self.entries)
        if not isinstance(extra := self._decoded(EXTRA), dict):
            raise DamagedError(
                f"the extra values in the checkpoint are a {type(extra).__name__}, not values by name", []
            )
        rng.check(self._decoded(RNG))

    def _decoded(self, name: str) -> Any:
        self._blobs[name] = self._shard.bytes(BLOB + name)
        return decoding.decode(self._blobs[name], self.room, finish=False)

    def finished(self) -> dict[str, Any]:
        """All that were asked for, now that ``targets`` are filled."""
        return {name: self.value(name) for name in self._blobs}

    def value(self, name: str) -> Any:
        """One of them, made anew each time."""
        return decoding.decode(self._blobs[name], self.targets.__getitem__, sharded=Part)
