"""Which rank a shard belongs to, and the kinds of its objects. The kind decides what an object's
value has to look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import decoding
from ._internal import CheckpointError, WholeCheckpoint
from .blob_format import BLOB
from .damage import reading

RNG, EXTRA, LAYOUT = "rng", "extra", "layout"
#: Names of everstep's own blobs, which objects cannot have.
RESERVED = {RNG, EXTRA, LAYOUT, "align", "parts", "dcp"}
MODULE, OPTIMIZER, OTHER = "module", "optimizer", "other"


@dataclass(frozen=True)
class Layout:
    """The rank that a shard belongs to."""

    rank: int
    world_size: int
    replicated: bool
    #: The kind of each object, by name. Earlier checkpoints do not have it.
    kinds: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = self.kinds
        if (
            type(self.rank) is not int
            or type(self.world_size) is not int
            or type(self.replicated) is not bool
            or not 0 <= self.rank < self.world_size < 1 << 32
        ):
            raise ValueError("an invalid rank")
        if not isinstance(kinds, dict) or not all(
            type(n) is str and n not in RESERVED and k in (MODULE, OPTIMIZER, OTHER) for n, k in kinds.items()
        ):
            raise ValueError("objects of unknown kinds")

    @classmethod
    def decoded(cls, data: bytes) -> Layout:
        """Decodes the layout of a shard.

        Raises:
            DamagedError: when it is invalid.
        """
        with reading("the layout of the checkpoint"):
            return cls(**decoding.decode(data, lambda name: None))

    @classmethod
    def of_rank(cls, whole: WholeCheckpoint, rank: int) -> Layout | None:
        """Returns the layout of one rank's shard; ``None`` in earlier checkpoints.

        Raises:
            DamagedError: when it is invalid.
        """
        name = BLOB + LAYOUT
        return cls.decoded(whole.bytes(rank, name)) if name in whole.names(rank) else None


def guessed_kind(value: Any, *, in_module: bool) -> str:
    """Guesses the kind of an object in an earlier checkpoint, which does not record it.

    Args:
        value: the object's value, decoded.
        in_module: whether the checkpoint has tensors of a module of this name.
    """
    if isinstance(value, dict) and ({"state", "groups"} <= value.keys() or value.keys() == {"whole"}):
        return OPTIMIZER
    return MODULE if in_module and isinstance(value, dict) else OTHER


def other_kind(name: str, saved: str | None, own: str) -> CheckpointError:
    """Returns the error for an object that is of another kind than when it was saved."""
    return CheckpointError(
        f"{name}= is of kind {saved or 'none'!r} in the checkpoint, but of kind {own!r} here; "
        "pass the same kinds of objects as when it was saved"
    )
