"""Directories and file systems of a job: removed while it runs, read-only, full, or incapable."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from figures.hostile.case import FAILED, PERSIST, Case
from figures.hostile.job import Job
from figures.hostile.means import CANNOT, KILLED, mounted, then_kill

HOME = {"HOSTILE_HOME": "{home}"}
MEM = ("EVERSTEP_SHM_DIR",)


def _remove(which: str) -> Callable[[Job], None]:
    def remove(made: Job) -> None:
        place = {
            "checkpoints": made.cwd / "checkpoints",
            "state": made.home / "state",
            "logs": made.cwd / "logs",
            "cwd": made.cwd,
            "memory": made.memory,
        }[which]
        shutil.rmtree(place, ignore_errors=True)

    return remove


def _read_only(*places: str) -> tuple[str, ...]:
    """Makes these directories, relative to the job's, exist but be read-only."""
    make = " && ".join(
        f'mkdir -p "$HOSTILE_HOME/{p}" && mount -t tmpfs -o mode=700 none "$HOSTILE_HOME/{p}" && '
        f'mount -o remount,ro "$HOSTILE_HOME/{p}"'
        for p in places
    )
    return mounted(make)


def _lose_space(made: Job) -> None:
    """Uses up the free space of the checkpoints' file system."""
    with Path(f"/proc/{made.agents[0].pid}/root{made.cwd}/checkpoints/filler").open("wb", buffering=0) as f:
        try:
            while True:
                f.write(b"x" * 65536)
        except OSError:
            pass


CASES = [
    *(
        Case(
            f"removed.{w}",
            options=("--log-dir", "logs"),
            during=_remove(w),
            codes=CANNOT if w == "state" else frozenset(),
        )
        for w in ("checkpoints", "state", "logs", "cwd", "memory")
    ),
    *(
        Case(
            f"removed-killed.{w}",
            options=("--log-dir", "logs"),
            during=then_kill(_remove(w)),
            codes=CANNOT,
            repeats=14,
        )
        for w in ("checkpoints", "state", "logs", "cwd", "memory")
    ),
    Case("read-only.checkpoints", through=_read_only("cwd/checkpoints"), env=HOME, codes=CANNOT),
    Case(
        "read-only.state", through=_read_only("state"), env=HOME, codes=CANNOT, refused=True, says="state.*[Rr]ead-only"
    ),
    Case(
        "read-only.logs",
        through=_read_only("cwd/logs"),
        options=("--log-dir", "logs", "--tee", "3"),
        env=HOME,
        codes=CANNOT,
        says="[Rr]ead-only",
    ),
    Case("read-only.cwd", through=_read_only("cwd"), env=HOME, codes=CANNOT),
    Case("read-only.home", through=_read_only("user"), env=HOME),
    Case(
        "read-only.root",
        through=mounted('mount --bind "$HOSTILE_HOME" "$HOSTILE_HOME" && mount -o remount,bind,ro /'),
        env=HOME,
    ),
    Case(
        "cwd.removed-before-start",
        through=("bash", "-c", 'rmdir "$HOSTILE_HOME/cwd"; exec "$@"', "bash"),
        env=HOME,
        words=("--checkpoints", "{home}/kept"),
        codes=CANNOT,
    ),
    Case(
        "memory.none",
        through=mounted(
            "umount -l /dev/shm && mount -t tmpfs none /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9"
        ),
        unset=MEM,
        during=KILLED,
        repeats=PERSIST,
        codes=CANNOT,
    ),
    Case(
        "memory.read-only",
        through=mounted("mount -t tmpfs none /dev/shm && mount -o remount,ro /dev/shm"),
        unset=MEM,
        codes=CANNOT,
        says="EVERSTEP_SHM_DIR",
    ),
    Case(
        "memory.tiny-64-KiB",
        through=mounted("mount -t tmpfs -o size=64k none /dev/shm"),
        unset=MEM,
        during=KILLED,
        repeats=PERSIST,
        codes=CANNOT,
    ),
    Case(
        "memory.tiny-4-KiB",
        through=mounted("mount -t tmpfs -o size=4k none /dev/shm"),
        unset=MEM,
        during=KILLED,
        repeats=PERSIST,
        codes=CANNOT,
    ),
    Case(
        "memory.no-inodes",
        through=mounted("mount -t tmpfs -o nr_inodes=4 none /dev/shm"),
        unset=MEM,
        during=KILLED,
        repeats=PERSIST,
        codes=CANNOT,
    ),
    Case(
        "disk.fills-up",
        through=mounted(
            'mkdir -p "$HOSTILE_HOME/cwd/checkpoints" && mount -t tmpfs -o size=2m none "$HOSTILE_HOME/cwd/checkpoints"'
        ),
        env=HOME,
        during=_lose_space,
        options=("--max-restarts", "1"),
        codes=frozenset({FAILED}),
        repeats=PERSIST,
        says="No space left",
    ),
    Case(
        "disk.state-tiny",
        through=mounted(
            'mkdir -m 700 "$HOSTILE_HOME/state" && mount -t tmpfs -o size=64k,mode=700 none "$HOSTILE_HOME/state"'
        ),
        env=HOME,
        codes=CANNOT,
        says="No space left",
        waits=True,
        seconds=40,
    ),
    Case(
        "disk.state-1-MiB",
        through=mounted(
            'mkdir -m 700 "$HOSTILE_HOME/state" && mount -t tmpfs -o size=1m,mode=700 none "$HOSTILE_HOME/state"'
        ),
        env=HOME,
        codes=CANNOT,
        during=KILLED,
        repeats=PERSIST,
    ),
]
