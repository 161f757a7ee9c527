"""Checkpoints of a training loop: every step in memory, now and then on durable storage."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from datetime import timedelta
from os import PathLike
from typing import Any, Literal

from . import options
from . import worker as _worker
from ._internal import AgentError, CheckpointError, list_line
from .agent_tier import AgentTier
from .batches import watch_forward
from .branch import Branch
from .directory import Directory
from .disk_tier import DiskTier
from .micro import MicroBatches
from .outcome import Arrivals, Outcome, Tier
from .plan import BatchPlan, batch_plan
from .replicated import is_replicated
from .restoring import Restoring
from .schedule import (
    ASK_AGAIN,
    FREE_STALL,
    SLOT_SECONDS,
    STALL_BUDGET,
    STORAGE_SHARE,
    WRITING_SECONDS,
    Appointments,
    Snapshots,
    passes,
    refill,
    source_of,
)
from .slots import OVERLAP_BYTES, Snapshot
from .start import Start
from .state import Layout, State
from .structure import Structure
from .tiers import EPOCH, RECOVERY, USER, Keep, Redundancy
from .unsaved import UnsavedOptimizers

Every = int | Literal["auto"]
Persist = int | timedelta | Literal["auto"]


class CheckpointManager:
    """Tiered checkpoints of Stateful objects; all ranks resume from one step.

    Under ``everstep run`` each step's state goes into this node's memory, where it survives the death of the worker and of the agent,
    and from there to ``directory`` when a persist is due. Elsewhere only ``directory`` is written.

    Args:
        directory: where durable checkpoints live: a path that all ranks see, or a prefix in an object store (``s3://bucket/prefix``,
            ``gs://…``, ``az://…``; keys and endpoints as the providers' own tools read them from the environment).
        every: steps between memory snapshots. ``"auto"``: each step, or, where that would hold the loop up by more than
            ``stall_budget``, every k-th.
        persist: steps or time between durable checkpoints. ``"auto"`` measures what they cost, keeps to ``stall_budget``,
            never begins one before the last one is written, and says why in ``everstep ckpt show``. The last step is
            always made durable by :meth:`close`. 0 switches durable checkpoints off.
        stall_budget: part of the training time that each ``"auto"`` may spend, all of it counted: collecting, encoding, copying,
            waiting. Not given: 1 %, and memory snapshots of up to half a millisecond are made at every step, however short
            steps are.
        replicas: copies of each step in other nodes' memory. ``"4+2"``: parity instead, so that of each six nodes any two may be
            lost, for half a shard of memory on each instead of two. Ranks that hold the same state (DDP) are copies of each
            other already, and a single node has nobody to send to.
        pacing: copies for other nodes are sent while the training network is idle (20 steps are profiled first), and less
            often when that is too short. Without it they are sent at once, beside whatever the training sends.
        keep: the newest durable checkpoints that stay (at least 2).
        keep_every: the first one of every such span stays, too.
        keep_epochs: make a durable checkpoint when an epoch ends (anything in ``state`` with an ``epoch``), and keep it.
        persist_bandwidth: bytes per second and rank that go to ``directory`` at most; 0 is no limit.
        overlap: copy parameters while the next iteration computes (the next weight update waits for the copy) instead of before
            :meth:`step` returns, which then takes a checksum only. ``"auto"`` overlaps large states only. A script that writes to
            its weights in between (an evaluation with averaged weights, say) loses one snapshot, which is noticed by that
            checksum; from then on copies are complete when :meth:`step` returns.
        replicated: every rank holds the same modules and optimizer state, so that any rank can restore any other's and the number of
            ranks may change. ``"auto"``: when DDP synchronizes every trainable parameter and every saved buffer of the modules.
        **state: modules, optimizers, and anything with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        every: Every = "auto",
        replicas: int | str = 1,
        pacing: bool = True,
        persist: Persist = "auto",
        stall_budget: float | None = None,
        keep: int = 2,
        keep_every: timedelta | None = None,
        keep_epochs: bool = True,
        persist_bandwidth: int = 0,
        overlap: bool | Literal["auto"] = "auto",
        replicated: bool | Literal["auto"] = "auto",
        **state: Any,
    ) -> None:
        if not state:
            raise TypeError("nothing to checkpoint: pass model=…, optimizer=…, data=…")
        self._every = options.snapshot_interval(every)
        self._persist = persist = options.durable_interval(persist)
        self._overlap = options.flag_or_auto("overlap", overlap)
        replicated = options.flag_or_auto("replicated", replicated)
        stall_budget, pacing = options.budget(stall_budget), options.flag("pacing", pacing)
        keep = options.count("keep", keep, 1, "a number of checkpoints, at least 2")
        keep_every, keep_epochs = options.span("keep_every", keep_every), options.flag("keep_epochs", keep_epochs)
        bandwidth = options.count("persist_bandwidth", persist_bandwidth, 0, "bytes per second, or 0 for no limit")
        self.extra: dict[str, Any] = {}
        self._extra: dict[str, Any] = {}
        same = is_replicated(state) if replicated == "auto" else replicated
        world = _worker.world()
        self._state = State(state, Layout(world.rank, world.world_size, same))
        self._directory, self._arrivals = Directory(directory), Arrivals()
        self._closed = False
        self._step: int | None = None
        #: There is something that :meth:`close` may have to make durable: a step was completed here, or restored from memory.
        self._unsaved = False
        #: An exception that was being handled already, if any.
        self._handled = id(sys.exc_info()[1])
        self._branch = Branch(self._directory)
        self._snapshot_step = self._persisted_step = self._persist_lost = 0
        self._worker = _worker.current()
        self._directory.prepare()
        durable = bool(self._persist)
        rules, redundancy = Keep(keep, keep_every, keep_epochs), Redundancy.of(replicas)
        agent = self._worker.agent
        if agent is not None and self._worker.board is not None:
            self._worker.managed = True
            self._worker.board.set("Role", self._state.role())
            self._tier: AgentTier | DiskTier = AgentTier(
                agent,
                self._worker.board,
                self._directory,
                rules,
                durable,
                same,
                redundancy,
                bandwidth,
                pacing,
                self._arrivals,
            )
        else:
            self._tier = DiskTier(self._directory, rules, self._arrivals)
        early = self._tier if isinstance(self._tier, AgentTier) and overlap is not True else None
        self._start, self._structure = Start(self._directory, self._tier), Structure(self._state, early)
        budget = STALL_BUDGET if stall_budget is None else stall_budget
        self._due = (
            source_of(persist, budget, STORAGE_SHARE if self._tier.in_memory else 1.0, self._directory)
            if world.rank == 0
            else None
        )
        measures = world.rank == 0 and self._every is None and self._tier.in_memory
        self._snapshots = Snapshots(budget, FREE_STALL if stall_budget is None else 0.0) if measures else None
        self._stalled, self._refill, self._sections, self._failures, self._capture_failed = 0.0, 0, 0, 0, -1
        self._asked: float | None = None
        self._retake: tuple[int | None] | None = None
        self._appointments = (
            Appointments(self._due, self._tier.agree)
            if not isinstance(persist, int) and isinstance(self._tier, DiskTier)
            else None
        )
        self._epochs = keep_epochs and durable
        self._epoch_sources = [o for o in state.values() if isinstance(getattr(o, "epoch", None), int)]
        self._epoch: list[int] | None = None
        self._micro = MicroBatches(state)
        watch_forward(state)
        UnsavedOptimizers(self._state)
        for optimizer in self._state.optimizers:
            optimizer.register_step_pre_hook(self._fence)

    def _fence(self, *_: Any) -> None:
        """Before a weight update: the snapshot in flight must be complete, or it would be torn."""
        self._state.updated = True
        began = time.perf_counter_ns()
        self._tier.fence()
        self._stall(time.perf_counter_ns() - began, begins=False)

    def restore(self, step: int | None = None) -> int:
        """Loads the newest step that every rank can restore, from the nearest tier.

        Returns the number of steps completed, 0 for a fresh start. Call it once, before the loop, on all ranks.

        Args:
            step: go back to this step; what came after it stays, as another branch. A restart goes on with the new one.

        Raises:
            CheckpointError: when there are checkpoints but none can be read, or they are of another
                model (the text shows what differs).
        """
        with _worker.section("restore"):
            wanted = self._branch.wanted(step)
            done, self.extra = Restoring(self._state, self._tier, self._directory, self._branch).restore(wanted)
            self._extra = self.extra
        self._branch.announce(wanted, done)
        self._step, self._unsaved = done, done > 0 and self._tier.source() != "disk"
        self._state.updated = False
        self._start.restored(done)
        for optimizer in self._state.optimizers:
            _worker.watch_gradients(optimizer)
        self._worker.restored(done)
        self._tier.started()
        return done

    def latest_step(self, tier: Tier | None = None) -> int | None:
        """Newest step in ``tier`` (``"local"`` memory, ``"peer"`` memory of other nodes, ``"disk"``), as far as this rank can tell."""
        steps: list[int] = []
        if tier in (None, "local"):
            steps += self._tier.held()
        if tier == "peer" and (replicated := self._tier.replicated()):
            steps.append(replicated)
        if tier in (None, "disk"):
            steps += [s for s, _, _, wrong in list_line(self._directory) if wrong is None]
        return max(steps, default=None)

    def step(self, step: int, *, metrics: dict[str, float] | None = None, **extra: Any) -> Outcome:
        """Call once at the end of each optimizer step, on all ranks.

        Args:
            step: number of optimizer steps completed (as :meth:`restore` returns it).
            **extra: small values kept with this step; after a restore they are in :attr:`extra`.
        """
        if self._step is not None and step <= self._step:
            raise ValueError(
                f"step({step}) after step {self._step}: give the number of steps completed, which must rise"
            )
        began = time.perf_counter_ns()
        self._start.writing(bool(self._persist))
        self._branch.trains(step)
        self._tier.trains()
        before, self._step, self._extra = (step - 1 if self._step is None else self._step), step, extra
        self._unsaved, self._state.updated = True, False
        self._look()
        self._measure()
        hold = before < self._tier.hold_at() - 1 <= step
        persist = self._persist_why(before, step, hold)
        every = self._tier.every(step) if self._every is None else self._every
        due = (passes(before, step, every) and self._tier.in_memory) or self._tier.lost(surely=False)
        if self._retake is not None:
            due, (lost,), self._retake = True, self._retake, None
            persist = lost if persist is None else persist
        snapshot = (persist is not None or due or hold) and self._snapshot(step, extra, persist)
        if persist is not None and not snapshot and self._capture_failed != step:
            # It was promised: storage that is slower than the promises holds the loop up.
            began += self._wait_for_slot(step, extra, persist)
            snapshot = self._capture_failed != step
        self._worker.stepped(step)
        self._tier.stepped()
        self._ask_for_persist()
        self._stall(time.perf_counter_ns() - began, begins=snapshot, after=self._refill if snapshot else 0)
        if hold:
            self._hold(step)
        self._look()
        return self._arrivals.taken(_worker.should_stop() if self._worker.handles_signals else False)

    def _look(self) -> None:
        """What became of earlier snapshots: which are durable, which were lost."""
        if self._tier.in_memory:
            if durable := self._tier.durable():
                self._arrivals.durable(durable)
                if durable >= self._persisted_step:
                    self._worker.unfinished.discard(self)
            if (failed := self._tier.failed_persist(self._failures)) is not None:
                self._failures, step, why = failed
                self._arrivals.failed(why, step, told=True)
            if (removed := self._persisted_step) > max(durable, *self._arrivals.lost, 0) and self._tier.lost(
                surely=False
            ):
                self._arrivals.failed(f"step {removed} was removed from memory before it was durable", removed)
        for step in self._arrivals.lost:
            if self._due is not None:
                self._due.failed(step)
            if step == self._persisted_step:
                self._persist_lost = step
            if step == self._snapshot_step and self._tier.in_memory:
                # Other ranks, of which some made this step durable, do not come back to it.
                self._retake = (RECOVERY if _worker.world().world_size == 1 and step == self._persisted_step else None,)
        self._arrivals.lost.clear()

    def _measure(self) -> None:
        """A step is complete: what it took, and what that means for the next ones."""
        held_up, self._sections = self._worker.entered != self._sections, self._worker.entered
        if self._due is not None:
            self._due.stepped(self._tier.durable(), held_up)
        if self._snapshots is not None:
            every = self._snapshots.stepped(self._stalled, held_up)
            self._stalled = 0.0
            if every is not None:
                self._tier.ask_for_every(every)

    def _stall(self, nanos: int, *, begins: bool, after: int = 0) -> None:
        """The loop was held up by a snapshot, and loses ``after`` later."""
        if self._worker.board is not None:
            self._worker.board.add("BlockingNanos" if begins else "FenceNanos", nanos + after)
        if self._snapshots is not None:
            self._stalled += nanos / 1e9
            self._snapshots.stalled((nanos + after) / 1e9, begins=begins)

    def _hold(self, step: int) -> None:
        """The world changes after this step: what comes next runs in the next one. Ends with this process,
        unless the coordinator thinks better of it."""
        with _worker.section("regroup"):
            self._tier.wait()
            if self._due is not None:
                # Whoever goes on with this knows that nothing failed.
                self._due.close()
            while 0 < self._tier.hold_at() <= step + 1 and not _worker.should_stop():
                time.sleep(0.002)

    def _persist_why(self, last: int, step: int, hold: bool) -> int | None:
        """Why this step goes to durable storage; ``None``: it does not. The same on all ranks."""
        before, self._epoch = self._epoch, [o.epoch for o in self._epoch_sources]
        if self._epochs and before is not None and before != self._epoch:
            return EPOCH
        return RECOVERY if self._persist_now(last, step) or (hold and bool(self._persist)) else None

    def _persist_now(self, last: int, step: int) -> bool:
        if isinstance(self._persist, int):
            return self._persist > 0 and passes(last, step, self._persist)
        if self._appointments is not None:
            return self._appointments.due(step)
        return last < self._tier.persist_at() - 1 <= step

    def _ask_for_persist(self) -> None:
        """Time passes differently on each rank: rank 0 asks, the coordinator names the step."""
        if not self._tier.in_memory or self._due is None or self._due.steps_left():
            return
        if self._asked is None or time.monotonic() - self._asked > ASK_AGAIN:
            self._asked = time.monotonic()
            self._tier.persist_due()

    def _snapshot(self, step: int, extra: dict[str, Any], persist: int | None) -> bool:
        since = time.monotonic()
        snapshot = self._structure.snapshot(step, extra, persist)
        snapshot.background = not snapshot.started and self._copies_late(snapshot)
        done = self._captured(snapshot)
        if done and not snapshot.background:
            self._tier.wait()
        if done:
            self._snapshot_step = step
            self._refill = 0 if snapshot.on_device() else refill(snapshot.bytes())
            if persist is not None:
                self._persisted_step, self._asked = step, None
                if self._tier.in_memory:
                    self._worker.unfinished.add(self)
                if self._due is not None:
                    self._due.begins(step, since)
        elif self._worker.board is not None:
            self._worker.board.add("Skipped", 1)
        return done

    def _captured(self, snapshot: Snapshot) -> bool:
        try:
            return self._tier.capture(snapshot)
        except (CheckpointError, AgentError) as e:
            # A job that cannot make its first snapshot is set up wrongly; one that could goes on.
            if not self._tier.in_memory or not self._snapshot_step or snapshot.persist == USER:
                raise
            self._arrivals.failed(f"the snapshot of step {snapshot.step} failed: {e}", snapshot.step)
            self._capture_failed = snapshot.step
            return False

    def _copies_late(self, snapshot: Snapshot) -> bool:
        """The copy goes on while the next iteration computes: the next weight update must wait for it, which only an optimizer can."""
        late = self._overlap if self._overlap != "auto" else snapshot.bytes() > OVERLAP_BYTES or snapshot.on_device()
        return late if self._tier.copies_late and self._state.optimizers else snapshot.on_device()

    def steps(self, total: int) -> Iterator[int]:
        """``for step in ckpt.steps(total): body``: restores unless :meth:`restore` or :meth:`step` was called, yields the steps
        still to run, calls :meth:`step` after each, stops early when asked to, and makes the last step durable."""
        self._worker.handle_signals()
        done = None if self._closed or self._state.updated else self._step
        if done is None:
            done = self.restore()
        self._worker.plans(total)
        while done < total:
            yield done
            done += 1
            if self.step(done).should_stop:
                break
        self.close()

    def micro_batches(self, loader: Iterable[Any], *, global_batch: int, micro_batch: int) -> Iterator[Any]:
        """This rank's micro-batches of one step: ``for batch in ckpt.micro_batches(loader, …): loss(batch).backward()``.

        The global batch has ``global_batch`` samples on any number of ranks, which may have different numbers of micro-batches. After
        the loop the gradients are those of the mean loss over it (each micro-batch's loss being its mean), also under DDP. The loader
        makes batches of ``micro_batch`` with an :class:`everstep.data.ElasticDistributedSampler`, or anything else that each rank may
        draw from at its own pace.
        """
        return self._micro.of_step(loader, batch_plan(global_batch, micro_batch))

    @property
    def plan(self) -> BatchPlan | None:
        """This rank's part of the global batch, once :meth:`micro_batches` was used."""
        return self._micro.plan

    def save(self, step: int | None = None, *, block: bool = True, **extra: Any) -> None:
        """Makes the state durable in the directory now, on all ranks. This checkpoint is yours: it is never removed. Without ``step``,
        it is that of the last :meth:`step`, and refused if the weights were updated since."""
        if step is None and self._step is not None and self._state.updated:
            raise CheckpointError(
                f"save(): the weights were updated after step {self._step}; call step() first, or give the number of steps"
            )
        self._save(step, block, extra or self._extra, USER)

    def _save(self, step: int | None, block: bool, extra: dict[str, Any], why: int) -> None:
        step = self._step if step is None else step
        if step is None:
            raise ValueError("save() before any step: give the number of steps completed")
        self._start.writing(True)
        self._branch.trains(step)
        self._tier.wait()
        self._look()
        if not self._snapshot(step, extra, why):
            self._wait_for_slot(step, extra, why)
        self._tier.wait()
        self._arrivals.raise_lost()
        if block:
            with _worker.section("checkpoint"):
                self._tier.await_durable(step)
        if self._due is not None:
            self._due.disturbed()

    def _wait_for_slot(self, step: int, extra: dict[str, Any], why: int) -> int:
        """Captures as soon as what is being written out has left a slot, and returns the nanoseconds that it took."""
        began = time.perf_counter_ns()
        with _worker.section("checkpoint"):
            if self._persisted_step > self._tier.durable():
                # What becomes of that one is in the outcome of a later step.
                with contextlib.suppress(*(() if why == USER else (CheckpointError,))):
                    self._tier.await_durable(self._persisted_step)
            since = time.monotonic()
            while not self._snapshot(step, extra, why) and self._capture_failed != step:
                if time.monotonic() - since > SLOT_SECONDS:
                    raise CheckpointError(
                        f"every slot of memory has been in use for {SLOT_SECONDS} s: step {step} is not saved"
                    )
                time.sleep(0.01)
        return time.perf_counter_ns() - began

    def wait(self, tier: Tier = "local") -> None:
        """Waits until the last snapshot is complete in memory, in other nodes' memory (``"peer"``), or, if it was to go there,
        on ``"disk"``."""
        self._tier.wait()
        if tier == "peer" and self._snapshot_step:
            with _worker.section("checkpoint"):
                self._tier.await_replicated(self._snapshot_step)
        if tier == "disk" and self._persisted_step:
            self._await_disk()

    def _await_disk(self, seconds: float | None = None) -> None:
        self._look()
        if self._persist_lost == self._persisted_step:
            raise CheckpointError(
                f"the checkpoint of step {self._persisted_step} was lost, as was said then: save() makes another one"
            )
        with _worker.section("checkpoint"):
            self._tier.await_durable(self._persisted_step, seconds)

    def close(self) -> None:
        """Makes the last step durable (unless it is, or ``persist=0``), and waits for what is on its way. Doing it again does nothing.

        Weights that were updated after the last :meth:`step` are of no step and are not saved. While an exception is handled
        (``finally``), several ranks do not wait for each other: some may not come.
        """
        failing = id(sys.exc_info()[1]) not in (id(None), self._handled)
        if self._closed or (failing and _worker.world().world_size > 1):
            return
        self._closed = True
        self._tier.wait()
        self._look()
        lost = self._persist_lost == self._persisted_step
        step = self._step or 0
        due = self._persist and self._unsaved and (lost or self._persisted_step != step) and self._tier.durable() < step
        if due and self._state.updated:
            what = f"close() does not save step {step}: the weights were updated, and no step() has followed"
            warnings.warn(f"everstep: {what}", stacklevel=2)
        if due and not self._state.updated:
            self._save(step, True, self._extra, RECOVERY)
        elif not lost:
            self.wait("disk")
        if self._due is not None and self._unsaved:
            self._due.close()
        self._tier.close()
        self._worker.unfinished.discard(self)

    def _finish(self) -> None:
        """The script has ended without :meth:`close`: what was captured for durable storage still gets there,
        where all ranks have captured it."""
        with contextlib.suppress(CheckpointError), _worker.section("checkpoint"):
            self._tier.wait()
            self._await_disk(WRITING_SECONDS)
