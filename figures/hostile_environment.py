"""In strange surroundings, a real job works, or ends with a clear sentence.

Each works and computes the right result, or ends in a sentence with the documented exit code.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from figures.bound import Bound
from figures.hostile import control_groups, losses, pauses, surroundings
from figures.hostile.case import Case, Reference, Verdict, judge, reference
from figures.hostile.job import Job, job
from figures.hostile.means import KILLED

STEPS = 20
#: Concurrent jobs. Most of them wait most of the time.
AT_ONCE = int(os.environ.get("EVERSTEP_HOSTILE_JOBS", "4"))
#: A pattern of names, to repeat some cases.
ONLY = os.environ.get("EVERSTEP_HOSTILE_ONLY", "")
#: What the examiner looks for, and how it is reported.
KINDS = {
    "panic": "jobs with a panic in their output or logs",
    "silent": "jobs that hang without a line that says what they wait for",
    "hung": "jobs that never end, and say what they wait for",
    "code": "jobs that end with a wrong exit code, or without a sentence",
    "result": "jobs that end well with steps missing, different or repeated more than allowed",
}


def cases(soak: bool) -> tuple[list[Case], list[str]]:
    """Returns the cases that this machine supports, and what it lacks for the others."""
    found, lacking = [*surroundings.CASES, *pauses.cases(soak)], []
    if os.geteuid() != 0 or not shutil.which("unshare"):
        raise RuntimeError("needs root, and unshare: namespaces, control groups and mounts are part of it")
    for there, what, more in (
        (
            (Path("/sys/fs/cgroup/pids").is_dir() and Path("/sys/fs/cgroup/memory").is_dir()),
            "control groups (version 1)",
            control_groups.CASES,
        ),
        (losses.possible(), "nft", losses.CASES),
    ):
        if there:
            found += more
        else:
            lacking.append(what)
    return found, lacking


def _examine(case: Case, expected: Reference) -> Verdict:
    began = time.monotonic()
    try:
        with job() as made:
            case.run(made)
            verdict = judge(case, made, expected, STEPS)
    except Exception:  # noqa: BLE001
        verdict = Verdict(case.name, (), code=f"the examiner failed: {traceback.format_exc()}")
    wrong = "; ".join(f"{kind}: {text}" for kind in KINDS if (text := getattr(verdict, kind)))
    print(
        f"{case.name:45} {time.monotonic() - began:5.1f} s  exit {','.join(map(str, verdict.codes)):7} {wrong}",
        flush=True,
    )
    return verdict


def _panics(case: Case, made: Job) -> None:
    """Prints a panic and exits with the exit code of one."""
    made.start(
        ["sh", "-c", "echo \"thread 'main' panicked at src/main.rs:1:1:\" >&2; exit 101"], case.environment(made)
    )


#: One planted fault of each kind, which the examiner must find.
CONTROLS = {
    "panic": Case("control.panic", start=_panics),
    "silent": Case("control.silent", options=("--detect-timeout", "3600s"), words=("--wrong", "hangs"), seconds=60),
    "code": Case("control.code", options=("--max-restarts", "0"), during=KILLED),
    "result": Case("control.result", words=("--wrong", "skips")),
    "result-value": Case("control.value", words=("--wrong", "differs")),
}


def measure(soak: bool) -> Iterator[Bound]:
    expected = reference(STEPS)
    todo, lacking = cases(soak)
    todo = [case for case in todo if re.search(ONLY, case.name)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        controls = {kind: pool.submit(_examine, case, expected) for kind, case in CONTROLS.items()}
        # The long ones first.
        started = [pool.submit(_examine, case, expected) for case in sorted(todo, key=lambda c: -c.seconds)]
        try:
            verdicts = [one.result() for one in started]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    note = f"; this machine lacks {', '.join(lacking)}" if lacking else ""
    yield Bound("cases", len(verdicts), f"kinds of surroundings, each with a real job of two ranks{note}", ">=", 100)
    worked = sum(all(c == 0 for c in v.codes) and bool(v.codes) for v in verdicts)
    yield Bound("worked", worked, "of them worked", ">=", len(verdicts) // 2)
    for kind, text in KINDS.items():
        bad = tuple(v.case for v in verdicts if getattr(v, kind))
        yield Bound(kind, len(bad), text, "=", 0, samples=bad)
    for name, found in controls.items():
        kind = name.partition("-")[0]
        yield Bound(
            name, int(bool(getattr(found.result(), kind))), f"{KINDS[kind]}, where one is planted", "=", 0, control=True
        )
