"""With six lines added, a hand-written loop that is killed ends like an undisturbed one."""

from __future__ import annotations

import difflib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import ROOT, descendants

EVERSTEP = str(Path(sys.executable).parent / "everstep")
ITERATIONS = 400


def _run(script: str, out: Path, kills: int) -> int:
    """Runs the script under everstep, killing its worker on the way. Returns the exit code."""
    line = [EVERSTEP, "run", "--standalone", "--max-restarts", str(kills), script, str(out), str(ITERATIONS)]
    run = subprocess.Popen(
        line, cwd=ROOT, env={**os.environ, "EVERSTEP_STATE_DIR": str(out / "state")}, stdout=subprocess.DEVNULL
    )
    for kill in range(kills):
        goal = ITERATIONS * (kill + 1) // (kills + 1)
        while run.poll() is None and not ((out / "losses").exists() and f"\n{goal} " in (out / "losses").read_text()):
            time.sleep(0.005)
        workers = [p for p in descendants(run.pid) if b"hand_loop" in Path(f"/proc/{p}/cmdline").read_bytes() or kill]
        workers = [
            p
            for p in workers
            if f"EVERSTEP_GENERATION={kill + 1}".encode() in Path(f"/proc/{p}/environ").read_bytes() or kill == 0
        ]
        for pid in workers[:1]:
            os.kill(pid, signal.SIGKILL)
    return run.wait(120)


def _losses(out: Path) -> dict[int, str]:
    """Returns the last loss that was written for each iteration."""
    return {int(a): b for a, b in (x.split() for x in (out / "losses").read_text().splitlines())}


def measure(soak: bool) -> Iterator[Bound]:
    import torch

    before, after = ((ROOT / f"figures/scripts/hand_loop{x}.py").read_text().splitlines() for x in ("", "_everstep"))
    diff = list(difflib.ndiff(before, after))
    added = sum(x.startswith("+ ") and x[2:].strip() != "" for x in diff)
    yield Bound("added", added, "lines", "<=", 6)
    yield Bound("removed", sum(x.startswith("- ") for x in diff), "lines", "=", 0)
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        plain, killed = Path(a), Path(b)
        code = subprocess.run(
            [sys.executable, "figures/scripts/hand_loop.py", a, str(ITERATIONS)], cwd=ROOT, check=False
        ).returncode
        code += _run("figures/scripts/hand_loop_everstep.py", killed, 1)
        differ = sum(_losses(plain)[i] != _losses(killed).get(i) for i in range(1, ITERATIONS + 1))
        x, y = torch.load(plain / "final.pt"), torch.load(killed / "final.pt")
        same = all(torch.equal(x[k], y[k]) for k in x)
    yield Bound("exit", code, "", "=", 0)
    yield Bound(
        "losses-that-differ",
        differ,
        f"of {ITERATIONS}, after a kill, from the unchanged script's undisturbed run",
        "=",
        0,
    )
    yield Bound("final-weights-differ", int(not same), "", "=", 0)
