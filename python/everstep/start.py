"""The start of training: what is reported, and which uses of a manager are refused."""

from __future__ import annotations

import os
import sys

from . import worker as _worker
from ._internal import CheckpointError, list_checkpoints
from .agent_tier import AgentTier
from .directory import Directory
from .disk_tier import DiskTier

#: The manager that wrote last, by the target that two managers of a process might share: a
#: directory, or the rank's slots of memory.
_writers: dict[str, Start] = {}
#: The key of the slots of memory in :data:`_writers`.
_SLOTS = "memory"


class Start:
    """The start of one manager, and which uses of it are refused."""

    def __init__(self, directory: Directory, tier: AgentTier | DiskTier) -> None:
        self._directory, self._tier = directory, tier
        self._may_write = self._has_written = False
        self._pid = os.getpid()
        self._target = _SLOTS if tier.in_memory else str(directory)

    def restored(self, step: int) -> None:
        """Prints one line on every start: what was restored, and from where."""
        self._may_write = True
        if _worker.world().rank == 0:
            where = f"{self._directory} (run {self._directory.run[:8]})"
            line = (
                f"restored step {step} from {self._tier.source()}; {where}"
                if step
                else f"fresh start: no checkpoint in {where}"
            )
            print(f"everstep: {line}", file=sys.stderr, flush=True)

    def writing(self, durable: bool) -> None:
        """Checks that this manager may write a checkpoint, and claims the directory for the job.

        Raises:
            CheckpointError: when :meth:`~everstep.CheckpointManager.restore` was not called and
                there are checkpoints of this run; when the directory belongs to another job; when
                this manager is closed, is another process's, or shares what it writes to with
                another manager of this process.
        """
        self._refuse_misuse()
        if not self._may_write:
            published = [row.step for row in list_checkpoints(self._directory) if row.wrong is None]
            held = published + self._tier.held()
            if held:
                raise CheckpointError(
                    f"step() or save() was called without restore(), but {self._directory} contains checkpoints of this run up "
                    f"to step {max(held)}: call restore() before the loop to continue from there, "
                    "or use another directory to start from scratch"
                )
            self._may_write = True
        if durable:
            self._tier.own()

    def _refuse_misuse(self) -> None:
        if os.getpid() != self._pid:
            raise CheckpointError(
                "step() or save() was called in a process that was forked from the one that created this CheckpointManager: "
                "only that process may write checkpoints"
            )
        if self._directory.released:
            raise CheckpointError(
                f"step() or save() was called after close(): call close() after the last step, or create a new "
                f"CheckpointManager for {self._directory}"
            )
        last = _writers.get(self._target)
        if last is self:
            return
        # The newer of two takes over, so that a manager may be replaced without closing the old
        # one, which then never writes again.
        if last is not None and self._has_written:
            what = "this rank's memory" if self._target == _SLOTS else str(self._directory)
            raise CheckpointError(
                f"another CheckpointManager of this process has written to {what} since this one did, and their "
                "checkpoints would be mixed: "
                f"pass all objects to one manager (model=…, other=…)"
            )
        self._has_written = True
        _writers[self._target] = self
