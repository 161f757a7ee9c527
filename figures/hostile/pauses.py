"""Processes that stop for a while and continue: SIGSTOP and SIGCONT.

Each kind of process in turn, on one node and on two.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from figures.hostile.case import PERSIST, RANKS, Case
from figures.hostile.job import Job, meeting
from harness.cluster import free_port

ROLES = ("agent", "coordinator", "worker", "template", "guard")
#: Seconds. The long ones are measured with ``--soak``.
SHORT, LONG = (1, 5, 12), (1, 5, 12, 30, 60)


def _two(case: Case, made: Job) -> None:
    """Starts two nodes of one rank each.

    Unless the coordinator is stopped, the second is disturbed.
    """
    port = free_port()
    for node in (0, 1):
        made.start(
            made.line([*meeting(node, 2, port), "--name", "two", *case.options], list(case.words)),
            case.environment(made),
        )


def _pause(role: str, seconds: float) -> Callable[[Job], None]:
    def pause(made: Job) -> None:
        deadline = time.monotonic() + 20
        while not (pids := made.pids(role)) and time.monotonic() < deadline and not made.over():
            time.sleep(0.1)
        if not pids:
            raise RuntimeError(f"no {role} to stop: {made.printed()[-500:]}")
        # The last one: on two nodes, that of the second node if both have one.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[-1], signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pids[-1], signal.SIGCONT)

    return pause


def _whole_node(seconds: float) -> Callable[[Job], None]:
    """Stops all processes of the last node, as when a virtual machine is migrated."""

    def pause(made: Job) -> None:
        pids = made.everybody_of(len(made.agents) - 1)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return pause


def cases(soak: bool) -> list[Case]:
    """Returns a job for each role and length.

    A stopped process may be taken for dead. Then the job continues, exactly, from the last step of
    which all nodes have each other's copies. While an agent is stopped, no copies are made but its
    worker trains: those steps may be repeated.
    """
    found = []
    for seconds in LONG if soak else SHORT:
        bound = 240.0 + 2 * seconds
        for role in ROLES:
            found.append(
                Case(
                    f"pauses.one-node.{role}-{seconds}-s", during=_pause(role, seconds), repeats=PERSIST, seconds=bound
                )
            )
            again = 14 if role in ("agent", "guard") else PERSIST
            found.append(
                Case(
                    f"pauses.two-nodes.{role}-{seconds}-s",
                    start=_two,
                    during=_pause(role, seconds),
                    repeats=again,
                    seconds=bound,
                )
            )
        found.append(
            Case(f"pauses.one-node.everything-{seconds}-s", during=_whole_node(seconds), repeats=PERSIST, seconds=bound)
        )
        found.append(
            Case(
                f"pauses.two-nodes.everything-of-one-{seconds}-s",
                start=_two,
                during=_whole_node(seconds),
                repeats=PERSIST,
                seconds=bound,
            )
        )
    return found


CASES = cases(False)
assert RANKS == 2
