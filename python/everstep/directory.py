"""The directory of durable checkpoints, or their prefix in an object store."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from . import worker as _worker
from ._internal import CheckpointError, Claim, ListedCheckpoint, Mark, list_checkpoints, reach, run_id

if TYPE_CHECKING:
    from ._internal import Agent, Retention

#: The file with the run id.
RUN_FILE = "everstep-run.json"
_COLLAPSED = re.compile(r"(s3a?|gs|az|azure|abfss?|adl):/[^/]")
#: How a store that ignores conditions marks an attempt at a step.
_ATTEMPT = r"\.\d+(?:\.\d+)?-[0-9a-f]+"
#: Names of checkpoints: ``step-N``, ``step-N.2`` beside it, and attempts.
_NAME = re.compile(rf"step-(\d+)(\.\d+|{_ATTEMPT})?")


#: Seconds without a renewal after which a claim expires.
SILENCE = 30.0
#: The directories that belong to this process, outside ``everstep run``.
_claims: dict[str, tuple[int, Claim]] = {}


def _release_all() -> None:
    for pid, claim in _claims.values():
        if pid == os.getpid():
            claim.release()
    _claims.clear()


def _leave_to_parent() -> None:
    """Drops nothing in a forked child: the claims are the parent's, and so are the threads that
    renew them. An object that is dropped waits for its thread, which does not exist here, so the
    objects are kept alive for good."""
    for _, claim in _claims.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(claim))
    _claims.clear()


atexit.register(_release_all)
os.register_at_fork(after_in_child=_leave_to_parent)


def in_the_way(path: Path) -> str | None:
    """Returns what is at a path, or above it, that prevents a directory there, and what to do; the
    errors of the system report only that something exists."""
    for at in (path, *path.parents):
        name = "it" if at == path else str(at)
        if at.is_dir():
            return None
        if at.is_symlink() and not at.exists():
            return f"{name} is a dangling link to {at.readlink()}; create what it names, or give another one"
        if at.exists():
            return (
                f"{name} is a {'regular file' if at.is_file() else 'special file'}, not a directory; give another one"
            )
    return None


class Directory:
    """A path, made absolute, or a URL (``s3://bucket/prefix``, ``gs://…``, ``az://…``), which stays
    as it is.

    It is path-like, so it can be passed wherever a path is taken.
    """

    def __init__(self, given: str | PathLike[str] | Directory) -> None:
        text = os.fsdecode(given)
        if not text:
            raise CheckpointError("the checkpoint directory is an empty string, perhaps of a variable that is not set")
        if _COLLAPSED.match(text):
            raise CheckpointError(
                f"{text} is a URL that was passed through pathlib.Path, which drops a slash: pass it as a string"
            )
        self._run: str | None = None
        self._epoch = 0
        #: True once :meth:`release` was called.
        self.released = False
        scheme, url, rest = text.partition("://")
        self.is_url = bool(url)
        self._text = f"{scheme}://{rest.rstrip('/')}" if self.is_url else str(Path(text).absolute())

    def __fspath__(self) -> str:
        return self._text

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"Directory({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Directory) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def located(self) -> tuple[Directory, int | None, str | None]:
        """Returns the directory of checkpoints, and the step and name of one of its checkpoints
        (``step-N``, ``step-N.2``) if this is one."""
        above, _, name = self._text.rpartition("/")
        found = _NAME.fullmatch(name)
        if found is None:
            return self, None, None
        # `step-007` means `step-7`: this is the name under which it is published.
        return Directory(above), int(found[1]), f"step-{int(found[1])}{found[2] or ''}"

    def named(self, name: str) -> list[ListedCheckpoint]:
        """Returns the checkpoints with this name: one, or none. A store that ignores conditions has
        no ``step-N``, but attempts at it, of which the valid one is listed."""
        rows = list_checkpoints(self)
        exact = [r for r in rows if os.path.basename(r.path) == name]
        if exact or "." in name:
            return exact
        attempt = re.compile(rf"{re.escape(name)}{_ATTEMPT}")
        return [r for r in rows if attempt.fullmatch(os.path.basename(r.path))]

    def has(self, step: int) -> bool:
        """Returns whether the checkpoint of this step exists and is complete."""
        return any(row.step == step and row.wrong is None for row in list_checkpoints(self))

    @property
    def run(self) -> str:
        """The identity of this directory: drawn at its first use, and the same until it is deleted.

        Raises:
            CheckpointError: when the file with it is damaged, or cannot be created.
        """
        if self._run is None:
            self._run = run_id(self)
        return self._run

    def mark(self) -> Mark:
        """Returns the mark on what this process writes here."""
        world = _worker.world()
        return Mark(self.run, self._epoch, world.generation, world.attempt)

    def claim(self, agree: Callable[[int], int], *, rank: int | None = None) -> None:
        """Claims this directory for the job, outside ``everstep run``, where the agent does. Rank 0
        claims it for all; ``agree`` returns rank 0's number on every rank. ``rank`` is the one that
        the environment describes, unless it is given.

        Raises:
            CheckpointError: when it belongs to another running job, which is named; when it is
                read-only.
        """
        if self._epoch:
            return
        failure: CheckpointError | None = None
        epoch = 0
        if (_worker.world().rank if rank is None else rank) == 0:
            try:
                self._check_writable()
                pid, claim = _claims.get(self._text, (0, None))
                if claim is None or pid != os.getpid():
                    claim = Claim(self, SILENCE)
                    _claims[self._text] = (os.getpid(), claim)
                epoch = claim.epoch
            except CheckpointError as e:
                failure = e
        self._epoch = agree(epoch)
        if not self._epoch:
            raise failure or CheckpointError(f"{self} belongs to another job; rank 0's error names it")

    def share(self, agent: Agent, keep: Retention, bandwidth: int, exactly: bool) -> None:
        """Lets the agent of this node write here. The agent claims this directory for the job.

        Raises:
            AgentError: when the agent may not, or cannot, write here.
        """
        self._epoch = agent.persist_to(self._text, self.run, keep, bandwidth, exactly)

    def release(self) -> None:
        """Releases the claim, so that another job may use the directory at once."""
        pid, claim = _claims.pop(self._text, (0, None))
        if claim is not None and pid == os.getpid():
            claim.release()
        self._epoch = 0
        self.released = True

    def is_there(self) -> bool:
        """Returns False for a directory that does not exist. A store has no directories, so its
        prefix always does."""
        return self.is_url or Path(self._text).is_dir()

    def prepare(self) -> None:
        """Creates the directory, so that checkpoints can be written. A directory that everstep has
        used before may be read-only: an evaluation restores from it and writes nothing.

        Raises:
            CheckpointError: when it cannot be created; when it is not writable and has nothing to
                restore.
        """
        if self.is_url:
            reach(self)
            return
        try:
            os.makedirs(self._text, exist_ok=True)
        except OSError as e:
            blocked = in_the_way(Path(self._text))
            raise CheckpointError(
                f"cannot create the checkpoint directory {self}: {blocked or f'{e.strerror}; give another one'}"
            ) from (None if blocked else e)
        if not (Path(self._text) / RUN_FILE).exists():
            self._check_writable()

    def _check_writable(self) -> None:
        """Checks that a new file can be created in it.

        Raises:
            CheckpointError: when it is read-only.
        """
        if not self.is_url and not os.access(self._text, os.W_OK | os.X_OK):
            raise CheckpointError(f"the checkpoint directory {self} is read-only; give one that can be written")
