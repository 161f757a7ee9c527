"""What is kept of each step, and where: options of both tiers, and why a snapshot becomes durable."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

#: Why a snapshot goes to durable storage (see ``Purpose`` in the core).
RECOVERY, EPOCH, USER = range(3)


@dataclass(frozen=True)
class Redundancy:
    """What other nodes' memory keeps of each step: so many copies, or parity."""

    #: Nodes of a group that may be lost at once.
    replicas: int
    #: 0: full copies. Else ``replicas`` parity shards for so many shards.
    data: int = 0

    @classmethod
    def of(cls, replicas: int | str) -> Redundancy:
        """``2``: two copies. ``"4+2"``: of each six nodes any two may be lost, for half a shard on each instead of two."""
        code = re.fullmatch(r"([1-9]\d?)\+([1-9]\d?)", replicas) if isinstance(replicas, str) else None
        if code is not None:
            return cls(int(code[2]), int(code[1]))
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 0:
            raise ValueError(
                f"replicas={replicas!r}: give a number of copies, or a code as '4+2' (any two of six nodes may be lost)"
            )
        return cls(replicas)


@dataclass(frozen=True)
class Keep:
    """Which durable checkpoints stay."""

    last: int
    every: timedelta | None
    epochs: bool

    def arguments(self) -> tuple[int, int, bool]:
        """As the native half takes them."""
        return self.last, int(self.every.total_seconds()) if self.every else 0, self.epochs


#: Keeps everything. A process that has not completed a step may be an evaluation, and has no say in what stays.
KEEP_ALL = Keep((1 << 32) - 1, None, True)
