"""A state saved in one process is restored equal in another, or refused when it is saved.

They are equal in value and type, or refused at capture with their place.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures.bound import Bound

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "figures" / "scripts" / "state_roundtrip.py"
#: States without and with `--soak`, and states per process.
STATES, STATES_SOAK, BATCH = 400, 5000, 100
#: States of the control arms.
CONTROL = 100


def _run(do: str, directory: Path, first: int, last: int, *fault: str) -> dict[int, dict[str, Any]]:
    line = [sys.executable, str(SCRIPT), do, str(directory), str(first), str(last), *fault]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    rows = {row["number"]: row for row in map(json.loads, done.stdout.splitlines())}
    # A process that died has lost the rest of its batch.
    return {n: rows.get(n, {"raised": f"the process ended: {done.stderr[-300:]}"}) for n in range(first, last)}


def measure(soak: bool) -> Iterator[Bound]:
    states = STATES_SOAK if soak else STATES
    saved: dict[int, dict[str, Any]] = {}
    back: dict[int, dict[str, Any]] = {}
    caught: dict[str, int] = {}
    for first in range(0, states, BATCH):
        directory = Path(tempfile.mkdtemp(prefix="everstep-states-"))
        try:
            saved |= _run("save", directory, first, min(first + BATCH, states))
            back |= _run("restore", directory, first, min(first + BATCH, states))
        finally:
            shutil.rmtree(directory)
    # Faults of the reader and of the writer.
    for fault, (faults_saving, faults_restoring) in {"set": ([], ["set"]), "conj": (["conj"], [])}.items():
        directory = Path(tempfile.mkdtemp(prefix="everstep-states-"))
        try:
            _run("save", directory, 0, CONTROL, *faults_saving)
            caught[fault] = sum(
                "different" in row for row in _run("restore", directory, 0, CONTROL, *faults_restoring).values()
            )
        finally:
            shutil.rmtree(directory)
    refused = {n: row for n, row in saved.items() if "refused" in row}
    plain = [row for row in saved.values() if row.get("kind") == "plain"]
    accepted = sum("refused" not in row for row in plain) / len(plain)
    raised = [f"{n}: {row['raised']}" for rows in (saved, back) for n, row in rows.items() if "raised" in row]
    different = [f"{n}: {row['different']}" for n, row in back.items() if "different" in row]
    nowhere = [f"{n}: {row['refused']}" for n, row in refused.items() if not row["placed"]]
    published = [n for n, row in refused.items() if row["published"]]
    yield Bound(
        "states",
        len(back),
        f"states restored or refused ({sum('same' in r for r in back.values())} equal, {len(refused)} refused)",
        ">=",
        states,
    )
    yield Bound(
        "silent-differences", len(different), "states that came back otherwise", "=", 0, samples=tuple(different[:20])
    )
    yield Bound(
        "refused-without-path",
        len(nowhere),
        "refusals that do not name the object",
        "=",
        0,
        samples=tuple(nowhere[:20]),
    )
    yield Bound(
        "published-though-refused",
        len(published),
        "refused states with a checkpoint",
        "=",
        0,
        samples=tuple(published[:20]),
    )
    yield Bound("unreadable", len(raised), "other errors when saving or restoring", "=", 0, samples=tuple(raised[:20]))
    yield Bound(
        "accepted",
        round(accepted, 4),
        f"part of {len(plain)} states of plain types that is accepted",
        ">=",
        0.95,
        samples=tuple(Counter(r["refused"] for r in plain if "refused" in r)),
    )
    yield Bound("control-set", caught["set"], "differences with frozensets decoded as sets", "=", 0, control=True)
    yield Bound(
        "control-conj", caught["conj"], "differences with conjugated views taken as their memory", "=", 0, control=True
    )
