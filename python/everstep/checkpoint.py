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

from . import options, schedule
from . import worker as _worker
from ._internal import AgentError, CheckpointError, list_line
from .agent_tier import AgentTier
from .batch_shares import BatchPlan, batch_plan
from .batches import watch_forward
from .branch import Branch
from .directory import Directory
from .disk_tier import DiskTier
from .micro_batches import MicroBatches
from .outcome import Arrivals, Outcome, Tier
from .replicated import is_replicated
from .restoring import Restoring
from .slots import OVERLAP_BYTES, Snapshot
from .start import Start
from .state import Layout, State
from .structure import Structure
from .tiers import EPOCH, RECOVERY, USER, Keep, Redundancy, TierOptions
from .unsaved import UnsavedOptimizers

Every = int | Literal["auto"]
Persist = int | timedelta | Literal["auto"]


class CheckpointManager:
    """Tiered checkpoints of Stateful objects; all ranks resume from the same step.

    Under ``everstep run``, each step's state is copied into this node's memory, where it outlives
    the worker and the agent, and from there to ``directory`` when a durable checkpoint is due.
    Outside ``everstep run``, only ``directory`` is written.

    Args:
        directory: where durable checkpoints are stored: a path that all ranks share, or a prefix in
            an object store (``s3://bucket/prefix``, ``gs://…``, ``az://…``; keys and endpoints as
            the providers' own tools read them from the environment).
        every: steps between memory snapshots. ``"auto"``: each step, or, if that would delay the
            loop by more than ``stall_budget``, every k-th.
        persist: steps or time between durable checkpoints. ``"auto"`` measures their cost, stays
            within ``stall_budget``, never begins one before the last one is written, and gives its
            reason in ``everstep ckpt show``. :meth:`close` makes the last step durable. 0: no
            durable checkpoints.
        stall_budget: share of the training time that each ``"auto"`` may use in total: collecting,
            encoding, copying and waiting. Default: 1 %. Memory snapshots of up to half a millisecond
            are taken at every step, however short the steps are.
        replicas: number of copies of each step in other nodes' memory. ``"4+2"`` keeps parity
            instead: any two of six nodes may be lost, and each node stores half a shard instead of
            two. Ranks with the same state (DDP) are already copies of each other, and a single node
            makes no copies.
        pacing: send copies to other nodes while the training network is idle (20 steps are profiled
            first), and less often if that is too short. Without it, they are sent at once, beside
            the traffic of training.
        keep: number of the newest durable checkpoints to keep (at least 2).
        keep_every: also keep the first checkpoint of each period of this length.
        keep_epochs: make a durable checkpoint when an epoch ends (anything in ``state`` with an
            ``epoch``), and keep it.
        persist_bandwidth: limit on the bytes per second and rank that go to ``directory``; 0 for
            none.
        overlap: copy parameters while the next iteration computes (the next weight update waits for
            the copy) instead of before :meth:`step` returns, which then only takes a checksum.
            ``"auto"`` overlaps large states only. If a script writes to its weights in between (an
            evaluation with averaged weights, for example), the checksum detects it and one snapshot
            is lost; from then on copies are complete when :meth:`step` returns.
        replicated: every rank holds the same state, so that any rank can restore any other's and
            the number of ranks may change. ``"auto"``: when DDP synchronizes every trainable
            parameter and every saved buffer of the modules, and no other object may be each rank's
            own (your data reader may be; torch's schedulers and everstep's samplers are not).
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
        self._persist = options.durable_interval(persist)
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
        #: A step was completed here, or restored from memory, so :meth:`close` may have to make it
        #: durable.
        self._unsaved = False
        #: An exception that was being handled already, if any.
        self._handled = id(sys.exc_info()[1])
        self._branch = Branch(self._directory)
        self._snapshot_step = self._persisted_step = self._persist_lost = 0
        self._worker = _worker.current()
        self._directory.prepare()
        durable = bool(self._persist)
        rules, redundancy = Keep(keep, keep_every, keep_epochs), Redundancy.of(replicas)
        self._tier = self._make_tier(TierOptions(rules, durable, same, redundancy, bandwidth, pacing))
        early = self._tier if isinstance(self._tier, AgentTier) and overlap is not True else None
        self._start, self._structure = Start(self._directory, self._tier), Structure(self._state, early)
        self._schedule(stall_budget, first=world.rank == 0)
        self._stalled, self._refill, self._sections, self._failures, self._capture_failed = 0.0, 0, 0, 0, -1
        self._asked: float | None = None
        self._retake: tuple[int | None] | None = None
        epochs = state.values() if keep_epochs and durable else ()
        self._epochs = schedule.Epochs(epochs, alike=same or world.world_size == 1)
        self._micro = MicroBatches(state)
        watch_forward(state)
        UnsavedOptimizers(self._state)
        for optimizer in self._state.optimizers:
            optimizer.register_step_pre_hook(self._fence)

    def _make_tier(self, options: TierOptions) -> AgentTier | DiskTier:
        agent, board = self._worker.agent, self._worker.board
        if agent is None or board is None:
            return DiskTier(self._directory, options.keep, self._arrivals)
        self._worker.managed = True
        board.role = self._state.role()
        return AgentTier(agent, board, self._directory, options, self._arrivals)

    def _schedule(self, stall_budget: float | None, *, first: bool) -> None:
        """Sets up what decides when steps are saved; the ``first`` rank measures for all."""
        persist, in_memory = self._persist, self._tier.in_memory
        budget = schedule.STALL_BUDGET if stall_budget is None else stall_budget
        share = schedule.STORAGE_SHARE if in_memory else 1.0
        self._due = schedule.source_of(persist, budget, share, self._directory) if first else None
        free = schedule.FREE_STALL if stall_budget is None else 0.0
        measures = first and self._every is None and in_memory
        self._snapshots = schedule.Snapshots(budget, free) if measures else None
        self._appointments = (
            schedule.Appointments(self._due, self._tier.agree)
            if isinstance(self._tier, DiskTier) and not isinstance(persist, int)
            else None
        )

    def _fence(self, *_: Any) -> None:
        """Waits until the snapshot in progress is complete; a weight update would tear it."""
        self._state.updated = True
        began = time.perf_counter_ns()
        self._tier.fence()
        self._stall(time.perf_counter_ns() - began, begins=False)

    def restore(self, step: int | None = None) -> int:
        """Loads the newest step that every rank can restore, from the nearest tier.

        Returns the number of steps completed, 0 for a fresh start. Call it once, before the loop,
        on all ranks.

        Args:
            step: go back to this step; later steps stay, as another branch. A restart continues on
                the new one.

        Raises:
            CheckpointError: when there are checkpoints but none can be read, or they are of another
                model (the text shows the differences).
        """
        with _worker.section("restore"):
            wanted = self._branch.wanted(step)
            done, self.extra = Restoring(self._state, self._tier, self._directory, self._branch).restore(wanted)
            self._extra = self.extra
        self._branch.announce(wanted, done)
        self._step, self._unsaved = done, done > 0 and self._tier.source() != "disk"
        self._state.updated = False
        self._start.restored(done)
        self._epochs.restored()
        for optimizer in self._state.optimizers:
            _worker.watch_gradients(optimizer)
        self._worker.restored(done)
        self._tier.started()
        return done

    def latest_step(self, tier: Tier | None = None) -> int | None:
        """Returns the newest step in ``tier`` (``"local"`` memory, ``"peer"`` memory of other
        nodes, ``"disk"``), as far as this rank can tell."""
        steps: list[int] = []
        if tier in (None, "local"):
            steps += self._tier.held()
        if tier == "peer" and (replicated := self._tier.replicated()):
            steps.append(replicated)
        if tier in (None, "disk"):
            steps += [row.step for row in list_line(self._directory) if row.wrong is None]
        return max(steps, default=None)

    def step(self, step: int, **extra: Any) -> Outcome:
        """Records a completed step; call it once at the end of each optimizer step, on all ranks.

        Args:
            step: number of optimizer steps completed (as :meth:`restore` returns it).
            **extra: small values kept with this step; after a restore they are in :attr:`extra`.
        """
        if self._step is not None and step <= self._step:
            raise ValueError(
                f"step({step}) was called after step {self._step}: pass the number of completed steps, which must increase"
            )
        began = time.perf_counter_ns()
        self._start.writing(bool(self._persist))
        self._branch.trains(step)
        self._tier.trains()
        before, self._step, self._extra = (step - 1 if self._step is None else self._step), step, extra
        self._unsaved, self._state.updated = True, False
        self._look()
        self._measure()
        hold = (at := self._tier.hold_at()) is not None and before < at <= step
        persist = self._persist_why(before, step, hold)
        every = self._tier.every(step) if self._every is None else self._every
        due = (schedule.passes(before, step, every) and self._tier.in_memory) or self._tier.lost(surely=False)
        if self._retake is not None:
            due, (lost,), self._retake = True, self._retake, None
            persist = lost if persist is None else persist
        snapshot = (persist is not None or due or hold) and self._snapshot(step, extra, persist)
        if persist is not None and not snapshot and self._capture_failed != step:
            # It was announced: storage that is slower than the schedule delays the loop.
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
        """Collects which earlier snapshots are durable and which were lost."""
        if self._tier.in_memory:
            if durable := self._tier.durable():
                self._arrivals.durable(durable)
                if durable >= self._persisted_step:
                    self._worker.unfinished.discard(self)
            if (failed := self._tier.failed_persist(self._failures)) is not None:
                self._failures = failed.count
                self._arrivals.failed(failed.why, failed.step, reported=True)
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
                # Other ranks, some of which made this step durable, do not repeat it.
                self._retake = (RECOVERY if _worker.world().world_size == 1 and step == self._persisted_step else None,)
        self._arrivals.lost.clear()

    def _measure(self) -> None:
        """Records the time of a completed step for the schedules."""
        held_up, self._sections = self._worker.entered != self._sections, self._worker.entered
        if self._due is not None:
            self._due.stepped(self._tier.durable(), held_up)
        if self._snapshots is not None:
            every = self._snapshots.stepped(self._stalled, held_up)
            self._stalled = 0.0
            if every is not None:
                self._tier.ask_for_every(every)

    def _stall(self, nanos: int, *, begins: bool, after: int = 0) -> None:
        """Records that a snapshot delayed the loop, and will by ``after`` more later."""
        if self._worker.board is not None:
            add = self._worker.board.add_blocking if begins else self._worker.board.add_fence
            add(nanos + after)
        if self._snapshots is not None:
            self._stalled += nanos / 1e9
            self._snapshots.stalled((nanos + after) / 1e9, begins=begins)

    def _hold(self, step: int) -> None:
        """Waits after this step because the world changes, usually until this process is ended."""
        with _worker.section("regroup"):
            self._tier.wait()
            if self._due is not None:
                # The next world continues with these measurements: nothing failed.
                self._due.close()
            while (at := self._tier.hold_at()) is not None and at <= step and not _worker.should_stop():
                time.sleep(0.002)

    def _persist_why(self, last: int, step: int, hold: bool) -> int | None:
        """Returns why this step goes to durable storage, if it does; the same on all ranks."""
        if self._epochs.ended():
            return EPOCH
        return RECOVERY if self._persist_now(last, step) or (hold and bool(self._persist)) else None

    def _persist_now(self, last: int, step: int) -> bool:
        if isinstance(self._persist, int):
            return self._persist > 0 and schedule.passes(last, step, self._persist)
        if self._appointments is not None:
            return self._appointments.due(step)
        return (at := self._tier.persist_at()) is not None and last < at <= step

    def _ask_for_persist(self) -> None:
        """Requests a durable checkpoint when one is due; the coordinator names the step."""
        if not self._tier.in_memory or self._due is None or self._due.steps_left():
            return
        if self._asked is None or time.monotonic() - self._asked > schedule.ASK_AGAIN:
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
            self._refill = 0 if snapshot.on_device() else schedule.refill(snapshot.bytes())
            if persist is not None:
                self._persisted_step, self._asked = step, None
                if self._tier.in_memory:
                    self._worker.unfinished.add(self)
                if self._due is not None:
                    self._due.begins(step, since)
        elif self._worker.board is not None:
            self._worker.board.skip_snapshot()
        return done

    def _captured(self, snapshot: Snapshot) -> bool:
        try:
            return self._tier.capture(snapshot)
        except (CheckpointError, AgentError) as e:
            # A job that cannot make its first snapshot is set up wrongly; one that has made some
            # continues.
            if not self._tier.in_memory or not self._snapshot_step or snapshot.persist == USER:
                raise
            self._arrivals.failed(f"the snapshot of step {snapshot.step} failed: {e}", snapshot.step)
            self._capture_failed = snapshot.step
            return False

    def _copies_late(self, snapshot: Snapshot) -> bool:
        """Returns whether the copy may continue while the next iteration computes."""
        late = self._overlap if self._overlap != "auto" else snapshot.bytes() > OVERLAP_BYTES or snapshot.on_device()
        return late if self._tier.copies_late and self._state.optimizers else snapshot.on_device()

    def steps(self, total: int) -> Iterator[int]:
        """Iterates over the steps that are left: ``for step in ckpt.steps(total): body``.

        Restores unless :meth:`restore` or :meth:`step` was called, calls :meth:`step` after each
        step, stops early when the job is stopping, and makes the last step durable.
        """
        self._worker.handle_signals()
        done = None if self._closed or self._state.updated else self._step
        if done is None:
            done = self.restore()
        self._worker.plan_total(total)
        while done < total:
            yield done
            done += 1
            if self.step(done).should_stop:
                break
        self.close()

    def micro_batches(self, loader: Iterable[Any], *, global_batch: int, micro_batch: int) -> Iterator[Any]:
        """Iterates over this rank's micro-batches of one step: ``for batch in
        ckpt.micro_batches(loader, …): loss(batch).backward()``.

        The global batch has ``global_batch`` samples on any number of ranks, which may have
        different numbers of micro-batches. After the loop, the gradients are those of the mean loss
        over the global batch (each micro-batch's loss being its mean), also under DDP. The loader
        makes batches of ``micro_batch`` with an :class:`everstep.data.ElasticDistributedSampler`,
        or anything else that each rank may draw from at its own pace.
        """
        return self._micro.of_step(loader, batch_plan(global_batch, micro_batch))

    @property
    def plan(self) -> BatchPlan | None:
        """This rank's part of the global batch, once :meth:`micro_batches` was used."""
        return self._micro.plan

    def save(self, step: int | None = None, *, block: bool = True, **extra: Any) -> None:
        """Makes the state durable in the directory now, on all ranks. Such a checkpoint is never
        removed. Without ``step``, it is that of the last :meth:`step`, and refused if the weights
        were updated since."""
        if step is None and self._step is not None and self._state.updated:
            raise CheckpointError(
                f"save(): the weights were updated after step {self._step}; call step() first, or pass the number of steps"
            )
        self._save(step, block, extra or self._extra, USER)

    def _save(self, step: int | None, block: bool, extra: dict[str, Any], why: int) -> None:
        step = self._step if step is None else step
        if step is None:
            raise ValueError("save() before any step: pass the number of completed steps")
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
        """Captures once a slot is free; returns the nanoseconds that it took."""
        began = time.perf_counter_ns()
        with _worker.section("checkpoint"):
            if self._persisted_step > self._tier.durable():
                # The outcome of a later step reports what became of that one.
                with contextlib.suppress(*(() if why == USER else (CheckpointError,))):
                    self._tier.await_durable(self._persisted_step)
            since = time.monotonic()
            while not self._snapshot(step, extra, why) and self._capture_failed != step:
                if time.monotonic() - since > schedule.SLOT_SECONDS:
                    raise CheckpointError(
                        f"step {step} is not saved: all memory slots have been in use for {schedule.SLOT_SECONDS} s; "
                        "check that storage and the other nodes respond"
                    )
                time.sleep(0.01)
        return time.perf_counter_ns() - began

    def wait(self, tier: Tier = "local") -> None:
        """Waits until the last snapshot is complete in memory, in other nodes' memory (``"peer"``),
        or on ``"disk"`` if it goes there."""
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
                f"the checkpoint of step {self._persisted_step} was lost, as reported earlier; call save() to make another one"
            )
        with _worker.section("checkpoint"):
            self._tier.await_durable(self._persisted_step, seconds)

    def close(self) -> None:
        """Makes the last step durable (unless it is already, or with ``persist=0``) and waits for
        what is on its way. A second call does nothing.

        Weights that were updated after the last :meth:`step` belong to no step and are not saved.
        While an exception is handled (``finally``), several ranks do not wait for each other: some
        may not arrive.
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
        """Waits until what was captured for durable storage is written, without :meth:`close`."""
        with contextlib.suppress(CheckpointError), _worker.section("checkpoint"):
            self._tier.wait()
            self._await_disk(schedule.WRITING_SECONDS)
