"""Which branch of a run training is in: what it went back to, what it goes on from, and where it goes on after a restart."""

from __future__ import annotations

import operator
import os
import sys

from . import worker as _worker
from ._internal import CheckpointError, asked_before, begin_branch, list_checkpoints, list_line
from .directory import Directory

#: The highest number of a step: it fits into the words that workers and agents share, together with a distance.
STEP_MAX = 1 << 40
#: A checkpoint: step, path, number of ranks, what is wrong with it.
Row = tuple[int, str, int | None, str | None]


class Branch:
    """The branch that one process trains in. The native half decides (``lineage.rs``), and records it in the directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        #: What training goes on from: the step, its path if it is durable, whether the user named it; ``None`` once that is recorded.
        self._origin: tuple[int, str | None, bool] | None = (0, None, False)

    def wanted(self, step: int | None) -> int | None:
        """The step to go back to; ``None`` when that was done in an earlier life of this job, which the script does not know."""
        if step is None:
            return None
        restarted = _worker.world().attempt > 0 or os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
        again = asked_before(self._directory, self._directory.mark(), restarted) == step
        went_on = again and any(s == step and wrong is None for s, _, _, wrong in list_line(self._directory))
        return None if went_on else step

    def rows(self, wanted: int | None) -> list[Row]:
        """What may be restored, newest first: the branch that ran last; or the step that is wanted, of that branch if it has it."""
        line = list_line(self._directory)
        if wanted is None:
            return line
        return [r for r in line if r[0] == wanted and r[3] is None] or [
            r for r in list_checkpoints(self._directory) if r[0] == wanted
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

    def announce(self, step: int | None, wanted: int | None, done: int) -> None:
        """One line where the script has asked for ``step`` again, and goes on with what came of it."""
        if step != wanted and _worker.world().rank == 0:
            print(
                f"everstep: restore(step={step}) was done before in this job; going on in its branch at step {done}",
                file=sys.stderr,
                flush=True,
            )

    def refuse_silent_restart(self, unreadable: list[str], some: bool, step: int | None) -> None:
        """Starting from scratch beside checkpoints that cannot be read would bury them.

        Raises:
            CheckpointError: when a step was named, or there are checkpoints and none can be read.
        """
        if step is not None:
            raise CheckpointError(f"step {step} cannot be restored on every rank from {self._directory}")
        if unreadable and not some:
            raise CheckpointError(
                f"no checkpoint in {self._directory} can be read, and starting over would bury them; repair or move "
                f"them, or give another directory:\n  " + "\n  ".join(unreadable[:5])
            )
        self.goes_on_from(0, None, False)
