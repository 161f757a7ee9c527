"""Where snapshots go: slots that the agent keeps in memory, or, without an agent, straight to disk."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from . import network
from . import worker as _worker
from ._internal import EVERY_BITS, Agent, AgentError, Arena, Board, CheckpointError, DamagedError, Shard, SlotLayout, list_line, note_shard, open_slot, publish_noted, reserve_slot
from .directory import Directory
from .meeting import gathered
from .outcome import Arrivals, Tier
from .placed import Resharded
from .slots import COPY_THREADS, EARLY_BYTES, OVERLAP_BYTES, Sizes, Slots, Snapshot

if TYPE_CHECKING:
    from ._internal import Entry, NetworkWatch

#: One being written and two complete; one more where a persist may hold one for long.
SLOTS = 3
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
            raise ValueError(f"replicas={replicas!r}: give a number of copies, or a code as '4+2' (any two of six nodes may be lost)")
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


class HealingShard:
    """A shard whose damaged parts the agent brings back from a copy."""

    def __init__(self, shard: Shard, agent: Agent) -> None:
        self._shard, self._agent = shard, agent

    def entries(self) -> list[Entry]:
        """As :meth:`Shard.entries`."""
        return self._shard.entries()

    def places(self) -> list[int] | None:
        """As :meth:`Shard.places`."""
        return self._shard.places()

    def copy_to(self, targets: list[tuple[str, int, int]]) -> None:
        """As :meth:`Shard.copy_to`."""
        try:
            self._shard.copy_to(targets, COPY_THREADS)
        except DamagedError as e:
            self._heal(e)
            self._shard.copy_to(targets, COPY_THREADS)

    def bytes(self, name: str) -> bytes:
        """As :meth:`Shard.bytes`."""
        try:
            return self._shard.bytes(name)
        except DamagedError as e:
            self._heal(e)
            return self._shard.bytes(name)

    def _heal(self, damage: DamagedError) -> None:
        text, chunks = damage.args
        try:
            self._agent.heal(self._shard.path, chunks)
        except AgentError as e:
            raise CheckpointError(f"{text}; {e}") from damage


class AgentTier:
    """Slots of this node's agent; persisting is the agent's work."""

    in_memory = True

    def __init__(
        self,
        agent: Agent,
        board: Board,
        directory: Directory,
        keep: Keep,
        durable: bool,
        any_rank: bool,
        redundancy: Redundancy,
        bandwidth: int,
        pacing: bool,
        arrivals: Arrivals,
        kind: str = "",
    ) -> None:
        # What another kind of user has in these slots is nothing that could be restored.
        run = directory.run + kind
        self._agent, self._board = agent, board
        self._slots = Slots(arrivals)
        self._arrivals = arrivals
        self._durable, self._any_rank = durable, any_rank
        world = _worker.world()
        self._identity = (run, world.rank, world.world_size, world.generation, any_rank)
        if durable:
            try:
                agent.persist_to(str(directory), directory.run, *keep.arguments(), bandwidth, bool(kind))
            except AgentError as e:
                # It belongs to another job, or cannot be read: the agent ends this one.
                raise CheckpointError(str(e)) from e
        agent.replicate(run, redundancy.replicas, redundancy.data, any_rank)
        self._every = 1
        self._tier = ""
        self._network: NetworkWatch | None = None
        self._pacing = pacing if redundancy.replicas and not any_rank else None
        self._adopt()

    def _adopt(self) -> None:
        """Slots that an earlier generation of this rank left in memory."""
        path = os.environ.get("EVERSTEP_BOARD", "")
        node = Path(path).parent
        prefix = Path(path).name.removesuffix("board")
        found = sorted(str(p) for p in node.glob(f"{prefix}slot-*"))
        spill = os.environ.get("EVERSTEP_SPILL", "")
        if not found and spill:
            found = sorted(str(p) for p in Path(spill).glob(f"{prefix}slot-*"))
        if found:
            self._open(found)
        foreign = self._slots.arena.foreign() if self._slots.arena else None
        if foreign is not None and not self.held() and _worker.world().local_rank == 0:
            print(f"everstep: step {foreign} in memory is of another checkpoint directory and is not used", file=sys.stderr, flush=True)

    def own(self) -> None:
        """The agent has claimed the directory."""

    def close(self) -> None:
        """The agent lets go of the directory when the job ends."""

    def source(self) -> str:
        """Where the step that was chosen comes from."""
        return {"local": "memory", "peer": "other nodes' memory", "parity": "other nodes' parity"}.get(self._tier, "disk")

    def _open(self, paths: list[str]) -> None:
        self._slots.arena = Arena(paths, *self._identity)
        self._slots.capacity = min(Path(p).stat().st_size for p in paths)

    def held(self) -> list[int]:
        """Verified steps in memory, newest first."""
        return [step for step, _ in self._held()]

    def _held(self) -> list[tuple[int, int]]:
        return self._slots.arena.held() if self._slots.arena else []

    def choose(self, durable: dict[int, Shard | Resharded], wanted: int | None) -> tuple[int, Shard | HealingShard | Resharded] | None:
        """Agrees with all ranks on a step and opens this rank's shard of it."""
        memory = [(s, True, generation) for s, generation in self._held() if wanted in (None, s)]
        offers = memory + [(s, False, 0) for s in durable]
        found = self._agent.restore(offers, self._any_rank, wanted)
        if found is None:
            return None
        step, self._tier, path = found
        if path is not None:
            # The agent's slots may be others than those that were there before.
            self._slots.arena = None
            return step, HealingShard(open_slot(path), self._agent)
        if self._tier == "local" and self._slots.arena is not None:
            return step, HealingShard(self._slots.arena.shard(step), self._agent)
        return step, durable[step]

    def failed(self, step: int) -> None:
        """The step that was chosen cannot be read: the world forms anew, without this process."""
        self._agent.restore_failed(step, self._tier)
        time.sleep(30)

    @property
    def copies_late(self) -> bool:
        """A copy may go on while the next iteration computes."""
        return not self._slots.torn

    def lost(self, *, surely: bool) -> bool:
        """Whether the slots' files were removed, so that no restart could find the newest step in memory. Unless ``surely``, this may
        be noticed half a second late, or one step late."""
        return self._slots.arena is not None and self._slots.arena.lost(surely)

    def start(self, step: int, layout: SlotLayout, sizes: Sizes, persist: int | None) -> bool:
        """Lets another thread begin to copy tensors, while everything else of the step is collected. False if this one will be
        copied by :meth:`capture` alone: it is large enough to be copied late, or has no slot yet."""
        self._slots.wait()
        ready = self._slots.arena is not None and self._slots.capacity >= sizes.region + sizes.index
        return EARLY_BYTES <= sizes.region <= OVERLAP_BYTES and ready and self._slots.start(step, layout, persist)

    def cancel(self) -> None:
        """Gives up what :meth:`start` has begun."""
        self._slots.cancel()

    def capture(self, snapshot: Snapshot) -> bool:
        """Starts to copy; False when every slot is in use."""
        self._slots.wait()
        lost = self.lost(surely=snapshot.persist is not None)
        if snapshot.started and not lost and self._slots.capture(snapshot, self._board):
            return True
        self._slots.cancel()
        snapshot.started = False
        need = snapshot.slot_bytes()
        if self._slots.arena is None or lost or self._slots.capacity < need - (256 << 10):
            paths, warning = self._agent.reserve(need, SLOTS + self._durable)
            if warning:
                warnings.warn(f"everstep: {warning}", stacklevel=4)
            self._open(paths)
            if self._slots.arena is not None:
                self._slots.arena.populate()
        return self._slots.capture(snapshot, self._board)

    def fence(self) -> None:
        """Until the state may change without tearing the snapshot in flight."""
        self._slots.fence()

    def wait(self) -> None:
        """Until the snapshot in flight is sealed."""
        self._slots.wait()

    def started(self) -> None:
        """The training loop begins: its collectives are watched from now on."""
        if self._pacing is not None:
            self._network = network.watch(self._board, self._pacing)

    def stepped(self) -> None:
        """An iteration is complete."""
        if self._network is not None:
            network.iteration(self._network)

    def replicated(self) -> int:
        """Newest step that all nodes hold with its copies; 0 for none."""
        return max(self._board.get("Replicated") - 1, 0)

    def await_replicated(self, step: int) -> None:
        """Until all nodes hold the step with its copies."""
        self._board.set("AwaitsCopies", 1)
        try:
            while self.replicated() < step:
                if self._network is not None:
                    self._network.rest()
                time.sleep(0.0005)
        finally:
            self._board.set("AwaitsCopies", 0)

    def persist_due(self) -> None:
        """Asks for a durable checkpoint soon."""
        self._agent.persist_due()

    def ask_for_every(self, every: int) -> None:
        """Asks for snapshots so many steps apart."""
        self._agent.snapshot_every(every)

    def every(self, step: int) -> int:
        """How many steps snapshots are apart at this one, as the coordinator has announced it."""
        said = self._board.get("SnapshotEvery")
        first, every = said >> EVERY_BITS, said & ((1 << EVERY_BITS) - 1)
        if said and step >= first:
            self._every = every
        return self._every

    def persist_at(self) -> int:
        """Step to persist plus 1, as the coordinator has announced it; 0 for none."""
        return self._board.get("PersistAt")

    def hold_at(self) -> int:
        """Step to wait at plus 1, because the world is about to change; 0 for none."""
        return self._board.get("HoldAt")

    def durable(self) -> int:
        """Newest step known to be durable; 0 for none."""
        return max(self._board.get("Durable") - 1, 0)

    def failed_persist(self, seen: int) -> tuple[int, int, str] | None:
        """How many checkpoints the agent could not make durable, the last one's step and why; ``None`` when it was ``seen``."""
        return self._board.failure() if self._board.get("PersistFailures") != seen else None

    def await_durable(self, step: int, seconds: float | None = None) -> None:
        """Waits until the step is on durable storage, for at most ``seconds``.

        Raises:
            CheckpointError: when it could not be written.
        """
        try:
            self._agent.await_durable(step, seconds)
        except AgentError as e:
            raise CheckpointError(str(e)) from e


