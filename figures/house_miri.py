"""The slot protocol is free of races, in Miri and in every interleaving of its state word.

Miri runs the product's own capture, early copy and slots
(``crates/checkpoint/src/arena/protocol.rs``) with several orders of its threads. loom checks every
interleaving of the state word. Both tools must find the mistakes planted for them. Neither models
streaming stores and their fence (``copy_crc.rs``).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from figures.bound import Bound
from harness.cluster import ROOT
from harness.miri import miri

#: Orders of the threads that Miri tries, with and without `--soak`.
ORDERS = {True: 64, False: 8}
RACE = "error: Undefined Behavior: Data race detected"
#: A part of the names of loom's tests with planted mistakes, and how many of them there are.
PLANTED, MISTAKES = "is_found", 7


def _passed(output: str) -> int:
    return sum(int(n) for n in re.findall(r"(\d+) passed", output))


def _loom(*only: str) -> subprocess.CompletedProcess[str]:
    line = ["cargo", "test", "-q", "--release", "-p", "everstep-checkpoint", "--lib", "state_word", "--", *only]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def measure(soak: bool) -> Iterator[Bound]:
    clean = miri(orders=ORDERS[soak])
    last = clean.stdout[-2000:] + clean.stderr[-2000:]
    unit = f"runs in which Miri found something, with {ORDERS[soak]} orders of threads"
    yield Bound("miri", int(clean.returncode != 0), unit, "=", 0, samples=() if clean.returncode == 0 else (last,))
    yield Bound("miri-tests", _passed(clean.stdout), "tests that Miri ran", ">=", 4 * ORDERS[soak])
    planted = miri(orders=1, planted=True)
    found = RACE in planted.stdout + planted.stderr
    yield Bound(
        "miri-planted", int(found), "races found in a writer that does not look at the pins", "=", 0, control=True
    )
    loom = _loom("--skip", PLANTED)
    yield Bound("loom", int(loom.returncode != 0), "models that loom found wrong", "=", 0)
    yield Bound("loom-tests", _passed(loom.stdout), "models that loom checked", ">=", 1)
    wrong = _passed(_loom(PLANTED).stdout)
    yield Bound("loom-planted", wrong, "planted mistakes that loom found", ">=", MISTAKES)
