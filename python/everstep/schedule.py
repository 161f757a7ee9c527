"""Decides when a step is due for durable storage: by the clock, or by what checkpoints cost
(CheckFreq §4.2, §4.3)."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from os import PathLike
from typing import Any, Protocol

from torch.utils.data.distributed import DistributedSampler

from ._internal import CheckpointError, Rate, recall, remember, snapshot_interval
from .data import ElasticDistributedSampler, ElasticIterable
from .data.cursor import Cursor

#: Objects that begin the next epoch at the same step on all ranks.
_SAMPLERS = (DistributedSampler, ElasticDistributedSampler, ElasticIterable, Cursor)
#: Default part of the training time that snapshots, and durable checkpoints, may cost.
STALL_BUDGET = 0.01
#: Seconds per memory snapshot for which no step is skipped then.
FREE_STALL = 0.0005
#: Part of the time in which ``persist="auto"`` uses storage if each step is in memory anyway.
STORAGE_SHARE = 0.05
#: Seconds after which a durable checkpoint that was not announced is requested again.
ASK_AGAIN = 60.0
#: Seconds that a user's save waits for a slot of memory while nothing is known to be on its way to
#: storage.
SLOT_SECONDS = 60
#: Seconds for which a checkpoint is waited for: another rank may have lost its part of it, which
#: only that rank knows.
WRITING_SECONDS = 600.0
#: Seconds after which a profile of slow steps ends, with at least three of them.
PROFILE_SECONDS = 120.0
#: Number of snapshots, and of steps, that are measured before the interval changes.
LOOK = 9
#: The same once snapshots are several steps apart.
LOOK_AGAIN = 3
#: Share of the budget that is planned for: later snapshots may take longer than those measured.
PLANNED = 0.65
#: A snapshot pushes the state out of the caches, which delays the next update: nanoseconds per
#: byte for what a core's own cache holds (the first number of bytes), nanoseconds per byte for what
#: only the shared cache holds, and the most bytes that both hold. An estimate, as hosts differ;
#: figure small-step-cost compares it with paired measurements.
REFILL_OWN, OWN_BYTES = 0.03, 2_000_000
REFILL_SHARED, REFILL_MAX = 0.02, 23_000_000
#: The file beside the checkpoints that keeps measurements and choice (C7); `everstep ckpt show`
#: reads it.
FILE = "everstep-frequency.json"


def passes(last: int, step: int, every: int) -> bool:
    """Returns whether a multiple of ``every`` was reached since the step before: a script may count
    several optimizer steps between two calls."""
    return step // every > last // every


class Epochs:
    """Notices when an epoch ends: when an object's ``epoch`` is another one than a step before.

    All ranks must notice it at the same step. Unless the state is ``alike`` on all ranks, an object
    of the user may count the epochs of its rank's own data, so only samplers count.
    """

    def __init__(self, objects: Iterable[Any], *, alike: bool) -> None:
        counted = [o for o in objects if isinstance(getattr(o, "epoch", None), int)]
        self._objects = [o for o in counted if alike or isinstance(o, _SAMPLERS)]
        self._last: list[int] | None = None

    def _now(self) -> list[int]:
        return [o.epoch for o in self._objects]

    def restored(self) -> None:
        """Records a restored step: the next one may end an epoch."""
        self._last = self._now()

    def ended(self) -> bool:
        """Returns whether this step has ended an epoch. Called once for each step."""
        last, self._last = self._last, self._now()
        return last is not None and last != self._last


class Source(Protocol):
    """Decides, on one rank, when a checkpoint is due. :meth:`stepped` is called first at each
    step."""

    def stepped(self, durable: int, held_up: bool) -> None:
        """Records a completed step; the newest durable one is ``durable``. ``held_up``: something
        else was done meanwhile (:func:`everstep.section`)."""

    def steps_left(self) -> int:
        """Returns an estimate of the steps until the next checkpoint is due; 0: after this one."""

    def begins(self, step: int, at: float) -> None:
        """Records that the checkpoint of this step began at the monotonic time ``at``."""

    def failed(self, step: int) -> None:
        """Records that the checkpoint of this step was lost."""

    def disturbed(self) -> None:
        """Records that something else delays the loop."""

    def close(self) -> None:
        """Records that the job is complete."""


class Clock:
    """A time interval between durable checkpoints."""

    def __init__(self, every: timedelta) -> None:
        self._every = every.total_seconds()
        self._began = self._last = time.monotonic()
        self._steps = 0

    def stepped(self, durable: int, held_up: bool) -> None:
        """Counts a step."""
        if self._steps == 0:
            self._began = time.monotonic()
        self._steps += 1

    def steps_left(self) -> int:
        """Returns half of the steps that are expected until the interval ends, at most those made
        so far, because steps may become slower. 0 when it has ended."""
        left = self._last + self._every - time.monotonic()
        if left <= 0:
            return 0
        each = (time.monotonic() - self._began) / max(self._steps - 1, 1)
        return max(min(int(left / max(each, 1e-6) / 2), self._steps - 1), 1)

    def begins(self, step: int, at: float) -> None:
        """Begins the next interval."""
        self._last = at

    def failed(self, step: int) -> None:
        """Does nothing: the next checkpoint is made when its time comes."""

    def disturbed(self) -> None:
        """Does nothing: the interval is one of time."""

    def close(self) -> None:
        """Does nothing: no measurements are kept."""


def _makes_sense(kept: dict[str, Any]) -> bool:
    """Returns False for measurements that were edited or damaged; they are then taken again."""
    seconds, failures = kept.get("seconds", 0.0), kept.get("failures", 0)
    return (
        isinstance(seconds, (int, float))
        and 0 <= seconds < math.inf
        and isinstance(failures, int)
        and failures >= 0
        and isinstance(kept.get("closed", True), bool)
    )


class Measured:
    """Makes checkpoints as often as the budget allows, from what they are seen to cost.

    Args:
        budget: part of the loop's time that checkpoints may cost.
        share: part of the time in which they may use storage.
        directory: of the checkpoints, where measurements are kept (``FILE``) for the next life of
            the job.
    """

    def __init__(self, budget: float, share: float, directory: str | PathLike[str]) -> None:
        self._budget, self._directory = budget, directory
        kept = self._kept()
        self._rate = Rate(budget, share, json.dumps(kept["rate"]) if "rate" in kept else None)
        self._ran, self._failures = kept.get("seconds", 0.0), kept.get("failures", 0)
        if kept and not kept.get("closed", True):
            # The job that wrote it last did not end properly.
            self._failures += 1
        if self._failures and self._ran:
            self._rate.failures(self._ran / self._failures)
        self._start = self._profiling_since = time.monotonic()
        self._profile: list[float] | None = [] if self._rate.every() is None else None
        self._before: float | None = None
        self._writing: tuple[int, float] | None = None

    def _kept(self) -> dict[str, Any]:
        try:
            kept = json.loads(recall(self._directory, FILE) or b"{}")
        except (CheckpointError, ValueError):
            return {}
        return kept if isinstance(kept, dict) and _makes_sense(kept) else {}

    def stepped(self, durable: int, held_up: bool) -> None:
        """Records the time since the step before."""
        now = time.monotonic()
        quiet = self._writing is None
        if held_up:
            self._rate.passed()
        elif self._before is not None:
            self._rate.step(now - self._before, quiet)
            if quiet and self._profile is not None:
                self._learn(self._profile, now - self._before, now)
        self._before = now
        if self._writing is not None and durable >= self._writing[0]:
            self._rate.written(now - self._writing[1])
            self._writing = None
        elif self._writing is not None and now - self._writing[1] > WRITING_SECONDS:
            self.failed(self._writing[0])

    def _learn(self, profile: list[float], seconds: float, now: float) -> None:
        profile.append(seconds)
        slow = len(profile) >= 3 and now - self._profiling_since > PROFILE_SECONDS
        if len(profile) >= Rate.profiled(None) or slow:
            self._rate.profile(profile)
            self._profile = None

    def steps_left(self) -> int:
        """Returns the steps until the next checkpoint; 0 only once the last one is written, because
        two never overlap."""
        left = self._rate.left()
        if left is None:
            return 1
        return max(left, 1) if self._writing is not None else left

    def begins(self, step: int, at: float) -> None:
        """Ends the interval before this checkpoint and begins the next one."""
        if self._writing is not None:
            # This one was requested early.
            self._rate.disturbed()
        self._rate.begins()
        self._writing = (step, at)
        self._keep(closed=False)

    def failed(self, step: int) -> None:
        """Stops waiting for this checkpoint, so that the next one may begin."""
        if self._writing is not None and self._writing[0] == step:
            self._writing = None
            self._rate.disturbed()

    def disturbed(self) -> None:
        """Marks this interval as not representative."""
        self._rate.disturbed()

    def close(self) -> None:
        """Records that the job ended without a failure."""
        self._keep(closed=True)

    def why(self) -> str:
        """Describes the choice, for users."""
        measured, chosen = self._rate.measured(), self._rate.every()
        step, cost, occupied = measured.iteration, measured.cost, measured.occupied
        if chosen is None or step is None or cost is None:
            return "not measured yet"
        every, bound = chosen
        spent = cost / (every * step) if step else 0.0
        stored = "" if occupied is None else f", {occupied:.2f} s on its way to storage"
        return (
            f"every {every} steps ({bound}): a step takes {step:.3f} s, a checkpoint costs {cost:.3f} s{stored}: "
            f"{spent:.1%} of the time, the budget is {self._budget:.1%}"
        )

    def _keep(self, *, closed: bool) -> None:
        chosen = self._rate.every()
        seconds = self._ran + time.monotonic() - self._start
        kept = {"everstep": 1, "every": chosen[0] if chosen else None, "why": self.why(), "seconds": seconds, "failures": self._failures,
                "closed": closed, "rate": json.loads(self._rate.keep())}  # fmt: skip
        # If this fails, the next life measures again.
        with contextlib.suppress(CheckpointError):
            remember(self._directory, FILE, (json.dumps(kept, indent=1) + "\n").encode(), closed)


def source_of(
    persist: int | timedelta | str, budget: float, share: float, directory: str | PathLike[str]
) -> Source | None:
    """Returns what decides when a durable checkpoint is due; ``None`` if the step number does."""
    if isinstance(persist, int):
        return None
    return Clock(persist) if isinstance(persist, timedelta) else Measured(budget, share, directory)


def refill(size: int) -> int:
    """Returns the nanoseconds that the loop loses after a snapshot of ``size`` bytes because the
    caches must be refilled."""
    size = min(size, REFILL_MAX)
    return int(REFILL_OWN * min(size, OWN_BYTES) + REFILL_SHARED * max(size - OWN_BYTES, 0))


class Snapshots:
    """Chooses which steps go into memory: each one, if that costs the loop no more than the budget;
    else every k-th. The interval grows and shrinks. Measured on one rank and announced to all
    (:meth:`AgentTier.ask_for_every`).

    Args:
        budget: part of the loop's time that snapshots may cost.
        free: seconds per snapshot that are always accepted.
    """

    def __init__(self, budget: float, free: float) -> None:
        self._budget, self._free = budget, free
        self._stalls: deque[float] = deque(maxlen=LOOK)
        self._steps: deque[float] = deque(maxlen=LOOK)
        self._before: float | None = None
        self._stall = 0.0
        self._every = 1

    def stalled(self, seconds: float, *, begins: bool) -> None:
        """Records a delay by a snapshot, which has just begun or was waited for."""
        if begins and self._stall:
            self._stalls.append(self._stall)
            self._stall = 0.0
        self._stall += seconds

    def stepped(self, stalled: float, held_up: bool) -> int | None:
        """Records a completed step, ``stalled`` seconds of it for snapshots. Returns the interval
        in steps when it changes."""
        now = time.monotonic()
        if self._before is not None and not held_up:
            self._steps.append(max(now - self._before - stalled, 0.0))
        self._before = now
        # Far apart, snapshots cost more, because caches are cold: the first choice is reviewed
        # soon.
        if len(self._stalls) < (LOOK if self._every == 1 else LOOK_AGAIN) or len(self._steps) < LOOK:
            return None
        # The budget is for all of them together: the mean counts, without the longest, which
        # something else may have delayed.
        stall = (
            statistics.median(self._stalls) if len(self._stalls) < LOOK else sum(sorted(self._stalls)[:-1]) / (LOOK - 1)
        )
        step = statistics.median(self._steps)
        every = 1 if stall <= self._free else snapshot_interval(stall, step, self._budget * PLANNED)
        # An interval that is too short is corrected at once, one that is slightly too long is kept.
        if self._every - self._every // 5 <= every <= self._every:
            return None
        self._stalls.clear()
        self._every = every
        return every


class Appointments:
    """The clock for ranks without an agent, where all ranks make a checkpoint together.

    Time passes differently on each rank. All follow rank 0, and agree only at steps that they know
    beforehand: each time, rank 0 announces that the step is due, or the later step at which to ask
    again.

    Args:
        source: on rank 0.
        agree: takes a value and returns that of rank 0, on all ranks.
    """

    def __init__(self, source: Source | None, agree: Callable[[int], int]) -> None:
        self._source, self._agree = source, agree
        self._ask_at: int | None = None

    def due(self, step: int) -> bool:
        """Returns whether ``step`` is due. All ranks must call it at each step."""
        if self._ask_at is None:
            self._ask_at = step + 1
        if step < self._ask_at:
            return False
        wait = self._agree(self._source.steps_left() if self._source else 1)
        # After a checkpoint, the next step is checked, because the length of the interval is not
        # known here.
        self._ask_at = step + max(wait, 1)
        return wait == 0
