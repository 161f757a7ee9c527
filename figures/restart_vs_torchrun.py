"""A killed worker reaches its next new step sooner than under torchrun.

The same script under both launchers, alternating.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import ROOT, descendants

BIN = Path(sys.executable).parent
LAUNCHERS = {
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"],
    "everstep": [str(BIN / "everstep"), "run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"],
}
HUNG = 40.0


def _lines(out: Path, rank: int) -> list[list[str]]:
    path = out / f"log-{rank}"
    return [x.split() for x in path.read_text().splitlines() if x] if path.exists() else []


def _restart(launcher: str) -> tuple[float, float] | None:
    """Returns the seconds from a kill to the next new step, with and without process start.

    ``None``: the run hung or failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        command = [
            *LAUNCHERS[launcher],
            "figures/scripts/plain_ddp.py",
            "--steps",
            "100000",
            "--save",
            "--out",
            scratch,
        ]
        env = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "EVERSTEP_STATE_DIR": str(out / "state"),
        }
        run = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while len(_lines(out, 1)) < 150 and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(2)
            reached = max(int(x[1]) for x in _lines(out, 0) if x[0] == "step")
            began = time.time()
            os.kill(int(_lines(out, 1)[0][4]), signal.SIGKILL)
            while time.time() - began < HUNG and run.poll() is None:
                new = [
                    float(x[2])
                    for x in _lines(out, 0)
                    if x[0] == "step" and int(x[1]) > reached + 3 and float(x[2]) > began
                ]
                starts = [x for x in _lines(out, 0) if x[0] == "start"]
                if new and len(starts) > 1:
                    total = min(new) - began
                    process, _, imported = (float(t) for t in starts[1][1:4])
                    return total, total - (imported - process)
                time.sleep(0.01)
            return None
        finally:
            for pid in [*descendants(run.pid), run.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            run.wait()


def _launch(launcher: str) -> float:
    """Returns the seconds from the command line to the script's first line, on the last rank."""
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "first.py"
        script.write_text(
            "import os, time\nopen(f'{os.path.dirname(__file__)}/at-' + os.environ['RANK'], 'w').write(str(time.time()))\n"
        )
        began = time.time()
        env = {**os.environ, "EVERSTEP_STATE_DIR": str(Path(scratch) / "state")}
        subprocess.run([*LAUNCHERS[launcher], str(script)], env=env, capture_output=True, check=True)
        return max(float(p.read_text()) for p in Path(scratch).glob("at-*")) - began


def measure(soak: bool) -> Iterator[Bound]:
    trials = 20 if soak else 7
    totals: dict[str, list[tuple[float, float]]] = {"torchrun": [], "everstep": []}
    hung = {"torchrun": 0, "everstep": 0}
    launches: dict[str, list[float]] = {"torchrun": [], "everstep": []}
    for _ in range(trials):
        for launcher in LAUNCHERS:
            found = _restart(launcher)
            if found is None:
                hung[launcher] += 1
            else:
                totals[launcher].append(found)
            launches[launcher].append(_launch(launcher))

    def median(launcher: str, which: int) -> float:
        return statistics.median(t[which] for t in totals[launcher])

    def spread(which: int) -> str:
        text = [
            f"{n} {median(n, which):.2f} s [{min(t[which] for t in v):.2f}, {max(t[which] for t in v):.2f}]"
            for n, v in totals.items()
        ]
        return "of torchrun's: " + ", ".join(text)

    yield Bound(
        "kill-to-new-step",
        round(median("everstep", 0) / median("torchrun", 0), 3),
        spread(0),
        "<=",
        0.6,
        samples=tuple(totals.items()),
    )
    yield Bound("without-process-start", round(median("everstep", 1) / median("torchrun", 1), 3), spread(1), "<=", 0.3)
    first = {n: statistics.median(v) for n, v in launches.items()}
    yield Bound(
        "launch",
        round(first["everstep"] / first["torchrun"], 3),
        f"of torchrun's: everstep {first['everstep']:.2f} s, torchrun {first['torchrun']:.2f} s to the first line of user code",
        "<=",
        0.6,
        samples=tuple(launches.items()),
    )
    yield Bound("hung", hung["everstep"], f"of {trials} (torchrun: {hung['torchrun']})", "=", 0)
