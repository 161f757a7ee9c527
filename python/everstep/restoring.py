"""Chooses the step that training restores, and where from: the newest one that every rank can
read."""

from __future__ import annotations

import hashlib
import os
import warnings
from typing import Any

from . import node_reader
from ._internal import CheckpointError, DamagedError, Shard
from .agent_tier import AgentTier
from .branch import Branch, Wanted
from .damage import OutOfMemory
from .directory import Directory
from .disk_tier import DiskTier
from .durable_offers import DurableOffers
from .healing import HealingShard
from .meeting import gathered
from .resharded import Resharded
from .state import State

#: What a rank reads its state from.
_Readable = Shard | HealingShard | Resharded


class Restoring:
    """One restore of one rank. All ranks do it together."""

    def __init__(self, state: State, tier: AgentTier | DiskTier, directory: Directory, branch: Branch) -> None:
        self._state, self._tier, self._directory, self._branch = state, tier, directory, branch
        self._unreadable: list[str] = []
        self._damaged: set[int] = set()
        self._extra: dict[str, Any] = {}

    def restore(self, wanted: Wanted) -> tuple[int, dict[str, Any]]:
        """Loads the newest step that is wanted. Returns it, 0 for a fresh start, and the values
        kept with it."""
        while (done := self._newest(wanted)) is None:
            pass
        return done, self._extra

    def _newest(self, wanted: Wanted) -> int | None:
        """Makes one attempt. Returns the step, 0 for a fresh start; ``None`` if an older one has to
        be tried."""
        rows, elsewhere = self._branch.rows(wanted)
        durable = DurableOffers(self._state, rows, self._damaged, self._skip, of_other_branch=elsewhere)
        found = self._tier.choose(durable, wanted)
        if found is None or not wanted.allows(found[0]):
            self._branch.refuse_silent_restart(self._unreadable, self._tier.some_rank_found, wanted)
            return 0
        done, shard = found
        path = None
        if shard is None:
            try:
                shard = durable.shard(done)
            except OutOfMemory:
                raise
            except CheckpointError:
                # The step was offered before its header was read.
                self._tier.failed(done)
                raise
            path = durable.paths[done]
        if wanted.step is not None:
            self._require_one_branch(done, path)
        self._branch.continue_from(done, path, wanted.step is not None)
        node_reader.begin()
        damage: DamagedError | None = None
        try:
            self._extra = self._load(done, shard, path)
        except DamagedError as e:
            damage = e
        if self._tier.in_memory and damage is not None:
            self._tier.failed(done)
            raise CheckpointError(str(damage.args[0])) from damage
        if self._tier.in_memory or not node_reader.any_failed(damage is not None):
            return done
        self._damaged.add(done)
        self._skip(str(damage.args[0]) if damage else f"another rank cannot read step {done}")
        return None

    def _require_one_branch(self, step: int, path: str | None) -> None:
        """Checks that all ranks restore the same checkpoint of a step that was named: one may be
        published while they look for it. All ranks must call it.

        Raises:
            CheckpointError: when they restore those of several branches.
        """
        own = path is None or path == self._branch.durable(step)
        name = b"" if own or path is None else os.fsencode(os.path.basename(path))
        number = int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "big")
        if len({numbers[0] for numbers in gathered([number])}) > 1:
            raise CheckpointError(
                f"ranks find different checkpoints of step {step} in {self._directory}; check that all nodes see the same files "
                "there, and start again"
            )

    def _skip(self, wrong: str) -> None:
        self._unreadable.append(wrong)
        warnings.warn(f"everstep: skipping a checkpoint: {wrong}", stacklevel=5)

    def _load(self, step: int, shard: _Readable, path: str | None) -> dict[str, Any]:
        try:
            # Either all ranks read it as one checkpoint, or none: they read together.
            as_one = isinstance(shard, Resharded) or (
                isinstance(shard, HealingShard) and self._state.is_placed_otherwise(shard)
            )
            if node_reader.any_as_one(as_one):
                shard = self._as_one(step, shard, path)
            return self._state.restore(shard)
        except CheckpointError as e:
            if isinstance(e.__cause__, DamagedError):
                raise e.__cause__ from e
            if path is not None and not isinstance(e, DamagedError):
                raise CheckpointError(f"{e.args[0]}\n  in {path}") from e
            raise

    def _as_one(self, step: int, shard: _Readable, path: str | None) -> _Readable:
        """Returns the checkpoint of the step, for ranks that now have other parts than when it was
        made: the one that was chosen, or that the branch has made durable of what is in memory."""
        opened = shard if isinstance(shard, Resharded) else None
        path = path or self._branch.durable(step)
        wrong: CheckpointError | None = None
        if opened is None and path is not None:
            try:
                opened = self._state.resharded(path)
            except OutOfMemory:
                raise
            except CheckpointError as e:
                wrong = e
        if not node_reader.any_without_whole(opened is None) and opened is not None:
            return opened
        if isinstance(shard, Resharded):
            raise CheckpointError(f"another rank cannot read step {step} as a whole, or has it only in memory")
        if path is not None or not self._state.is_sharded:
            # It is of another model, which is reported when it is loaded.
            return shard
        raise CheckpointError(
            f"step {step} is only in memory, saved with a different sharding or model; run once with the previous "
            "sharding and model to make it durable, or discard it with everstep doctor --clean"
        ) from wrong
