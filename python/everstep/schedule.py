"""When a step is due for durable storage: by the clock, or by what checkpoints cost (CheckFreq §4.2, §4.3)."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from os import PathLike
from typing import Any, Protocol

from ._internal import CheckpointError, Rate, recall, remember, snapshot_interval

#: Part of the training time that snapshots, and durable checkpoints, may cost unless the user says otherwise.
STALL_BUDGET = 0.01
#: Then, seconds per memory snapshot that are not worth leaving a step out.
FREE_STALL = 0.0005
#: Part of the time in which ``persist="auto"`` uses storage where memory holds each step anyway.
STORAGE_SHARE = 0.05
#: Seconds after which a durable checkpoint that nobody has announced is asked for again.
ASK_AGAIN = 60.0
#: Seconds that a save which the user asked for waits for a slot of memory while nothing is known to be on its way to storage.
SLOT_SECONDS = 60
#: Seconds after which a checkpoint is not waited for: another rank may have lost its part of it, which is told only there.
WRITING_SECONDS = 600.0
#: A profile of slow steps ends after so many seconds, with at least three of them.
PROFILE_SECONDS = 120.0
#: Snapshots, and steps, that are looked at before something is changed.
LOOK = 9
#: The same once they are some steps apart.
LOOK_AGAIN = 3
#: Share of the budget planned for, from the snapshots looked at: later ones may take longer.
PLANNED = 0.65
#: A snapshot pushes the state out of the caches, which delays the next update: nanoseconds per byte, and the most bytes that caches hold.
#: An estimate: paired measurements (figure small-step-cost) found 30 µs for 1 MB, 0.2 to 0.3 ms for 10 MB, and no more for 50 MB.
REFILL = 0.03
REFILL_MAX = 16_000_000
#: The file beside the checkpoints that keeps measurements and choice (C7); `everstep ckpt show` reads it.
FILE = "everstep-frequency.json"


def passes(last: int, step: int, every: int) -> bool:
    """Whether a multiple of ``every`` was reached since the step before: a script may count several optimizer steps between two calls."""
    return step // every > last // every


class Source(Protocol):
    """Says, on one rank, when a checkpoint is due. :meth:`stepped` comes first at each step."""

    def stepped(self, durable: int, held_up: bool) -> None:
        """A step is complete; the newest durable one is ``durable``. ``held_up``: something else was done meanwhile
        (:func:`everstep.section`)."""

    def steps_left(self) -> int:
        """Steps until the next checkpoint is due, as far as one can tell; 0: after this one."""

    def begins(self, step: int, at: float) -> None:
        """A checkpoint of this step begins, or has begun ``at`` this monotonic time."""

    def failed(self, step: int) -> None:
        """The checkpoint of this step was lost."""

    def disturbed(self) -> None:
        """Something else holds the loop up."""

    def close(self) -> None:
        """The job is done."""


class Clock:
    """A span of time between durable checkpoints."""

    def __init__(self, every: timedelta) -> None:
        self._every = every.total_seconds()
        self._began = self._last = time.monotonic()
        self._steps = 0

    def stepped(self, durable: int, held_up: bool) -> None:
        """One more."""
        if self._steps == 0:
            self._began = time.monotonic()
        self._steps += 1

    def steps_left(self) -> int:
        """Half of the way to where the end of the span is expected, and never further ahead than it has come: steps may
        become slower. 0 when it is over."""
        left = self._last + self._every - time.monotonic()
        if left <= 0:
            return 0
        each = (time.monotonic() - self._began) / max(self._steps - 1, 1)
        return max(min(int(left / max(each, 1e-6) / 2), self._steps - 1), 1)

    def begins(self, step: int, at: float) -> None:
        """The next span begins."""
        self._last = at

    def failed(self, step: int) -> None:
        """The next one comes when its time has come."""

    def disturbed(self) -> None:
        """Time passes all the same."""

    def close(self) -> None:
        """Nothing is kept."""


def _makes_sense(kept: dict[str, Any]) -> bool:
    """Measurements that somebody has edited or damaged are none: they are taken again."""
    seconds, failures = kept.get("seconds", 0.0), kept.get("failures", 0)
    return (
        isinstance(seconds, (int, float))
        and 0 <= seconds < math.inf
        and isinstance(failures, int)
        and failures >= 0
        and isinstance(kept.get("closed", True), bool)
    )


class Measured:
    """As often as the budget allows, from what checkpoints are seen to cost.

    Args:
        budget: part of the loop's time that checkpoints may cost.
        share: part of the time in which they may use storage.
        directory: of the checkpoints, where measurements are kept (``FILE``); a job that starts again goes on with them.
    """

    def __init__(self, budget: float, share: float, directory: str | PathLike[str]) -> None:
        self._budget, self._directory = budget, directory
        kept = self._kept()
        self._rate = Rate(budget, share, json.dumps(kept["rate"]) if "rate" in kept else None)
        self._ran, self._failures = kept.get("seconds", 0.0), kept.get("failures", 0)
        if kept and not kept.get("closed", True):
            # Whoever wrote it last did not come to its end.
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
        """Takes the time since the step before."""
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
        """0 only where the last checkpoint is written: one does not begin before."""
        left = self._rate.left()
        if left is None:
            return 1
        return max(left, 1) if self._writing is not None else left

    def begins(self, step: int, at: float) -> None:
        """The interval before it is over and has said what it can."""
        if self._writing is not None:
            # Somebody wanted this one early.
            self._rate.disturbed()
        self._rate.begins()
        self._writing = (step, at)
        self._keep(closed=False)

    def failed(self, step: int) -> None:
        """Nobody waits for it any longer: the next one may begin."""
        if self._writing is not None and self._writing[0] == step:
            self._writing = None
            self._rate.disturbed()

    def disturbed(self) -> None:
        """What this interval takes says nothing about checkpoints."""
        self._rate.disturbed()

    def close(self) -> None:
        """The job came to its end: nothing failed."""
        self._keep(closed=True)

    def why(self) -> str:
        """What was chosen, for people."""
        (step, cost, occupied), chosen = self._rate.measured(), self._rate.every()
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
        # Without it the next life measures again.
        with contextlib.suppress(CheckpointError):
            remember(self._directory, FILE, (json.dumps(kept, indent=1) + "\n").encode(), closed)


def source_of(
    persist: int | timedelta | str, budget: float, share: float, directory: str | PathLike[str]
) -> Source | None:
    """Says when a durable checkpoint is due, unless the number of the step does."""
    if isinstance(persist, int):
        return None
    return Clock(persist) if isinstance(persist, timedelta) else Measured(budget, share, directory)


def refill(size: int) -> int:
    """Nanoseconds that the loop loses after a snapshot of ``size`` bytes because the caches must be filled again."""
    return int(REFILL * min(size, REFILL_MAX))


class Snapshots:
    """Which steps go into memory: each one, as long as that costs the loop no more than the budget; else every k-th, in both
    directions. Measured on one rank, told to all (:meth:`AgentTier.ask_for_every`).

    Args:
        budget: part of the loop's time that snapshots may cost.
        free: seconds per snapshot that nobody minds.
    """

    def __init__(self, budget: float, free: float) -> None:
        self._budget, self._free = budget, free
        self._stalls: deque[float] = deque(maxlen=LOOK)
        self._steps: deque[float] = deque(maxlen=LOOK)
        self._before: float | None = None
        self._stall = 0.0
        self._every = 1

    def stalled(self, seconds: float, *, begins: bool) -> None:
        """The loop was held up by a snapshot, which began just now or was waited for."""
        if begins and self._stall:
            self._stalls.append(self._stall)
            self._stall = 0.0
        self._stall += seconds

    def stepped(self, stalled: float, held_up: bool) -> int | None:
        """A step is complete, ``stalled`` of it for snapshots. Says how many steps apart they should be when that changes."""
        now = time.monotonic()
        if self._before is not None and not held_up:
            self._steps.append(max(now - self._before - stalled, 0.0))
        self._before = now
        # Far apart they cost more than one behind the other, as caches are cold: a first choice is looked at again soon.
        if len(self._stalls) < (LOOK if self._every == 1 else LOOK_AGAIN) or len(self._steps) < LOOK:
            return None
        # The budget is for all of them together: the mean counts, without the one that something else held up.
        stall = (
            statistics.median(self._stalls) if len(self._stalls) < LOOK else sum(sorted(self._stalls)[:-1]) / (LOOK - 1)
        )
        step = sorted(self._steps)[LOOK // 2]
        every = 1 if stall <= self._free else snapshot_interval(stall, step, self._budget * PLANNED)
        # Too often is put right at once, a little too seldom is left as it is.
        if self._every - self._every // 5 <= every <= self._every:
            return None
        self._stalls.clear()
        self._every = every
        return every


class Appointments:
    """The same clock for ranks without an agent, where a checkpoint is a meeting of all of them.

    Time passes differently on each rank. All follow rank 0, and meet only at steps that they know beforehand: each time it
    says whether the step is due or else at which later step to ask again.

    Args:
        source: on rank 0.
        agree: takes a value and returns that of rank 0, on all ranks.
    """

    def __init__(self, source: Source | None, agree: Callable[[int], int]) -> None:
        self._source, self._agree = source, agree
        self._ask_at: int | None = None

    def due(self, step: int) -> bool:
        """``step`` is complete; to be called with each one, on all ranks."""
        if self._ask_at is None:
            self._ask_at = step + 1
        if step < self._ask_at:
            return False
        wait = self._agree(self._source.steps_left() if self._source else 1)
        # After a checkpoint the next step is asked about, whatever the interval: its length is not known here.
        self._ask_at = step + max(wait, 1)
        return wait == 0
