"""Which step a training restores, and from where: the newest one that every rank can read."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from typing import Any

from . import together
from . import worker as _worker
from ._internal import CheckpointError, DamagedError, Shard, objects_in, open_shard
from .agent_tier import AgentTier
from .branch import Branch, Row, Wanted
from .directory import Directory
from .disk_tier import DiskTier
from .healing import HealingShard
from .placed import Resharded
from .state import State


class Restoring:
    """One restore of one rank. All ranks do it together."""

    def __init__(self, state: State, tier: AgentTier | DiskTier, directory: Directory, branch: Branch) -> None:
        self._state, self._tier, self._directory, self._branch = state, tier, directory, branch
        self._unreadable: list[str] = []
        self._damaged: set[int] = set()
        self._paths: dict[int, str] = {}
        self._extra: dict[str, Any] = {}

    def restore(self, wanted: Wanted) -> tuple[int, dict[str, Any]]:
        """Loads the newest step that is wanted. Returns it, 0 for a fresh start, and the values kept with it."""
        while (done := self._newest(wanted)) is None:
            pass
        return done, self._extra

    def _newest(self, wanted: Wanted) -> int | None:
        """One attempt: the steps that are complete then, 0 for a fresh start; ``None`` when an older one has to be tried."""
        durable = self._durable_offers(wanted)
        found = self._tier.choose(durable, wanted)
        if found is None or not wanted.allows(found[0]):
            self._branch.refuse_silent_restart(self._unreadable, bool(durable), wanted)
            return 0
        done, shard = found
        path = self._paths[done] if shard is durable.get(done) else None
        self._branch.goes_on_from(done, path, wanted.step is not None)
        together.begin()
        damage: DamagedError | None = None
        try:
            self._extra = self._load(done, shard)
        except DamagedError as e:
            damage = e
        if self._tier.in_memory and damage is not None:
            self._tier.failed(done)
            raise CheckpointError(str(damage.args[0])) from damage
        if self._tier.in_memory or not together.any_failed(damage is not None):
            return done
        self._damaged.add(done)
        self._skip(str(damage.args[0]) if damage else f"another rank cannot read step {done}")
        return None

    def _skip(self, wrong: str) -> None:
        self._unreadable.append(wrong)
        warnings.warn(f"everstep: skipping a checkpoint: {wrong}", stacklevel=5)

    def _load(self, step: int, shard: Shard | HealingShard | Resharded) -> dict[str, Any]:
        try:
            # All ranks read it as one, or none: they do it together.
            as_one = isinstance(shard, Resharded) or (
                isinstance(shard, HealingShard) and self._state.is_placed_otherwise(shard)
            )
            if together.any_as_one(as_one) and not isinstance(shard, Resharded):
                shard = self._as_one(step, shard)
            return self._state.restore(shard)
        except CheckpointError as e:
            if isinstance(e.__cause__, DamagedError):
                raise e.__cause__ from e
            path = self._paths.get(step)
            if path is not None and self._tier.source() == "disk" and not isinstance(e, DamagedError):
                raise CheckpointError(f"{e.args[0]}\n  in {path}") from e
            raise

    def _as_one(self, step: int, shard: Shard | HealingShard) -> Resharded | Shard | HealingShard:
        """The durable checkpoint of the step, for ranks that hold other parts now than when it was made."""
        try:
            return self._state.resharded(self._directory.step(step))
        except CheckpointError as e:
            if self._directory.has(step) or not self._state.is_sharded:
                # It is of another model, which is said when it is loaded.
                return shard
            raise CheckpointError(
                f"step {step} is in memory only, in parts of another sharding or model; run once more as "
                "before, which makes it durable, or "
                f"forget it: everstep doctor --clean"
            ) from e

    def _complete_first(self, rows: list[Row]) -> list[Row]:
        """Of several checkpoints of one step, first those that hold all objects: an evaluation may have saved its model alone."""
        times = Counter(step for step, *_ in rows)

        def order(row: Row) -> tuple[int, bool]:
            step, path, _, wrong = row
            return -step, times[step] > 1 and wrong is None and self._state.is_more_than(objects_in(path))

        return sorted(rows, key=order)

    def _durable_offers(self, wanted: Wanted) -> dict[int, Shard | Resharded]:
        """This rank's shards of the newest two durable checkpoints whose headers are good. Their bytes are verified when they are
        read: another node can stand in, or an older step."""
        world = _worker.world()
        offers: dict[int, Shard | Resharded] = {}
        self._paths = {}
        for step, path, size, wrong in self._complete_first(self._branch.rows(wanted)):
            if step in self._damaged or step in offers:
                continue
            if wrong is None:
                try:
                    shard: Shard | Resharded = open_shard(path, world.rank % (size or 1))
                    others = size != world.world_size and not self._state.layout.replicated
                    if others:
                        shard = self._state.resharded(path)
                    elif isinstance(shard, Shard) and self._state.is_placed_otherwise(shard):
                        # What cannot be seen as one is of another model, which is said when it is loaded.
                        with contextlib.suppress(CheckpointError):
                            shard = self._state.resharded(path)
                    offers[step], self._paths[step] = shard, path
                except CheckpointError as e:
                    wrong = str(e.args[0])
            if wrong is not None:
                self._skip(wrong)
            if len(offers) == 2:
                break
        return offers
