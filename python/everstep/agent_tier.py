"""Snapshots in slots that the agent of this node keeps in memory."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from . import network
from . import worker as _worker
from ._internal import (
    EVERY_BITS,
    Agent,
    AgentError,
    Arena,
    Board,
    CheckpointError,
    SlotLayout,
    open_slot,
)
from .directory import Directory
from .healing import HealingShard
from .outcome import Arrivals
from .slots import EARLY_BYTES, OVERLAP_BYTES, Sizes, Slots, Snapshot
from .tiers import KEEP_ALL, Keep, Redundancy

if TYPE_CHECKING:
    from ._internal import NetworkWatch, Shard
    from .branch import Wanted
    from .durable_offers import DurableOffers
    from .placed import Resharded

#: One being written and two complete; one more where a persist may hold one for long.
SLOTS = 3


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
        self._destination = (str(directory), directory.run, bandwidth, bool(kind))
        self._rules: Keep | None = keep if durable else None
        if durable:
            self._persist_to(KEEP_ALL)
        agent.replicate(run, redundancy.replicas, redundancy.data, any_rank)
        self._every = 1
        self._tier = ""
        #: Some rank found checkpoints when all ranks chose one.
        self.some_rank_found = False
        self._network: NetworkWatch | None = None
        self._pacing = pacing if redundancy.replicas and not any_rank else None
        self._adopt()

    def _persist_to(self, keep: Keep) -> None:
        directory, run, bandwidth, exactly = self._destination
        try:
            self._agent.persist_to(directory, run, *keep.arguments(), bandwidth, exactly)
        except AgentError as e:
            # If it belongs to another job, this job ends; if it cannot be read, this node's agent does.
            raise CheckpointError(str(e)) from e

    def _adopt(self) -> None:
        """Slots that an earlier generation of this rank left in memory."""
        path = os.environ.get("EVERSTEP_BOARD", "")
        node = Path(path).parent
        prefix = Path(path).name.removesuffix("board")
        found = sorted(str(p) for p in node.glob(f"{prefix}slot-*"))
        spill = os.environ.get("EVERSTEP_SPILL", "")
        if spill:
            # A state that has outgrown memory leaves slots in both until some of its steps are complete on disk.
            found += sorted(str(p) for p in Path(spill).glob(f"{prefix}slot-*"))
        if found:
            self._open(found)
        foreign = self._slots.arena.foreign() if self._slots.arena else None
        if foreign is not None and not self.held() and _worker.world().local_rank == 0:
            print(
                f"everstep: step {foreign} in memory is of another checkpoint directory and is not used",
                file=sys.stderr,
                flush=True,
            )

    def own(self) -> None:
        """The agent has claimed the directory."""

    def close(self) -> None:
        """The agent lets go of the directory when the job ends."""

    def source(self) -> str:
        """Where the step that was chosen comes from."""
        return {"local": "memory", "peer": "other nodes' memory", "parity": "other nodes' parity"}.get(
            self._tier, "disk"
        )

    def _open(self, paths: list[str]) -> None:
        self._slots.arena = Arena(paths, *self._identity)
        self._slots.capacity = min(Path(p).stat().st_size for p in paths)

    def held(self) -> list[int]:
        """Verified steps in memory, newest first."""
        return [step for step, _ in self._held()]

    def _held(self) -> list[tuple[int, int]]:
        return self._slots.arena.held() if self._slots.arena else []

    def choose(
        self, durable: DurableOffers, wanted: Wanted
    ) -> tuple[int, Shard | HealingShard | Resharded | None] | None:
        """Agrees with all ranks on a step and opens this rank's shard of it; ``None`` where that is durable."""
        memory = [(s, True, generation) for s, generation in self._held() if wanted.allows(s)]
        offers = memory + [(s, False, 0) for s in durable.likely()]
        found, self.some_rank_found = self._agent.restore(offers, self._any_rank, wanted.step, durable.found)
        if found is None:
            return None
        step, self._tier, path = found
        if path is not None:
            # The agent's slots may be others than those that were there before.
            self._slots.arena = None
            return step, HealingShard(open_slot(path), self._agent)
        if self._tier == "local" and self._slots.arena is not None:
            return step, HealingShard(self._slots.arena.shard(step), self._agent)
        return step, None

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

    def trains(self) -> None:
        """A step is complete, so this process trains, and its rules decide what stays."""
        if self._rules is not None:
            self._persist_to(self._rules)
            self._rules = None

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
