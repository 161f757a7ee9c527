"""What became of checkpoints: which tier has which step for certain, and what failed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ._internal import CheckpointError

Tier = Literal["local", "peer", "disk"]


@dataclass(frozen=True)
class Outcome:
    """The result of :meth:`CheckpointManager.step`.

    Attributes:
        should_stop: the job is stopping; this step is the last one.
        saved: tiers in which a newer step is complete than at the previous ``step()``: ``"local"``
            once its slot of memory is sealed, ``"disk"`` once it is published and synced. Work
            beside the training (overlapped copies, the agent's writing to storage) is reported by
            the later ``step()`` at which it is known to be complete; :attr:`steps` names the step.
        steps: the newest complete step in each tier, of those that this process captured.
        failed: a sentence for each checkpoint that was lost since the previous ``step()``. Training
            continues, and earlier checkpoints stay.
    """

    should_stop: bool = False
    saved: frozenset[Tier] = field(default_factory=frozenset)
    steps: Mapping[Tier, int] = field(default_factory=dict)
    failed: tuple[str, ...] = ()


class Arrivals:
    """Collects what has become complete and what has failed between two calls of ``step()``."""

    def __init__(self) -> None:
        self._saved: set[Tier] = set()
        self._steps: dict[Tier, int] = {}
        self._failed: list[str] = []
        #: Steps that failed since :meth:`taken`, for the schedule of durable checkpoints.
        self.lost: list[int] = []

    def sealed(self, step: int) -> None:
        """Records that the step is in memory."""
        self._arrived("local", step)

    def durable(self, step: int) -> None:
        """Records that the step is on durable storage."""
        if step > self._steps.get("disk", 0):
            self._arrived("disk", step)

    def _arrived(self, tier: Tier, step: int) -> None:
        self._saved.add(tier)
        self._steps = {**self._steps, tier: step}

    def failed(self, why: str, step: int, *, reported: bool = False) -> None:
        """Records a lost checkpoint. ``reported``: the user has been warned already."""
        self._failed.append(why)
        self.lost.append(step)
        if not reported:
            warnings.warn(f"everstep: {why}", stacklevel=5)

    def raise_lost(self) -> None:
        """Raises if a checkpoint was lost, for a save that is to succeed or fail at once.

        Raises:
            CheckpointError: with the cause.
        """
        if self.lost:
            why = self._failed[-1]
            self.lost.clear()
            raise CheckpointError(why)

    def taken(self, should_stop: bool) -> Outcome:
        """Returns the outcome of a step and begins the next one."""
        outcome = Outcome(should_stop, frozenset(self._saved), self._steps, tuple(self._failed))
        self._saved.clear()
        self._failed.clear()
        self.lost.clear()
        return outcome
