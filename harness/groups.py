"""Control groups of our own, to measure the resource usage of each machine's processes
separately."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
#: The controllers of version 1. Version 2 has one tree for all.
CONTROLLERS = ("cpuacct", "memory", "blkio")


def _places(name: str) -> list[Path]:
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT / name]
    return [ROOT / controller / name for controller in CONTROLLERS]


@contextlib.contextmanager
def groups(names: list[str]) -> Iterator[dict[str, list[str]]]:
    """Makes one group per name, and yields the command-line prefix that runs a process in it.

    Requires permission to make groups.
    """
    made: list[Path] = []
    try:
        if (ROOT / "cgroup.controllers").exists():
            (ROOT / "cgroup.subtree_control").write_text("+cpu +memory +io")
        for name in names:
            for place in _places(name):
                # A group may still exist because its last process took long to end.
                place.mkdir(exist_ok=True)
                made.append(place)
        enter = {name: "; ".join(f"echo $$ > {place}/cgroup.procs" for place in _places(name)) for name in names}
        yield {name: ["sh", "-c", f'{line}; exec "$@"', "sh"] for name, line in enter.items()}
    finally:
        for place in made:
            with contextlib.suppress(OSError):
                # A group can only be removed once it is empty, so its processes go back to the
                # parent.
                for pid in (place / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        (place.parent / "cgroup.procs").write_text(pid)
                os.rmdir(place)
