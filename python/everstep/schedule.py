"""When a step is due for durable storage."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta


class Clock:
    """A span of time between durable checkpoints."""

    def __init__(self, every: timedelta) -> None:
        self._every = every.total_seconds()
        self._began = self._last = time.monotonic()
        self._steps = 0

    def stepped(self) -> None:
        """A step is complete."""
        if self._steps == 0:
            self._began = time.monotonic()
        self._steps += 1

    def steps_left(self) -> int:
        """0 when one is due. Half of the way to where the end of the span is expected, and never further ahead than it has
        come: steps may become slower."""
        left = self._last + self._every - time.monotonic()
        if left <= 0:
            return 0
        each = (time.monotonic() - self._began) / max(self._steps - 1, 1)
        return max(min(int(left / max(each, 1e-6) / 2), self._steps - 1), 1)

    def begins(self) -> None:
        """The next span begins."""
        self._last = time.monotonic()


class Appointments:
    """The same clock for ranks without an agent, where a checkpoint is a meeting of all of them.

    Time passes differently on each rank. All follow rank 0, and meet only at steps that they know beforehand: each time it
    says whether the step is due or else at which later step to ask again.

    Args:
        source: on rank 0.
        agree: takes a value and returns that of rank 0, on all ranks.
    """

    def __init__(self, source: Clock | None, agree: Callable[[int], int]) -> None:
        self._source, self._agree = source, agree
        self._ask_at: int | None = None

    def due(self, step: int) -> bool:
        """``step`` is complete; to be called with each one, on all ranks."""
        if self._ask_at is None:
            self._ask_at = step + 1
        if step < self._ask_at:
            return False
        wait = self._agree(self._source.steps_left() if self._source else 1)
        if wait == 0 and self._source:
            self._source.begins()
        # After a checkpoint the next step is asked about, whatever the interval: its length is not known here.
        self._ask_at = step + max(wait, 1)
        return wait == 0
