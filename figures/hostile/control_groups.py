"""Limits of threads and of memory.

The control group contains the whole job, or one running process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from figures.hostile.case import FAILED, KILLED, PERSIST, REQUEUE, SETUP, Case
from figures.hostile.job import Job

ROOT = Path("/sys/fs/cgroup")
CANNOT = frozenset({FAILED, REQUEUE, SETUP})
MIB = 1 << 20


def _group(controller: str, made: Job) -> Path:
    return ROOT / controller / made.home.name


def _make(controller: str, **limits: int) -> Callable[[Job], None]:
    def make(made: Job) -> None:
        group = _group(controller, made)
        group.mkdir()
        made.cleanups.append(lambda: _remove(group))
        for name, value in limits.items():
            (group / name.replace("__", ".")).write_text(str(value))

    return make


def _remove(group: Path) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            group.rmdir()
            return
        time.sleep(0.05)


def _inside(controller: str) -> Callable[[Case, Job], None]:
    """Starts the whole job in the group from its first instruction."""

    def start(case: Case, made: Job) -> None:
        enter = f'echo $$ > {_group(controller, made)}/cgroup.procs; exec "$@"'
        made.start(["bash", "-c", enter, "bash", *case.line(made)], case.environment(made))

    return start


def _no_more_threads(more: int, kill: bool) -> Callable[[Job], None]:
    """Limits the job to ``more`` threads beyond its present ones.

    Then, if ``kill``, a rank is killed and must be started again.
    """

    def limit(made: Job) -> None:
        group = _group("pids", made)
        current = int((group / "pids.current").read_text())
        (group / "pids.max").write_text(str(current + more))
        if kill:
            os.kill(made.steps(1)[-1][2], signal.SIGKILL)

    return limit


def _entered(limit: int) -> Callable[[Job], None]:
    """Moves the whole job into a group that is too small for it, and kills a rank."""

    def enter(made: Job) -> None:
        group = _group("pids", made)
        (group / "pids.max").write_text(str(limit))
        for pid in made.everybody():
            with contextlib.suppress(OSError):
                (group / "cgroup.procs").write_text(str(pid))
        os.kill(made.steps(1)[-1][2], signal.SIGKILL)

    return enter


def _squeeze(mib: int) -> Callable[[Job], None]:
    """Moves one rank's process into a group that is too small for it."""

    def squeeze(made: Job) -> None:
        group = _group("memory", made)
        pid = made.steps(1)[-1][2]
        # Memory is charged to the group in which it is first used.
        (group / "memory.limit_in_bytes").write_text(str(mib * MIB))
        (group / "cgroup.procs").write_text(str(pid))

    return squeeze


TWICE = ("--max-restarts", "2")
SOME = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 26, 28, 32, 40, 48, 64)
THREADS = [
    Case(f"threads.whole-{n}", before=_make("pids", pids__max=n), start=_inside("pids"), codes=CANNOT) for n in SOME
]
LATER = [
    *(
        Case(
            f"threads.no-more-than-{n}-more",
            before=_make("pids"),
            start=_inside("pids"),
            during=_no_more_threads(n, kill=False),
        )
        for n in (0, 1)
    ),
    *(
        Case(
            f"threads.killed-{n}-more",
            before=_make("pids"),
            start=_inside("pids"),
            during=_no_more_threads(n, kill=True),
            options=TWICE,
            codes=CANNOT,
            repeats=PERSIST,
        )
        for n in (-4, 0, 1, 2, 4, 8, 16)
    ),
    *(
        Case(
            f"threads.entered-{n}",
            before=_make("pids"),
            during=_entered(n),
            options=TWICE,
            codes=CANNOT,
            repeats=PERSIST,
        )
        for n in (1, 8, 64)
    ),
]
MEMORY = [
    # If there is almost no memory, the kernel kills the agent itself.
    *(
        Case(
            f"memory.whole-{n}-MiB",
            before=_make("memory", memory__limit_in_bytes=n * MIB),
            start=_inside("memory"),
            codes=CANNOT | ({KILLED} if n < 100 else set()),
        )
        for n in (8, 32, 100, 250, 450)
    ),
    Case(
        "memory.kills-one",
        before=_make("memory", memory__limit_in_bytes=2500 * MIB),
        start=_inside("memory"),
        words=("--balloon", "4000"),
        repeats=PERSIST,
    ),
    Case(
        "memory.kills-one-again",
        before=_make("memory"),
        during=_squeeze(6),
        words=("--pause", "0.1", "--balloon", "100"),
        repeats=PERSIST,
    ),
]
CASES = [*THREADS, *LATER, *MEMORY]