def newest_step(tier: AgentTier | DiskTier, directory: Directory, of: Tier | None) -> int | None:
    """The newest step that memory (``"local"``), other nodes (``"peer"``) or storage (``"disk"``) is known to hold; ``None``: here or there."""
    steps: list[int] = []
    if of in (None, "local"):
        steps += tier.held()
    if of == "peer" and (replicated := tier.replicated()):
        steps.append(replicated)
    if of in (None, "disk"):
        steps += [s for s, _, _, wrong in list_line(directory) if wrong is None]
    return max(steps, default=None)


class DiskTier:
    """Without an agent: one slot to copy into, then files."""

    in_memory = False

    def __init__(self, directory: Directory, keep: Keep, arrivals: Arrivals) -> None:
        self._directory, self._keep = directory, keep
        # What is in the slot is nothing to rely on: it goes with the process.
        self._slots, self._arrivals = Slots(Arrivals()), arrivals
        self._scratch: str | None = None
        self._done = 0

    def held(self) -> list[int]:
        """Nothing outlives the process in memory."""
        return []

    def choose(self, durable: dict[int, Shard | Resharded], wanted: int | None) -> tuple[int, Shard | HealingShard | Resharded] | None:
        """The newest step that all ranks can read."""
        steps = self._common(sorted(durable, reverse=True))
        return (steps[0], durable[steps[0]]) if steps else None

    def failed(self, step: int) -> None:
        """Ranks vote, and try an older one."""

    def agree(self, value: int) -> int:
        """Rank 0's value, on all ranks."""
        return gathered([value])[0][0]

    def own(self) -> None:
        """Claims the directory, before the first checkpoint is made: reading needs no claim."""
        self._directory.claim(self.agree)

    def close(self) -> None:
        """Lets go of the directory."""
        self._directory.release()

    def source(self) -> str:
        """Where the step that was chosen comes from."""
        return "disk"

    def _common(self, steps: list[int]) -> list[int]:
        every = gathered((steps[:2] + [-1, -1])[:2])
        return [s for s in steps[:2] if all(s in held for held in every)]

    copies_late = False

    def lost(self, *, surely: bool) -> bool:
        """What the slot holds is on disk."""
        return False

    def capture(self, snapshot: Snapshot) -> bool:
        """Writes and publishes: when it returns, the step is durable.

        Raises:
            CheckpointError: on all ranks, when one of them could not.
        """
        failure: Exception | None = None
        try:
            need = snapshot.slot_bytes()
            if self._slots.arena is None or self._slots.capacity < need - (256 << 10):
                self._open(need)
            captured = self._slots.capture(snapshot, None)
            self._slots.wait()
            if not captured:
                failure = CheckpointError(f"step {snapshot.step} was not captured: its slot of memory is in use")
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
        # The file lives on through its mapping and leaves nothing behind when the process ends.
        self.discard()
        self._slots.capacity = need

    def discard(self) -> None:
        """Removes the scratch directory."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def fence(self) -> None:
        """Nothing is copied late."""

    def wait(self) -> None:
        """Nothing is in flight."""

    def _write(self, step: int, failure: Exception | None) -> None:
        """From the slot to the directory, together with all ranks; ``failure``: this one has nothing to write."""
        world, mark = _worker.world(), self._directory.mark()
        try:
            if failure is None and self._slots.arena is not None:
                note_shard(self._directory, mark, step, self._slots.arena.write_shard(self._directory, step, mark))
        except (CheckpointError, OSError) as e:
            failure = e
        # What an earlier life has left must not stand for a shard that could not be written.
        failed = [rank for rank, (wrong,) in enumerate(gathered([int(failure is not None)])) if wrong]
        if world.rank == 0 and not failed:
            try:
                path, trouble = publish_noted(self._directory, mark, step, world.world_size, self._keep.arguments())
                self._say(step, path, trouble)
            except (CheckpointError, OSError) as e:
                failure = e
        if failure is None and failed:
            failure = CheckpointError(f"step {step} was not written by every rank (rank {failed[0]} could not); the previous checkpoint stays")
        ((published,), *_) = gathered([int(failure is None)])
        if failure is None and not published:
            failure = CheckpointError(f"step {step} could not be published by rank 0; the previous checkpoint stays")
        if failure is not None:
            raise CheckpointError(str(failure)) from failure
        self._done = step
        self._arrivals.durable(step)

    def _say(self, step: int, path: str, trouble: str | None) -> None:
        name = path.rpartition("/")[2]
        if name != f"step-{step}":
            warnings.warn(f"everstep: step {step} is in {name}: step-{step} is another branch's, the user's, or not everstep's, and stays", stacklevel=5)
        if trouble is not None:
            warnings.warn(f"everstep: older checkpoints in {self._directory} could not be deleted: {trouble}", stacklevel=5)

    def started(self) -> None:
        """Nobody sends anything here."""

    def stepped(self) -> None:
        """Nobody sends anything here."""

    def replicated(self) -> int:
        """There are no copies."""
        return 0

    def await_replicated(self, step: int) -> None:
        """There are no copies."""

    def ask_for_every(self, every: int) -> None:
        """There are no snapshots in memory."""

    def every(self, step: int) -> int:
        """There are no snapshots in memory."""
        return 1

    def persist_due(self) -> None:
        """Persisting is immediate here."""

    def persist_at(self) -> int:
        """Nobody announces steps here."""
        return 0

    def hold_at(self) -> int:
        """The world does not change here."""
        return 0

    def durable(self) -> int:
        """Newest step written by this manager; 0 for none."""
        return self._done

    def failed_persist(self, seen: int) -> tuple[int, int, str] | None:
        """Failures are raised here."""
        return None

    def await_durable(self, step: int, seconds: float | None = None) -> None:
        """Already is when :meth:`capture` returns."""
