"""Where a save goes: slots of this node's agent, or, without one, straight to disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .. import worker as _worker
from .._internal import (
    Agent,
    AgentError,
    Arena,
    CheckpointError,
    foreign_steps,
    list_checkpoints,
    publish,
    reserve_slot,
)
from ..agent_tier import AgentTier
from ..directory import Directory
from ..outcome import Arrivals
from ..slots import Snapshot, described
from ..state import Item
from ..tiers import USER, Keep, Redundancy

#: Everything stays: checkpoints made through DCP are the user's.
_KEEP = Keep(2**31 - 1, None, True)
#: A slot becomes free when an earlier save is on storage.
PATIENCE = 3600.0
#: Seconds until a published checkpoint is in the listing on every node: file systems cache directories.
LISTED = 90.0
#: What tells slots of this module from those of a CheckpointManager.
_KIND = "/dcp"


#: How often the ranks have agreed, by key: what is in torch's store stays there.
_agreed: Counter[str] = Counter()


def _agree(root: Directory, number: int, what: str = "first") -> int:
    """Rank 0's number, through torch's store (see :mod:`everstep.dcp.shares`)."""
    import torch.distributed as dist

    if not _worker.in_group():
        return number
    store, key = dist.distributed_c10d._get_default_store(), f"everstep/dcp/{what}/{root}"
    _agreed[key] += 1
    key = f"{key}/{_agreed[key]}"
    if dist.get_rank() == 0:
        store.set(key, str(number))
    return int(store.get(key))


class _Numbered:
    """Numbers checkpoints from the newest that is there."""

    def __init__(self, root: Directory) -> None:
        self.root = root
        root.prepare()
        self._step: int | None = None

    def next_step(self, fixed: int | None) -> int:
        """The number of the next checkpoint, the same on all ranks."""
        if fixed is not None:
            self._step = None if self._step is None else max(self._step, fixed)
            return fixed
        if self._step is None:
            self._step = _agree(
                self.root, max([0, *(row[0] for row in list_checkpoints(self.root)), *foreign_steps(self.root)])
            )
        self._step += 1
        return self._step


class AgentStore(_Numbered):
    """The agent writes and publishes.

    It publishes all that this process captures in one directory, which :meth:`turn` changes once nothing is on its way to the
    directory before.
    """

    #: The newest checkpoint of this process, in whatever directory: agents and coordinator know checkpoints by their numbers.
    newest = 0
    #: Where the agent publishes.
    _destination: Directory | None = None
    _turns = threading.RLock()
    #: Steps in memory whose end is not known yet.
    _under_way: ClassVar[dict[int, AgentStore]] = {}
    #: Why steps that ended before their own save asked have failed; ``None``: they are durable.
    _ended: ClassVar[dict[int, str | None]] = {}

    def __init__(self, root: Directory) -> None:
        super().__init__(root)
        worker = _worker.current()
        if worker.managed:
            raise CheckpointError(
                "this process has an everstep.CheckpointManager, whose memory everstep.dcp.Writer would share: use its save()"
            )
        self._arrivals = Arrivals()
        self._tier: AgentTier | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Meanwhile this process saves to this directory."""
        with AgentStore._turns:
            if AgentStore._destination != self.root:
                self._settle()
                AgentStore._destination = None
                self._direct()
                AgentStore._destination = self.root
            elif self._tier is None:
                self._direct()
            yield

    def _settle(self) -> None:
        # The agent publishes in order of steps.
        for step, store in sorted(AgentStore._under_way.items()):
            # Its own save reports what came of it.
            AgentStore._ended[step] = store._end(step)

    def _direct(self) -> None:
        """Has the agent publish here."""
        worker = _worker.current()
        assert worker.agent is not None and worker.board is not None
        if self._tier is None:
            self._tier = AgentTier(
                worker.agent,
                worker.board,
                self.root,
                _KEEP,
                True,
                False,
                Redundancy(0),
                0,
                False,
                self._arrivals,
                _KIND,
            )
            return
        try:
            worker.agent.persist_to(str(self.root), self.root.run, *_KEEP.arguments(), 0, True)
        except AgentError as e:
            raise CheckpointError(str(e)) from e
        worker.agent.replicate(self.root.run + _KIND, 0, 0, False)

    def next_step(self, fixed: int | None) -> int:
        """As for all, and newer than all that this process has made."""
        newest = AgentStore.newest
        if fixed is not None and fixed <= newest:
            raise CheckpointError(
                f"{self.root}/step-{fixed} after step {newest}: give numbers that rise, or a directory that has none in its name"
            )
        step = super().next_step(fixed)
        if fixed is None:
            self._step = step = max(step, newest + 1)
        AgentStore.newest = step
        return step

    def capture(self, step: int, items: list[Item]) -> None:
        """Until the state is in memory, from where it goes on by itself. Within :meth:`turn`."""
        assert self._tier is not None
        until = time.monotonic() + PATIENCE
        while not self._tier.capture(Snapshot(step, items, USER)):
            if time.monotonic() > until:
                raise CheckpointError(
                    f"no slot became free for step {step} within an hour: storage does not take what was saved before"
                )
            time.sleep(0.01)
        AgentStore._under_way[step] = self
        self._tier.wait()
        try:
            self._arrivals.raise_lost()
        except CheckpointError:
            AgentStore._under_way.pop(step, None)
            raise

    def write(self, step: int) -> str | None:
        """Until all ranks' shards are on storage and published."""
        why = self._end(step)
        AgentStore._ended.pop(step, None)
        if why is not None:
            raise CheckpointError(why)
        return None

    def _end(self, step: int) -> str | None:
        """Waits for the end of a step: ``None`` when it is durable, else why it is not."""
        why = None
        if step not in AgentStore._ended:
            try:
                # A connection of its own: the training thread may want to save again meanwhile.
                world = _worker.world()
                Agent(os.environ["EVERSTEP_SOCKET"], world.generation, world.rank, world.local_rank).await_durable(
                    step, None
                )
                why = self._missing(step)
            except AgentError as e:
                why = str(e)
        AgentStore._under_way.pop(step, None)
        return AgentStore._ended.get(step, why)

    def _missing(self, step: int) -> str | None:
        """The agent answers for all steps up to the newest durable one: where there are newer ones, this one may have failed."""
        until = time.monotonic() + LISTED
        while AgentStore.newest > step and step not in AgentStore._ended:
            try:
                if self.root.has(step):
                    break
            except CheckpointError as e:
                return str(e)
            if time.monotonic() > until:
                return f"step {step} did not become durable in {self.root}; a newer one did"
            time.sleep(0.2)
        return None

    def publish(self, step: int, written: list[str | None]) -> None:
        """Has been done."""


