"""How a training starts: what is said of it, and what is refused."""

from __future__ import annotations

import sys

from . import worker as _worker
from ._internal import CheckpointError, list_checkpoints
from .directory import Directory
from .tiers import AgentTier, DiskTier


class Start:
    """The start of one manager."""

    def __init__(self, directory: Directory, tier: AgentTier | DiskTier) -> None:
        self._directory, self._tier = directory, tier
        self._may_write = False

    def restored(self, step: int) -> None:
        """One line on every start: what was restored, and from where."""
        self._may_write = True
        if _worker.world().rank == 0:
            where = f"{self._directory} (run {self._directory.run[:8]})"
            line = f"restored step {step} from {self._tier.source()}; {where}" if step else f"fresh start: no checkpoint in {where}"
            print(f"everstep: {line}", file=sys.stderr, flush=True)

    def writing(self, durable: bool) -> None:
        """Before a checkpoint: a loop that did not restore must not write beside checkpoints that it ignores, and the directory must be this job's.

        Raises:
            CheckpointError: when there are checkpoints of this run, or the directory belongs to another job.
        """
        if not self._may_write:
            held = [step for step, _, _, wrong in list_checkpoints(self._directory) if wrong is None] + self._tier.held()
            if held:
                raise CheckpointError(
                    f"step() or save() without restore(), and {self._directory} holds checkpoints of this run up to step {max(held)}: call "
                    f"restore() before the loop to continue from there, or give another directory to start anew"
                )
            self._may_write = True
        if durable:
            self._tier.own()
