"""Durable checkpoints that one rank can restore. Headers of older ones are read only when the newest are not enough."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Set

from . import worker as _worker
from ._internal import CheckpointError, Shard, objects_in, open_shard
from .branch import Row
from .placed import Resharded
from .state import State

#: Checkpoints that are opened before they are needed: where the newest one turns out to be damaged, the other one is good.
NEWEST = 2
#: Limit on the checkpoints that a rank offers. Ranks rarely see different ones, and then they differ by few.
OFFERED_MAX = 32


class DurableOffers:
    """What one rank can restore from a directory, the newest first.

    The bytes of a checkpoint are verified when they are read: another node can stand in, or an older step.
    """

    def __init__(self, state: State, rows: list[Row], damaged: Set[int], skip: Callable[[str], None]) -> None:
        #: The directory has checkpoints, readable or not.
        self.found = bool(rows)
        #: Path of each checkpoint that was opened, by step.
        self.paths: dict[int, str] = {}
        self._state, self._skip = state, skip
        self._opened: dict[int, Shard | Resharded] = {}
        self._left = [row for row in self._complete_first(rows) if row[0] not in damaged]

    def newest(self) -> list[int]:
        """The newest steps whose headers are good."""
        return self._open(NEWEST)

    def all(self) -> list[int]:
        """Every step whose header is good."""
        return self._open(OFFERED_MAX)

    def likely(self) -> list[int]:
        """The newest steps, whose headers are good, and older ones, whose headers are yet to be read."""
        newest = self.newest()
        older = dict.fromkeys(step for step, _, _, wrong in self._left if wrong is None and step not in newest)
        return [*newest, *older][:OFFERED_MAX]

    def shard(self, step: int) -> Shard | Resharded:
        """This rank's part of a step.

        Raises:
            CheckpointError: when its header cannot be read.
        """
        while step not in self._opened:
            row = next((r for r in self._left if r[0] == step), None)
            if row is None:
                raise CheckpointError(f"step {step} cannot be read by rank {_worker.world().rank}")
            self._left.remove(row)
            self._try(row)
        return self._opened[step]

    def _open(self, count: int) -> list[int]:
        while self._left and len(self._opened) < count:
            self._try(self._left.pop(0))
        return list(self._opened)

    def _try(self, row: Row) -> None:
        step, path, size, wrong = row
        if step in self._opened:
            return
        if wrong is None:
            try:
                self._opened[step] = self._opened_at(path, size)
                self.paths[step] = path
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
            # What cannot be seen as one is of another model, which is said when it is loaded.
            with contextlib.suppress(CheckpointError):
                return self._state.resharded(path)
        return shard

    def _complete_first(self, rows: list[Row]) -> list[Row]:
        """Of several checkpoints of one step, first those that hold all objects: an evaluation may have saved its model alone."""
        times = Counter(step for step, *_ in rows)

        def order(row: Row) -> tuple[int, bool]:
            step, path, _, wrong = row
            return -step, times[step] > 1 and wrong is None and self._state.is_more_than(objects_in(path))

        return sorted(rows, key=order)
