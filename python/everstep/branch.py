"""Which branch of a run training is in: what it went back to, what it goes on from, and where it goes on after a restart."""

from __future__ import annotations

import operator
import os
import sys
from dataclasses import dataclass

from . import worker as _worker
from ._internal import CheckpointError, asked_before, begin_branch, list_checkpoints, list_line
from .directory import Directory

#: The highest number of a step: it fits into the words that workers and agents share, together with a distance.
STEP_MAX = 1 << 40
#: A checkpoint: step, path, number of ranks, what is wrong with it.
Row = tuple[int, str, int | None, str | None]


#: Limit on the steps that the error for a missing step lists.
NAMED_MAX = 10


@dataclass(frozen=True)
class Wanted:
    """Which steps may be restored."""

    #: Exactly this one.
    step: int | None = None
    #: None before this one: the script went back to it in an earlier life of this job, and what it wants is what came of that.
    since: int = 0

    def allows(self, step: int) -> bool:
        """Whether this step may be restored."""
        return step >= self.since if self.step is None else step == self.step


class Branch:
    """The branch that one process trains in. The native half decides (``lineage.rs``), and records it in the directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        #: What training goes on from: the step, its path if it is durable, whether the user named it; ``None`` once that is recorded.
        self._origin: tuple[int, str | None, bool] | None = (0, None, False)

    def wanted(self, step: int | None) -> Wanted:
        """What ``restore(step)`` asks for. If the job went back to this step in an earlier life, which the script does not know, the
        newest step since then; the step itself may have been pruned by now."""
        if step is None:
            return Wanted()
        restarted = _worker.world().attempt > 0 or os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
        again = asked_before(self._directory, self._directory.mark(), restarted) == step
        return Wanted(since=step) if again else Wanted(step)

    def rows(self, wanted: Wanted) -> list[Row]:
        """What may be restored, newest first: the branch that ran last; or the step that is wanted, of that branch if it has it."""
        line = [r for r in list_line(self._directory) if wanted.allows(r[0])]
        if wanted.step is None:
            return line
        return [r for r in line if r[3] is None] or [
            r for r in list_checkpoints(self._directory) if r[0] == wanted.step
        ]

    def goes_on_from(self, step: int, path: str | None, asked: bool) -> None:
        """This was restored (0: nothing), from this path or from memory."""
        self._origin = (step, path, asked)

    def trains(self, step: int) -> None:
        """A step is complete: from now on this branch is the one that ran last, also before anything of it is durable.

        Raises:
            ValueError: when ``step`` is no number of steps.
            CheckpointError: when it cannot be recorded.
        """
        if isinstance(step, bool) or not 0 <= operator.index(step) <= STEP_MAX:
            raise ValueError(
                f"step {step!r}: give the number of optimizer steps completed, an integer from 0 to {STEP_MAX}"
            )
        if self._origin is not None and _worker.world().rank == 0:
            begin_branch(self._directory, self._directory.mark(), *self._origin)
        self._origin = None

    def announce(self, wanted: Wanted, done: int) -> None:
        """One line where the script has asked for a step again, and goes on with what came of it."""
        if wanted.since and _worker.world().rank == 0:
            print(
                f"everstep: restore(step={wanted.since}) was done before in this job; continuing in its branch at step {done}",
                file=sys.stderr,
                flush=True,
            )

    def refuse_silent_restart(self, unreadable: list[str], some_rank_found: bool, wanted: Wanted) -> None:
        """Starting from scratch beside checkpoints that cannot be read would bury them. One that only some ranks can
        read, or find (a listing may be stale), is such a checkpoint.

        Raises:
            CheckpointError: when a step was named, or some rank has found checkpoints.
        """
        if wanted != Wanted():
            raise CheckpointError(self._missing(wanted))
        if unreadable or some_rank_found:
            by = "" if _worker.world().world_size == 1 else " by every rank"
            remedy = "repair or move them" if unreadable else "check that all nodes see the same files there"
            what = (
                f"no checkpoint in {self._directory} can be read{by}, and starting over would bury them; {remedy}, "
                "or give another directory"
            )
            raise CheckpointError("\n  ".join([what + ":" * bool(unreadable), *unreadable[:5]]))
        self.goes_on_from(0, None, False)

    def _missing(self, wanted: Wanted) -> str:
        there = sorted({step for step, _, _, wrong in list_checkpoints(self._directory) if wrong is None})
        named = ", ".join(str(step) for step in there[-NAMED_MAX:]) or "none"
        what = f"step {wanted.step}" if wanted.step is not None else f"step {wanted.since} or a later one"
        more = ", and earlier ones" if len(there) > NAMED_MAX else ""
        return f"{what} cannot be restored on every rank from {self._directory}; steps that are there: {named}{more}"
