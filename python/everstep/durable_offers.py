"""Durable checkpoints that one rank can restore. Headers of older ones are read only if the newest
are not enough."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Set

from . import worker as _worker
from ._internal import CheckpointError, ListedCheckpoint, Shard, objects_in, open_shard
from .damage import OutOfMemory
from .resharded import Resharded
from .state import State

#: Number of checkpoints that are opened before they are needed, in case the newest one is damaged.
NEWEST = 2
#: Limit on the checkpoints that a rank offers. Ranks rarely see different ones, and then only a few
#: differ.
OFFERED_MAX = 32


class DurableOffers:
    """The checkpoints that one rank can restore from a directory, the newest first.

    The bytes of a checkpoint are verified when they are read: a copy of another node, or an older
    step, can replace it.
    """

    def __init__(
        self,
        state: State,
        rows: list[ListedCheckpoint],
        damaged: Set[int],
        skip: Callable[[str], None],
        *,
        of_other_branch: bool = False,
    ) -> None:
        #: The directory has checkpoints, readable or not.
        self.found = bool(rows)
        #: They are those of a step that was named, of branches that training is not on.
        self.of_other_branch = of_other_branch
        #: Path of each checkpoint that was opened, by step.
        self.paths: dict[int, str] = {}
        self._state, self._skip = state, skip
        self._opened: dict[int, Shard | Resharded] = {}
        self._left = [row for row in self._complete_first(rows) if row.step not in damaged]
        if of_other_branch:
            # What another rank cannot read of the first one must not come from the next one.
            self._left = [row for row in self._left if row.wrong is None][:1]

    def newest(self) -> list[int]:
        """Returns the newest steps whose headers are valid."""
        return self._open(NEWEST)

    def all(self) -> list[int]:
        """Returns every step whose header is valid."""
        return self._open(OFFERED_MAX)

    def likely(self) -> list[int]:
        """Returns the newest steps, whose headers are valid, and older ones, whose headers are not
        read yet."""
        newest = self.newest()
        older = dict.fromkeys(row.step for row in self._left if row.wrong is None and row.step not in newest)
        return [*newest, *older][:OFFERED_MAX]

    def shard(self, step: int) -> Shard | Resharded:
        """Returns this rank's part of a step.

        Raises:
            CheckpointError: when its header cannot be read.
        """
        while step not in self._opened:
            row = next((r for r in self._left if r.step == step), None)
            if row is None:
                raise CheckpointError(f"step {step} cannot be read by rank {_worker.world().rank}")
            self._left.remove(row)
            self._try(row)
        return self._opened[step]

    def _open(self, count: int) -> list[int]:
        while self._left and len(self._opened) < count:
            self._try(self._left.pop(0))
        return list(self._opened)

    def _try(self, row: ListedCheckpoint) -> None:
        wrong = row.wrong
        if row.step in self._opened:
            return
        if wrong is None:
            try:
                self._opened[row.step] = self._opened_at(row.path, row.world_size)
                self.paths[row.step] = row.path
            except OutOfMemory:
                raise
            except CheckpointError as e:
                wrong = str(e.args[0])
        if wrong is not None:
            self._skip(wrong)

    def _opened_at(self, path: str, size: int | None) -> Shard | Resharded:
        world = _worker.world()
        shard = open_shard(path, world.rank % (size or 1))
        if size != world.world_size and not self._state.layout.replicated:
            return self._state.resharded(path)
        if isinstance(shard, Shard) and self._state.is_placed_otherwise(shard):
            # A checkpoint that cannot be read as a whole is of another model, which is reported
            # when it is loaded.
            with contextlib.suppress(CheckpointError):
                return self._state.resharded(path)
        return shard

    def _complete_first(self, rows: list[ListedCheckpoint]) -> list[ListedCheckpoint]:
        """Puts the checkpoint with all objects first among several of one step: an evaluation may
        have saved its model alone."""
        times = Counter(row.step for row in rows)

        def order(row: ListedCheckpoint) -> tuple[int, bool]:
            several = times[row.step] > 1 and row.wrong is None
            return -row.step, several and self._state.is_more_than(objects_in(row.path))

        return sorted(rows, key=order)
