"""The target of a save: slots of this node's agent, or, without one, the disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist

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
from ..tiers import USER, Keep, TierOptions
from ..worker import in_group

#: Everything stays: checkpoints made through DCP are the user's.
_KEEP = Keep(2**31 - 1, None, True)
#: Seconds to wait for a slot, which becomes free when an earlier save is on storage.
PATIENCE = 3600.0
#: Seconds until a published checkpoint is listed on every node: file systems cache directories.
LISTED = 90.0
#: Distinguishes slots of this module from those of a CheckpointManager.
_KIND = "/dcp"


#: The highest number that this process has drawn, by directory (its run id): checkpoints in progress
#: are not listed yet, and any Writer may have drawn it.
_drawn: dict[str, int] = {}
_drawing = threading.Lock()


@dataclass(frozen=True)
class Number:
    """What rank 0 decides for all ranks of a save: the step, and the epoch of its claim."""

    step: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.step} {self.epoch}"

    @staticmethod
    def parse(text: str) -> Number:
        """Returns the number that ``str`` has written."""
        step, epoch = text.split()
        return Number(int(step), int(epoch))


def _newest(root: Directory) -> int:
    return max([0, *(row.step for row in list_checkpoints(root)), *foreign_steps(root)])


def place() -> tuple[int, int]:
    """Returns the rank of this process among those that save together, and their number. Only the
    process group tells: ranks that were spawned, or started by mpirun, have no variables for that,
    and without a group, each process saves alone."""
    return (dist.get_rank(), dist.get_world_size()) if in_group() else (0, 1)


def require_same(steps: set[int | None]) -> None:
    """Refuses paths on several ranks that name several steps, or only some of them one.

    Raises:
        CheckpointError: naming the steps.
    """
    if len(steps) > 1:
        named = ", ".join(sorted("a number to choose" if s is None else f"step-{s}" for s in steps))
        raise CheckpointError(f"ranks save to different paths ({named}); give the same path on all ranks")


class AgentStore:
    """Saves to slots, which the agent writes and publishes.

    The agent publishes all that this process captures in one directory, which :meth:`turn` changes
    once nothing is on its way to the previous directory.
    """

    #: The newest checkpoint of this process, in any directory: agents and coordinator identify
    #: checkpoints by their numbers.
    newest = 0
    #: Where the agent publishes.
    _destination: Directory | None = None
    _turns = threading.RLock()
    #: Steps in memory that are not known to be durable or failed yet.
    _under_way: ClassVar[dict[int, AgentStore]] = {}
    #: Why steps that ended before their own save asked have failed; ``None``: they are durable.
    _ended: ClassVar[dict[int, str | None]] = {}

    def __init__(self, root: Directory) -> None:
        self.root = root
        root.prepare()
        #: The newest checkpoint there when this process first saved to it.
        self._found: int | None = None
        worker = _worker.current()
        if worker.managed:
            raise CheckpointError(
                "this process has an everstep.CheckpointManager, whose memory everstep.dcp.Writer would share: use its save()"
            )
        self._arrivals = Arrivals()
        self._tier: AgentTier | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Makes the agent publish in this directory for the duration of the context."""
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
            # Its own save reports the result.
            AgentStore._ended[step] = store._end(step)

    def _direct(self) -> None:
        """Sets the directory that the agent publishes in."""
        worker = _worker.current()
        assert worker.agent is not None and worker.board is not None
        if self._tier is None:
            self._tier = AgentTier(
                worker.agent,
                worker.board,
                self.root,
                TierOptions(_KEEP),
                self._arrivals,
                _KIND,
            )
            return
        try:
            worker.agent.persist_to(str(self.root), self.root.run, _KEEP.retention(), 0, True)
        except AgentError as e:
            raise CheckpointError(str(e)) from e
        worker.agent.replicate(self.root.run + _KIND, 0, 0, False)

    def draw(self, fixed: int | None) -> Number:
        """Returns the number of the next checkpoint, higher than all that this process has used. On
        rank 0."""
        with AgentStore._turns:
            newest = AgentStore.newest
            if fixed is not None and fixed <= newest:
                raise CheckpointError(
                    f"{self.root}/step-{fixed} after step {newest}: give numbers that rise, or a directory that has none in its name"
                )
            if fixed is None and self._found is None:
                # Later, only this job publishes here: it has claimed the directory.
                self._found = _newest(self.root)
            step = fixed if fixed is not None else max(self._found or 0, newest) + 1
            AgentStore.newest = step
            return Number(step, 0)

    def accept(self, number: Number, fixed: int | None) -> None:
        """Follows rank 0's number."""
        if fixed is not None:
            require_same({number.step, fixed})
        with AgentStore._turns:
            AgentStore.newest = max(AgentStore.newest, number.step)

    def capture(self, step: int, items: list[Item]) -> None:
        """Waits until the state is in memory, from where the agent writes it. Called within
        :meth:`turn`."""
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

    def write(self, step: int, room: None) -> str | None:
        """Waits until all ranks' shards are on storage and published."""
        why = self._end(step)
        AgentStore._ended.pop(step, None)
        if why is not None:
            raise CheckpointError(why)
        return None

    def _end(self, step: int) -> str | None:
        """Waits for the end of a step. Returns ``None`` if it is durable, else why it is not."""
        why = None
        if step not in AgentStore._ended:
            try:
                # A connection of its own, because the training thread may save again meanwhile.
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
        """Checks that this very step is durable: the agent answers for all steps up to the newest
        durable one, so if there are newer ones, this one may have failed."""
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

    def publish(self, step: int, written: list[str | None], *, fixed: bool) -> None:
        """Does nothing: the agent has published it."""