@dataclass
class _Room:
    """Memory for one save."""

    arena: Arena
    bytes: int


class PlainStore(_Numbered):
    """This process writes; whoever finishes publishes."""

    def __init__(self, root: Directory) -> None:
        super().__init__(root)
        root.claim(lambda epoch: _agree(root, epoch, "owner"))
        #: By step; room for one more is made when a save begins before the last one is written.
        self._taken: dict[int, _Room] = {}
        self._free: list[_Room] = []

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Directories do not get in each other's way here."""
        yield

    def capture(self, step: int, items: list[Item]) -> None:
        """Until the state is copied."""
        snapshot = Snapshot(step, items, USER)
        # These tensors live until the copy is done.
        host = snapshot.host()
        need = snapshot.slot_bytes()
        room = self._free.pop() if self._free else None
        if room is None or room.bytes < need - (256 << 10):
            room = _reserve(need)
        room.arena.capture(step, described(host), [], USER, 2, None, False, False)
        self._taken[step] = room

    def write(self, step: int) -> str:
        """Writes this rank's shard."""
        room = self._taken.pop(step)
        try:
            return room.arena.write_shard(self.root, step, self.root.mark())
        finally:
            self._free.append(room)

    def publish(self, step: int, written: list[str | None]) -> None:
        """The manifest, last."""
        publish(self.root, self.root.mark(), step, [w for w in written if w is not None], _KEEP.arguments(), True)


def _reserve(need: int) -> _Room:
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > 2 * need
    scratch = tempfile.mkdtemp(prefix="everstep-", dir=memory if fits else None)
    try:
        reserve_slot(f"{scratch}/slot", need)
        world = _worker.world()
        return _Room(Arena([f"{scratch}/slot"], "", world.rank, world.world_size, 0), need)
    finally:
        # The file lives on through its mapping.
        shutil.rmtree(scratch, ignore_errors=True)
