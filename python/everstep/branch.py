"""The branch of a run that training is on: what it went back to, what it continues from, and where
it continues after a restart."""

from __future__ import annotations

import operator
import os
import sys
from dataclasses import dataclass

from . import worker as _worker
from ._internal import CheckpointError, ListedCheckpoint, asked_before, begin_branch, list_checkpoints, list_line
from .directory import Directory

#: The highest step: it fits into the words that workers and agents share, together with an
#: interval.
STEP_MAX = 1 << 40
#: Limit on the steps that the error for a missing step lists.
NAMED_MAX = 10


@dataclass(frozen=True)
class Wanted:
    """Which steps may be restored."""

    #: Exactly this one.
    step: int | None = None
    #: No step before this one: the script went back to it in an earlier life of this job, and
    #: continues on the branch that began there.
    since: int = 0

    def allows(self, step: int) -> bool:
        """Returns whether this step may be restored."""
        return step >= self.since if self.step is None else step == self.step


class Branch:
    """The branch that one process trains on. The native half decides (``lineage.rs``) and records
    it in the directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        #: What training continues from: the step, its path if it is durable, whether the user named
        #: it; ``None`` once that is recorded.
        self._origin: tuple[int, str | None, bool] | None = (0, None, False)

    def wanted(self, step: int | None) -> Wanted:
        """Returns what ``restore(step)`` asks for: if the job went back to this step in an earlier
        life, which the script does not know, the newest step since then. The step itself may have
        been pruned."""
        if step is None:
            return Wanted()
        restarted = _worker.world().attempt > 0 or os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
        again = asked_before(self._directory, self._directory.mark(), restarted) == step
        return Wanted(since=step) if again else Wanted(step)

    def rows(self, wanted: Wanted) -> tuple[list[ListedCheckpoint], bool]:
        """Lists what may be restored, the newest first: the branch that ran last; or the wanted
        step, from that branch if it has it. Returns also whether another branch has it."""
        line = [r for r in list_line(self._directory) if wanted.allows(r.step)]
        if wanted.step is None:
            return line, False
        if own := [r for r in line if r.wrong is None]:
            return own, False
        rows = [r for r in list_checkpoints(self._directory) if r.step == wanted.step]
        return rows, any(r.wrong is None for r in rows)

    def durable(self, step: int) -> str | None:
        """Returns the path of a step that is in memory, if it is durable, too. Other branches have
        other checkpoints of this step."""
        rows = list_line(self._directory)
        return next((r.path for r in rows if r.step == step and r.wrong is None), None)

    def continue_from(self, step: int, path: str | None, asked: bool) -> None:
        """Records what was restored (0: nothing), from this path or from memory."""
        self._origin = (step, path, asked)

    def trains(self, step: int) -> None:
        """Records a completed step: from now on this branch is the one that ran last, even before
        any of its steps is durable.

        Raises:
            ValueError: when ``step`` is not a number of steps.
            CheckpointError: when it cannot be recorded.
        """
        if isinstance(step, bool) or not 0 <= operator.index(step) <= STEP_MAX:
            raise ValueError(
                f"step {step!r}: pass the number of completed optimizer steps, an integer from 0 to {STEP_MAX}"
            )
        if self._origin is not None and _worker.world().rank == 0:
            begin_branch(self._directory, self._directory.mark(), *self._origin)
        self._origin = None

    def announce(self, wanted: Wanted, done: int) -> None:
        """Prints a line if the script has asked for a step again and continues on the branch that
        began there."""
        if wanted.since and _worker.world().rank == 0:
            print(
                f"everstep: this job has already gone back to step {wanted.since}; continuing its new branch at step {done}",
                file=sys.stderr,
                flush=True,
            )

    def refuse_silent_restart(self, unreadable: list[str], some_rank_found: bool, wanted: Wanted) -> None:
        """Refuses to start from scratch beside checkpoints that cannot be read, which would hide
        them. One that only some ranks can read, or find (a listing may be stale), is such a
        checkpoint.

        Raises:
            CheckpointError: when a step was named, or some rank has found checkpoints.
        """
        if wanted != Wanted():
            raise CheckpointError(self._missing(wanted))
        if unreadable or some_rank_found:
            by = "" if _worker.world().world_size == 1 else " by every rank"
            remedy = "repair or move them" if unreadable else "check that all nodes see the same files there"
            what = (
                f"no checkpoint in {self._directory} can be read{by}, and starting from scratch would hide them; {remedy}, "
                "or use another directory"
            )
            raise CheckpointError("\n  ".join([what + ":" * bool(unreadable), *unreadable[:5]]))
        self.continue_from(0, None, False)

    def _missing(self, wanted: Wanted) -> str:
        there = sorted({row.step for row in list_checkpoints(self._directory) if row.wrong is None})
        named = ", ".join(str(step) for step in there[-NAMED_MAX:]) or "none"
        what = f"step {wanted.step}" if wanted.step is not None else f"step {wanted.since} or a later one"
        more = ", and earlier ones" if len(there) > NAMED_MAX else ""
        return f"{what} cannot be restored on every rank from {self._directory}; available steps: {named}{more}"
