"""Snapshots of a process without an agent, which go straight to durable storage."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from . import worker as _worker
from ._internal import (
    Arena,
    CheckpointError,
    note_shard,
    publish_noted,
    reserve_slot,
)
from .directory import Directory
from .meeting import gathered
from .outcome import Arrivals
from .slots import Slots, Snapshot
from .tiers import KEEP_ALL, Keep

if TYPE_CHECKING:
    from ._internal import PersistFailure, Shard
    from .branch import Wanted
    from .durable_offers import DurableOffers
    from .healing import HealingShard
    from .resharded import Resharded


class DiskTier:
    """Copies into one slot and writes files, without an agent."""

    in_memory = False

    def __init__(self, directory: Directory, keep: Keep, arrivals: Arrivals) -> None:
        self._directory, self._rules, self._keep = directory, keep, KEEP_ALL
        # The slot is not reported as a tier: it ends with the process.
        self._slots, self._arrivals = Slots(Arrivals()), arrivals
        self._scratch: str | None = None
        self._done = 0
        #: Some rank found checkpoints when all ranks chose one.
        self.some_rank_found = False

    def held(self) -> list[int]:
        """Returns no steps: nothing in memory outlives the process."""
        return []

    def choose(
        self, durable: DurableOffers, wanted: Wanted
    ) -> tuple[int, Shard | HealingShard | Resharded | None] | None:
        """Returns the newest step that all ranks can read; it is durable."""
        step = self._common(durable.newest(), durable.found)
        if step is None and self.some_rank_found:
            step = self._common(durable.all(), durable.found)
        return None if step is None else (step, None)

    def failed(self, step: int) -> None:
        """Does nothing: ranks vote, and try an older step."""

    def agree(self, value: int) -> int:
        """Returns rank 0's value, on all ranks."""
        return gathered([value])[0][0]

    def own(self) -> None:
        """Claims the directory before the first checkpoint is made; reading needs no claim."""
        self._directory.claim(self.agree)

    def close(self) -> None:
        """Releases the directory."""
        self._directory.release()

    def source(self) -> str:
        """Returns where the chosen step comes from, for users."""
        return "disk"

    def _common(self, steps: list[int], found: bool) -> int | None:
        every = gathered([int(found), *steps])
        self.some_rank_found = any(found for found, *_ in every)
        return max(set(steps).intersection(*(held for _, *held in every)), default=None)

    copies_late = False

    def lost(self, *, surely: bool) -> bool:
        """Returns False: what the slot contains is on disk."""
        return False

    def capture(self, snapshot: Snapshot) -> bool:
        """Writes and publishes the step; when it returns, the step is durable.

        Raises:
            CheckpointError: on all ranks, when one of them could not write its shard.
        """
        failure: Exception | None = None
        try:
            need = snapshot.slot_bytes()
            if self._slots.arena is None or self._slots.capacity < need - (256 << 10):
                self._open(need)
            captured = self._slots.capture(snapshot, None)
            self._slots.wait()
            if not captured:
                failure = CheckpointError(f"step {snapshot.step} was not saved: its memory slot is in use")
        except (CheckpointError, OSError) as e:
            failure = e
        self._write(snapshot.step, failure)
        return True

    def _open(self, need: int) -> None:
        self.discard()
        memory = Path("/dev/shm")
        fits = memory.is_dir() and shutil.disk_usage(memory).free > 2 * need
        self._scratch = tempfile.mkdtemp(prefix="everstep-", dir=memory if fits else None)
        path = os.path.join(self._scratch, "slot")
        reserve_slot(path, need)
        world = _worker.world()
        self._slots.arena = Arena([path], "", world.rank, world.world_size, 0)
        # The mapping keeps the file alive, and nothing is left when the process ends.
        self.discard()
        self._slots.capacity = need

    def discard(self) -> None:
        """Removes the scratch directory."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def fence(self) -> None:
        """Does nothing: copies are never late."""

    def wait(self) -> None:
        """Does nothing: copies are never late."""

    def _write(self, step: int, failure: Exception | None) -> None:
        """Writes the slot to the directory, together with all ranks; ``failure``: this rank has
        nothing to write."""
        world, mark = _worker.world(), self._directory.mark()
        try:
            if failure is None and self._slots.arena is not None:
                note_shard(self._directory, mark, step, self._slots.arena.write_shard(self._directory, step, mark))
        except (CheckpointError, OSError) as e:
            failure = e
        # A shard that an earlier life of the job has left must not replace one that could not be
        # written.
        failed = [rank for rank, (wrong,) in enumerate(gathered([int(failure is not None)])) if wrong]
        if world.rank == 0 and not failed:
            try:
                path, trouble = publish_noted(self._directory, mark, step, world.world_size, self._keep.retention())
                self._warn(step, path, trouble)
            except (CheckpointError, OSError) as e:
                failure = e
        if failure is None and failed:
            failure = CheckpointError(
                f"step {step} was not written by every rank (rank {failed[0]} could not); earlier checkpoints are kept"
            )
        ((published,), *_) = gathered([int(failure is None)])
        if failure is None and not published:
            failure = CheckpointError(f"step {step} could not be published by rank 0; earlier checkpoints are kept")
        if failure is not None:
            raise CheckpointError(str(failure)) from failure
        self._done = step
        self._arrivals.durable(step)

    def _warn(self, step: int, path: str, trouble: str | None) -> None:
        name = path.rpartition("/")[2]
        if name != f"step-{step}":
            warnings.warn(
                f"everstep: step {step} is saved as {name}, because step-{step} already exists and must not be replaced; "
                "everstep ckpt ls shows what it is",
                stacklevel=5,
            )
        if trouble is not None:
            warnings.warn(
                f"everstep: older checkpoints in {self._directory} could not be deleted: {trouble}", stacklevel=5
            )

    def started(self) -> None:
        """Does nothing: there are no copies to send."""

    def trains(self) -> None:
        """Applies the retention rules: a step is complete, so this process trains."""
        self._keep = self._rules

    def stepped(self) -> None:
        """Does nothing: there are no copies to send."""

    def replicated(self) -> int:
        """Returns 0: there are no copies."""
        return 0

    def await_replicated(self, step: int) -> None:
        """Does nothing: there are no copies."""

    def ask_for_every(self, every: int) -> None:
        """Does nothing: there are no snapshots in memory."""

    def every(self, step: int) -> int:
        """Returns 1: there are no snapshots in memory."""
        return 1

    def persist_due(self) -> None:
        """Does nothing: steps are persisted at once."""

    def persist_at(self) -> int | None:
        """Returns ``None``: there is no coordinator to announce steps."""
        return None

    def hold_at(self) -> int | None:
        """Returns ``None``: the world does not change."""
        return None

    def durable(self) -> int:
        """Returns the newest step that this manager has written; 0 for none."""
        return self._done

    def failed_persist(self, seen: int) -> PersistFailure | None:
        """Returns ``None``: :meth:`capture` raises."""
        return None

    def await_durable(self, step: int, seconds: float | None = None) -> None:
        """Does nothing: the step is durable when :meth:`capture` returns."""
