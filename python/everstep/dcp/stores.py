"""The target of a save: slots of this node's agent, or, without one, the disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist

from .. import worker as _worker
from .._internal import (
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
from ..world import place_in_group
from . import notices

#: Everything stays: checkpoints made through DCP are the user's.
_KEEP = Keep(2**31 - 1, None, True)
#: Seconds to wait for a slot, which becomes free when an earlier save is on storage.
PATIENCE = 3600.0
#: Seconds until a published checkpoint is listed on every node: file systems cache directories.
LISTED = 90.0
#: How an agent's own answers do not begin.
_UNANSWERED = "the agent of this node does not answer"
#: Distinguishes slots of this module from those of a CheckpointManager.
_KIND = "/dcp"


#: The highest number that this process has drawn, by directory (its run id): checkpoints in
#: progress are not listed yet, and any Writer may have drawn it.
_drawn: dict[str, int] = {}
_drawing = threading.Lock()


@dataclass(frozen=True)
class Number:
    """What rank 0 decides for all ranks of a save: the step, and the epoch of its claim."""

    step: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.step} {self.epoch}"

    def above(self, held: int) -> Number:
        """Returns this number, or a higher one if this one is ``held`` or lower."""
        return Number(max(self.step, held + 1), self.epoch)

    @staticmethod
    def parse(text: str) -> Number:
        """Returns the number that ``str`` has written."""
        step, epoch = text.split()
        return Number(int(step), int(epoch))


def _newest(root: Directory) -> int:
    return max([0, *(row.step for row in list_checkpoints(root)), *foreign_steps(root)])


def require_same(steps: set[int | None]) -> None:
    """Refuses paths on several ranks that name several steps, or only some of them one.

    Raises:
        CheckpointError: naming the steps.
    """
    if len(steps) > 1:
        named = ", ".join(sorted("a number to choose" if s is None else f"step-{s}" for s in steps))
        raise CheckpointError(f"ranks save to different paths ({named}); give the same path on all ranks")


@dataclass
class _Pending:
    """A step in memory that is not known to be durable or failed yet."""

    store: AgentStore
    #: Checkpoints of this rank that the agent had failed to make durable before.
    failed: int
    #: Returns whether its save has ended in this process, with or without success.
    is_over: Callable[[], bool] = lambda: False
    #: When a newer step was first seen to be durable.
    overtaken: float | None = None


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
    _under_way: ClassVar[dict[int, _Pending]] = {}
    #: Why steps that ended before their own save asked have failed; ``None``: they are durable.
    _ended: ClassVar[dict[int, str | None]] = {}

    def __init__(self, root: Directory) -> None:
        self.root = root
        root.prepare()
        #: The newest checkpoint there when this process first saved to it.
        self._found: int | None = None
        self._held: int | None = None
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
        for step, pending in sorted(AgentStore._under_way.items(), key=lambda item: item[0]):
            pending.store._end(step)

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
            self.root.share(worker.agent, _KEEP.retention(), 0, True)
        except AgentError as e:
            raise CheckpointError(str(e)) from e
        worker.agent.replicate(self.root.run + _KIND, 0, 0, False)

    def held(self) -> int:
        """Returns the highest number of this directory that an earlier life of this process has
        left in memory, whatever rank it had; 0 for none. The agent still writes it, so no other
        checkpoint may get it."""
        with self.turn():
            if self._held is None:
                paths = _slots()
                arena = Arena(paths, self.root.run + _KIND, *place_in_group(), 0, True) if paths else None
                self._held = max([0, *(step for step, _ in arena.held())]) if arena else 0
            return self._held

    def draw(self, fixed: int | None, held: int) -> Number:
        """Returns the number of the next checkpoint, higher than all that this process has used
        and, if not ``fixed``, than what ranks hold in memory (``held``). On rank 0."""
        # First, the directory becomes this job's: no other one publishes there any more.
        with self.turn():
            newest = AgentStore.newest
            if fixed is not None and fixed <= newest:
                raise CheckpointError(
                    f"{self.root}/step-{fixed} follows step {newest}: use increasing numbers, or a path without a number"
                )
            if fixed is None and self._found is None:
                self._found = _newest(self.root)
            step = fixed if fixed is not None else max(self._found or 0, newest, held) + 1
            # Before anybody knows it: if this rank fails, others may have captured it already.
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
        board = _worker.current().board
        failure = board.persist_failure(0) if board is not None else None
        until = time.monotonic() + PATIENCE
        while not self._tier.capture(Snapshot(step, items, USER)):
            if time.monotonic() > until:
                raise CheckpointError(
                    f"no slot became free for step {step} within an hour: storage has not finished earlier saves; check "
                    "that it is reachable and fast enough"
                )
            time.sleep(0.01)
        AgentStore._under_way[step] = _Pending(self, failure.count if failure is not None else 0)
        self._tier.wait()
        try:
            self._arrivals.raise_lost()
        except CheckpointError:
            AgentStore._under_way.pop(step, None)
            raise

    def follow(self, step: int, is_over: Callable[[], bool]) -> None:
        """Watches a step whose save has begun. Rank 0 waits for it, and is told of what fails
        here."""
        pending = AgentStore._under_way.get(step)
        if pending is None:
            return
        pending.is_over = is_over
        if in_group() and dist.get_rank() != 0:
            threading.Thread(target=self._watch, args=(step, dist.get_rank()), name="everstep-dcp").start()

    def _watch(self, step: int, rank: int) -> None:
        pending = AgentStore._under_way.get(step)
        why = self._end(step)
        AgentStore._ended.pop(step, None)
        if why is not None and pending is not None and not pending.is_over():
            # The process group may be gone by now.
            with suppress(Exception):
                notices.put(_lost(step), f"rank {rank}: {why}")

    def write(self, step: int, room: None) -> None:
        """Does nothing: the agent writes it. What fails from here on is known to rank 0, which
        waits for all."""

    def _end(self, step: int) -> str | None:
        """Waits for the end of a step. Returns ``None`` if it is durable, else why it is not."""
        pending = AgentStore._under_way.get(step)
        is_known, why, pause = pending is None, None, notices.LOOK
        while not is_known and step not in AgentStore._ended:
            assert pending is not None
            was_over = pending.is_over()
            is_known, why = self._look(step, pending)
            if not is_known and was_over:
                is_known, why = True, f"step {step} was not saved by all ranks"
            if not is_known:
                time.sleep(pause)
                pause = notices.longer(pause)
        # First, for whoever asks once the step is not under way.
        why = AgentStore._ended.setdefault(step, why)
        AgentStore._under_way.pop(step, None)
        return why

    def _look(self, step: int, pending: _Pending) -> tuple[bool, str | None]:
        """Returns whether the end of a step is known, and why it has failed, if it has."""
        board = _worker.current().board
        if board is None:
            return True, f"step {step} is left to the agent: this process is not the rank any more"
        durable = board.durable
        if durable == step:
            return True, None
        failure = board.persist_failure(pending.failed)
        if failure is not None:
            if failure.step == step:
                return True, failure.why
            # The board has only the last failure.
            missed, pending.failed = failure.count - pending.failed > 1, failure.count
            if missed and (why := self._refusal(step)):
                return True, why
        if in_group() and (why := notices.find(_lost(step))):
            return True, why
        return self._overtaken(step, pending) if durable > step else (False, None)

    @staticmethod
    def _refusal(step: int) -> str | None:
        """Returns why the agent knows a step to have failed, if it does."""
        agent = _worker.current().agent
        try:
            if agent is not None:
                agent.await_durable(step, 1.0)
        except AgentError as e:
            return None if str(e).startswith(_UNANSWERED) else str(e)
        return None

    def _overtaken(self, step: int, pending: _Pending) -> tuple[bool, str | None]:
        """Looks for a step in the directory: a newer one is durable, and this one may have
        failed."""
        try:
            if self.root.has(step):
                return True, None
        except CheckpointError as e:
            return True, str(e)
        if pending.overtaken is None:
            pending.overtaken = time.monotonic()
        if time.monotonic() - pending.overtaken > LISTED:
            return True, f"step {step} did not become durable in {self.root}; a newer one did"
        time.sleep(0.2)
        return False, None

    def publish(self, step: int, written: list[str | None], *, fixed: bool) -> None:
        """Waits until the agent has published all ranks' shards. Where a rank has none, this is not
        called: nobody waits for what cannot become complete."""
        why = self._end(step)
        AgentStore._ended.pop(step, None)
        if why is not None:
            raise CheckpointError(why)


def _lost(step: int) -> str:
    """Returns where ranks tell that a step will not become durable."""
    return f"lost/{step}"


def _slots() -> list[str]:
    """Returns the slots that are in memory for this rank, or on disk in place of memory."""
    board = Path(os.environ.get("EVERSTEP_BOARD", ""))
    spill = os.environ.get("EVERSTEP_SPILL", "")
    places = [board.parent, *([Path(spill)] if spill else [])]
    return [str(path) for at in places for path in at.glob(f"{board.name.removesuffix('board')}slot-*")]


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
        self._rank, self._size = place_in_group()
        #: Memory is added when a save begins before the last one is written.
        self._free: list[Room] = []

    def draw(self, fixed: int | None, held: int) -> Number:
        """Returns the number of the next checkpoint: if not ``fixed``, one that no checkpoint has,
        whoever saved it. On rank 0. Nothing is ``held`` in memory."""
        self.root.claim(self._claimed, rank=self._rank)
        run = self.root.run
        with _drawing:
            drawn = _drawn.get(run, 0)
            step = fixed if fixed is not None else max(drawn, _newest(self.root)) + 1
            _drawn[run] = max(drawn, step)
        return Number(step, self._epoch)

    def held(self) -> int:
        """Returns 0: nothing in memory outlives the process."""
        return 0

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

    def follow(self, step: int, is_over: Callable[[], bool]) -> None:
        """Does nothing: nobody waits for a save of another rank."""

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
                f"step {step} appeared in {self.root} after this save began, and is not replaced; save again"
            )
        publish(self.root, self.root.mark(), step, [w for w in written if w is not None], _KEEP.retention(), True)
