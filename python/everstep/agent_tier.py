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
    Agent,
    AgentError,
    Arena,
    Board,
    CheckpointError,
    Offer,
    SlotLayout,
    open_slot,
)
from .directory import Directory
from .healing import HealingShard
from .outcome import Arrivals
from .slots import EARLY_BYTES, OVERLAP_BYTES, Sizes, Slots, Snapshot
from .tiers import KEEP_ALL, Keep, TierOptions

if TYPE_CHECKING:
    from ._internal import NetworkWatch, PersistFailure, Shard
    from .branch import Wanted
    from .durable_offers import DurableOffers
    from .resharded import Resharded

#: One that is written and two complete ones; one more if a persist may occupy a slot for long.
SLOTS = 3


class AgentTier:
    """Captures into slots of this node's agent, which persists them."""

    in_memory = True

    def __init__(
        self,
        agent: Agent,
        board: Board,
        directory: Directory,
        options: TierOptions,
        arrivals: Arrivals,
        kind: str = "",
    ) -> None:
        # Slots of another kind of user (everstep.dcp) cannot be restored here.
        run = directory.run + kind
        self._agent, self._board = agent, board
        self._slots = Slots(arrivals)
        self._arrivals = arrivals
        self._durable, self._any_rank = options.durable, options.any_rank
        world = _worker.world()
        self._identity = (run, world.rank, world.world_size, world.generation, options.any_rank)
        self._directory = directory
        self._destination = (options.bandwidth, bool(kind))
        self._rules: Keep | None = options.keep if options.durable else None
        if options.durable:
            self._persist_to(KEEP_ALL)
        redundancy = options.redundancy
        agent.replicate(run, redundancy.replicas, redundancy.data, options.any_rank)
        self._every = 1
        self._tier = ""
        #: Some rank found checkpoints when all ranks chose one.
        self.some_rank_found = False
        self._network: NetworkWatch | None = None
        self._pacing = options.pacing if redundancy.replicas and not options.any_rank else None
        self._adopt()

    def _persist_to(self, keep: Keep) -> None:
        bandwidth, exactly = self._destination
        try:
            self._directory.share(self._agent, keep.retention(), bandwidth, exactly)
        except AgentError as e:
            # If the directory belongs to another job, this job ends; if it cannot be read, this
            # node's agent ends.
            raise CheckpointError(str(e)) from e

    def _adopt(self) -> None:
        """Opens the slots that an earlier generation of this rank left in memory."""
        path = os.environ.get("EVERSTEP_BOARD", "")
        node = Path(path).parent
        prefix = Path(path).name.removesuffix("board")
        found = sorted(str(p) for p in node.glob(f"{prefix}slot-*"))
        spill = os.environ.get("EVERSTEP_SPILL", "")
        if spill:
            # A state that has outgrown memory has slots in both places until some of its steps are
            # complete on disk.
            found += sorted(str(p) for p in Path(spill).glob(f"{prefix}slot-*"))
        if found:
            self._open(found)
        foreign = self._slots.arena.foreign() if self._slots.arena else None
        if foreign is not None and not self.held() and _worker.world().local_rank == 0:
            print(
                f"everstep: ignoring step {foreign} in memory, which belongs to another checkpoint directory",
                file=sys.stderr,
                flush=True,
            )

    def own(self) -> None:
        """Does nothing: the agent has claimed the directory."""

    def close(self) -> None:
        """Does nothing: the agent releases the directory when the job ends."""

    def source(self) -> str:
        """Returns where the chosen step comes from, for users."""
        return {"local": "memory", "peer": "other nodes' memory", "parity": "other nodes' parity"}.get(
            self._tier, "disk"
        )

    def _open(self, paths: list[str]) -> None:
        self._slots.arena = Arena(paths, *self._identity)
        self._slots.capacity = min(Path(p).stat().st_size for p in paths)

    def held(self) -> list[int]:
        """Returns the verified steps in memory, the newest first."""
        return [step for step, _ in self._held()]

    def _held(self) -> list[tuple[int, int]]:
        return self._slots.arena.held() if self._slots.arena else []

    def choose(
        self, durable: DurableOffers, wanted: Wanted
    ) -> tuple[int, Shard | HealingShard | Resharded | None] | None:
        """Agrees with all ranks on a step and opens this rank's shard of it. Returns the step and
        the shard, ``None`` for a durable one; or ``None`` if there is no step."""
        memory = [Offer(s, True, generation) for s, generation in self._held() if wanted.allows(s)]
        offers = memory + [Offer(s, False, 0) for s in durable.likely()]
        found, self.some_rank_found = self._agent.restore(offers, self._any_rank, wanted.step, durable.found)
        if found is None:
            return None
        step, self._tier = found.step, found.tier
        if durable.of_other_branch:
            # The step was chosen by its number, and some ranks may have only the durable one.
            self._tier = "durable"
            return step, None
        if found.path is not None:
            # The agent may have replaced the slots.
            self._slots.arena = None
            return step, HealingShard(open_slot(found.path), self._agent)
        if self._tier == "local" and self._slots.arena is not None:
            return step, HealingShard(self._slots.arena.shard(step), self._agent)
        return step, None

    def failed(self, step: int) -> None:
        """Reports that the chosen step cannot be read: the world is formed again without this
        process."""
        self._agent.restore_failed(step, self._tier)
        time.sleep(30)

    @property
    def copies_late(self) -> bool:
        """Whether a copy may continue while the next iteration computes."""
        return not self._slots.torn

    def lost(self, *, surely: bool) -> bool:
        """Returns whether the slots' files were removed, so that a restart could not find the
        newest step in memory. Unless ``surely``, this may be noticed half a second or one step
        late."""
        return self._slots.arena is not None and self._slots.arena.lost(surely)

    def start(self, step: int, layout: SlotLayout, sizes: Sizes, persist: int | None) -> bool:
        """Starts to copy tensors on another thread, while everything else of the step is collected.
        Returns False if :meth:`capture` will copy the step alone: it is large enough to be copied
        late, or has no slot yet."""
        self._slots.wait()
        ready = self._slots.arena is not None and self._slots.capacity >= sizes.region + sizes.index
        return EARLY_BYTES <= sizes.region <= OVERLAP_BYTES and ready and self._slots.start(step, layout, persist)

    def cancel(self) -> None:
        """Cancels what :meth:`start` has begun."""
        self._slots.cancel()

    def capture(self, snapshot: Snapshot) -> bool:
        """Starts to copy. Returns False when every slot is in use."""
        self._slots.wait()
        lost = self.lost(surely=snapshot.persist is not None)
        if snapshot.started and not lost and self._slots.capture(snapshot, self._board):
            return True
        self._slots.cancel()
        snapshot.started = False
        need = snapshot.slot_bytes()
        if self._slots.arena is None or lost or self._slots.capacity < need - (256 << 10):
            self._slots.unpin()
            paths, warning = self._agent.reserve(need, SLOTS + self._durable)
            if warning:
                warnings.warn(f"everstep: {warning}", stacklevel=4)
            self._open(paths)
            self._slots.populate(pinned=snapshot.on_device())
        return self._slots.capture(snapshot, self._board)

    def fence(self) -> None:
        """Waits until the state may change without tearing the snapshot in progress."""
        self._slots.fence()

    def wait(self) -> None:
        """Waits until the snapshot in progress is sealed."""
        self._slots.wait()

    def started(self) -> None:
        """Watches the collectives of the training loop, which begins."""
        if self._pacing is not None:
            self._network = network.watch(self._board, self._pacing)

    def trains(self) -> None:
        """Applies the retention rules: a step is complete, so this process trains."""
        if self._rules is not None:
            self._persist_to(self._rules)
            self._rules = None

    def stepped(self) -> None:
        """Records a completed iteration."""
        if self._network is not None:
            network.iteration(self._network)

    def replicated(self) -> int:
        """Returns the newest step that all nodes hold with its copies; 0 for none."""
        return self._board.replicated

    def await_replicated(self, step: int) -> None:
        """Waits until all nodes hold the step with its copies."""
        self._board.awaits_copies = True
        try:
            while self.replicated() < step:
                if self._network is not None:
                    self._network.rest()
                time.sleep(0.0005)
        finally:
            self._board.awaits_copies = False

    def persist_due(self) -> None:
        """Requests a durable checkpoint soon."""
        self._agent.persist_due()

    def ask_for_every(self, every: int) -> None:
        """Requests an interval in steps between snapshots."""
        self._agent.snapshot_every(every)

    def every(self, step: int) -> int:
        """Returns the interval between snapshots at this step, as the coordinator has announced
        it."""
        announced = self._board.snapshot_interval(step)
        if announced is not None:
            self._every = announced
        return self._every

    def persist_at(self) -> int | None:
        """Returns the step to persist that the coordinator has announced, if any."""
        return self._board.persist_at

    def hold_at(self) -> int | None:
        """Returns the step to wait at because the world is about to change, if any."""
        return self._board.hold_at

    def durable(self) -> int:
        """Returns the newest step known to be durable; 0 for none."""
        return self._board.durable

    def failed_persist(self, seen: int) -> PersistFailure | None:
        """Returns the last checkpoint that the agent could not make durable; ``None`` if there are
        still ``seen``."""
        return self._board.persist_failure(seen)

    def await_durable(self, step: int, seconds: float | None = None) -> None:
        """Waits until the step is on durable storage, for at most ``seconds``.

        Raises:
            CheckpointError: when it could not be written.
        """
        try:
            self._agent.await_durable(step, seconds)
        except AgentError as e:
            raise CheckpointError(str(e)) from e
