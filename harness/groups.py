"""Control groups of our own: what a machine's processes use is counted apart from the others'."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
#: Of version 1; version 2 has one tree for all.
CONTROLLERS = ("cpuacct", "memory", "blkio")


def _places(name: str) -> list[Path]:
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT / name]
    return [ROOT / controller / name for controller in CONTROLLERS]


@contextlib.contextmanager
def groups(names: list[str]) -> Iterator[dict[str, list[str]]]:
    """One group for each name; the words that a command line begins with to run in it. Needs the right to make groups."""
    made: list[Path] = []
    try:
        if (ROOT / "cgroup.controllers").exists():
            (ROOT / "cgroup.subtree_control").write_text("+cpu +memory +io")
        for name in names:
            for place in _places(name):
                # One may still be there whose last process took its time.
                place.mkdir(exist_ok=True)
                made.append(place)
        enter = {name: "; ".join(f"echo $$ > {place}/cgroup.procs" for place in _places(name)) for name in names}
        yield {name: ["sh", "-c", f'{line}; exec "$@"', "sh"] for name, line in enter.items()}
    finally:
        for place in made:
            with contextlib.suppress(OSError):
                # Who is still in it goes back to where it came from.
                for pid in (place / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        (place.parent / "cgroup.procs").write_text(pid)
                os.rmdir(place)
