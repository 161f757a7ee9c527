"""Saving, restoring, publishing and pruning harm no foreign entry in a directory.

The sequences are random. Calls to the file system fail meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from figures.bound import Bound
from harness.cluster import ROOT

#: Sequences of the full measurement, and of the short one.
SEQUENCES = {True: 20_000, False: 5_000}


def _sequences(count: int, seed: int, *planted: str) -> dict[str, Any]:
    """Drives the real code. The feature makes its calls to the file system fail."""
    line = [
        "cargo",
        "run",
        "-q",
        "-p",
        "everstep-checkpoint",
        "--features",
        "faults",
        "--example",
        "foreign_directories",
        "--",
    ]
    done = subprocess.run(
        [*line, str(count), str(seed), *planted], cwd=ROOT, check=False, capture_output=True, text=True
    )
    if not done.stdout:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(soak: bool) -> Iterator[Bound]:
    seed = int(time.time())
    found = _sequences(SEQUENCES[soak], seed)
    print(f"seed {seed}: {found}")
    yield Bound("sequences", found["sequences"], "", ">=", SEQUENCES[soak])
    yield Bound(
        "harmed",
        found["bad"],
        "sequences in which something foreign, the user's or durable was lost, or another branch was continued",
        "<=",
        0,
    )
    yield Bound("protected", found["protected"] / found["sequences"], "entries that had to stay, per sequence", ">=", 2)
    yield Bound("failing", found["faults"] / found["sequences"], "operations with failing calls, per sequence", ">=", 2)
    control = _sequences(500, seed, "planted")
    print(f"control: {control}")
    yield Bound(
        "harmed", control["bad"], "sequences under the old rule (no manifest: half a deletion)", "<=", 0, control=True
    )