@dataclass
class Room:
    """Memory for one save."""

    arena: Arena
    bytes: int


class PlainStore:
    """Writes from this process; the rank that finishes publishes."""

    def __init__(self, root: Directory) -> None:
        self.root = root
        root.prepare()
        self._epoch = 0
        self._rank, self._size = place()
        #: Memory is added when a save begins before the last one is written.
        self._free: list[Room] = []

    def draw(self, fixed: int | None) -> Number:
        """Returns the number of the next checkpoint: if not ``fixed``, one that no checkpoint has,
        whoever saved it. On rank 0."""
        self.root.claim(self._claimed, rank=self._rank)
        run = self.root.run
        with _drawing:
            drawn = _drawn.get(run, 0)
            step = fixed if fixed is not None else max(drawn, _newest(self.root)) + 1
            _drawn[run] = max(drawn, step)
        return Number(step, self._epoch)

    def _claimed(self, epoch: int) -> int:
        self._epoch = epoch
        return epoch

    def accept(self, number: Number, fixed: int | None) -> None:
        """Follows rank 0's number and claim."""
        if fixed is not None:
            require_same({number.step, fixed})
        self.root.claim(lambda _: number.epoch, rank=self._rank)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Does nothing: any number of directories can be written to."""
        yield

    def capture(self, step: int, items: list[Item]) -> Room:
        """Waits until the state is copied. Returns the memory with the copy."""
        snapshot = Snapshot(step, items, USER)
        # These tensors must stay alive until the copy is done.
        host = snapshot.host()
        need = snapshot.slot_bytes()
        room = self._free.pop() if self._free else None
        if room is None or room.bytes < need - (256 << 10):
            room = self._reserve(need)
        room.arena.capture(step, described(host), [], USER, 2, None, False, False)
        return room

    def _reserve(self, need: int) -> Room:
        memory = Path("/dev/shm")
        fits = memory.is_dir() and shutil.disk_usage(memory).free > 2 * need
        scratch = tempfile.mkdtemp(prefix="everstep-", dir=memory if fits else None)
        try:
            reserve_slot(f"{scratch}/slot", need)
            return Room(Arena([f"{scratch}/slot"], "", self._rank, self._size, 0), need)
        finally:
            # The mapping keeps the file alive.
            shutil.rmtree(scratch, ignore_errors=True)

    def write(self, step: int, room: Room) -> str:
        """Writes this rank's shard."""
        try:
            return room.arena.write_shard(self.root, step, self.root.mark())
        finally:
            self._free.append(room)

    def publish(self, step: int, written: list[str | None], *, fixed: bool) -> None:
        """Writes the manifest, last. Only a ``fixed`` number replaces a checkpoint."""
        if not fixed and any(row.step == step for row in list_checkpoints(self.root)):
            raise CheckpointError(
                f"{self.root} has a step {step} since this save began, which it does not replace; save again"
            )
        publish(self.root, self.root.mark(), step, [w for w in written if w is not None], _KEEP.retention(), True)
