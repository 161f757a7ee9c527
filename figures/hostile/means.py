"""The building blocks of cases: prefixes of the command line, and the kill that disturbs the
job."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from figures.hostile.case import FAILED, SETUP
from figures.hostile.job import Job
from harness.cluster import ROOT

#: Exit codes allowed for a set-up that cannot work.
CANNOT = frozenset({FAILED, SETUP})
DENIED = [sys.executable, str(ROOT / "figures" / "scripts" / "denied.py")]


def shell(words: str) -> tuple[str, ...]:
    """Runs these shell commands first, in the process that becomes the job."""
    return ("bash", "-c", f'{words}; exec "$@"', "bash")


def redirected(words: str) -> tuple[str, ...]:
    """Runs the job with these redirections."""
    return ("bash", "-c", f'exec "$@" {words}', "bash")


def mounted(words: str) -> tuple[str, ...]:
    """Runs the job with these mounts of its own."""
    return ("unshare", "-m", "--propagation", "private", "bash", "-c", f'{words} && exec "$@"', "bash")


def denied(*rules: str) -> tuple[str, ...]:
    """Runs the job with some system calls failing."""
    return (*DENIED, *rules, "--")


def _kill_one(made: Job) -> None:
    os.kill(made.steps(1)[-1][2], signal.SIGKILL)


def then_kill(first: Callable[[Job], None] | None) -> Callable[[Job], None]:
    """Calls ``first``, if given, and kills a rank four steps later."""

    def do(made: Job) -> None:
        if first:
            first(made)
        done = max((s for s, _, _ in made.steps(0)), default=0)
        if made.reach(done + 4):
            _kill_one(made)

    return do


#: Kills a rank four steps later.
KILLED = then_kill(None)
