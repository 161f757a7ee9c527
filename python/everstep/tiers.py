"""What is kept of each step, and where: options of both tiers, and why a snapshot becomes
durable."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta

from ._internal import Retention

#: Why a snapshot goes to durable storage (see ``Purpose`` in the core).
RECOVERY, EPOCH, USER = range(3)


@dataclass(frozen=True)
class Redundancy:
    """What other nodes' memory keeps of each step: a number of copies, or parity."""

    #: Number of nodes of a group that may be lost at once.
    replicas: int
    #: Number of shards that share ``replicas`` parity shards; 0: full copies.
    data: int = 0

    @classmethod
    def of(cls, replicas: int | str) -> Redundancy:
        """Parses the option ``replicas``. ``2``: two copies. ``"4+2"``: of each six nodes any two
        may be lost, for half a shard of memory on each node instead of two.

        Raises:
            ValueError: for anything else.
        """
        code = re.fullmatch(r"([1-9]\d?)\+([1-9]\d?)", replicas) if isinstance(replicas, str) else None
        if code is not None:
            return cls(int(code[2]), int(code[1]))
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 0:
            raise ValueError(
                f"replicas={replicas!r}: give a number of copies, or a code such as '4+2' (any two of six nodes may be lost)"
            )
        return cls(replicas)


@dataclass(frozen=True)
class Keep:
    """Which durable checkpoints stay."""

    last: int
    every: timedelta | None
    epochs: bool

    def retention(self) -> Retention:
        """Returns the rules for the native half."""
        return Retention(self.last, int(self.every.total_seconds()) if self.every else 0, self.epochs)


@dataclass(frozen=True)
class TierOptions:
    """What a tier is asked to keep, and at what rate."""

    keep: Keep
    #: Steps go to durable storage.
    durable: bool = True
    #: Every rank holds the same state, so that each rank can restore the slots of any other.
    any_rank: bool = False
    redundancy: Redundancy = Redundancy(0)
    #: Limit on the bytes per second and rank that go to durable storage; 0 for none.
    bandwidth: int = 0
    #: Copies are sent while the training network is idle.
    pacing: bool = False


#: Keeps everything. A process that has not completed a step may be an evaluation, which must not
#: delete checkpoints.
KEEP_ALL = Keep((1 << 32) - 1, None, True)
