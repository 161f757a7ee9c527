"""A killed worker of Transformers or Lightning is back sooner than under torchrun.

The same scripts under both launchers, alternating.
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

from figures import frameworks
from figures.bound import Bound
from harness.cluster import ROOT, descendants

OPTIONS = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
#: Seconds between the first step and the kill, so that importing ahead has finished.
SETTLED = 45.0
HUNG = 90.0


def _steps(out: Path, rank: int) -> list[tuple[int, float, int]]:
    path = out / f"steps-{rank}"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(step), float(at), int(pid)) for step, at, pid in (line for line in lines if len(line) == 3)]


def _wait(out: Path, after: float, seconds: float) -> float | None:
    """Returns when both ranks have completed a step after this moment."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        new = [[at for _, at, pid in _steps(out, rank) if at > after] for rank in (0, 1)]
        if all(new):
            return max(at[0] for at in new)
        time.sleep(0.01)
    return None


def _restart(launcher: list[str], framework: str) -> float | None:
    """Returns the seconds from a kill to the next step of both ranks by new processes."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        env = {
            **frameworks.environment(),
            "EVERSTEP_STATE_DIR": str(out / "state"),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = [*launcher, *OPTIONS, "figures/scripts/framework_loop.py", "--framework", framework, "--out", scratch]
        run = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            if _wait(out, 0, 120) is None:
                return None
            time.sleep(SETTLED)
            old = {_steps(out, rank)[-1][2] for rank in (0, 1)}
            began = time.time()
            os.kill(_steps(out, 1)[-1][2], signal.SIGKILL)
            while time.time() - began < HUNG and run.poll() is None:
                new = [[at for _, at, pid in _steps(out, rank) if pid not in old] for rank in (0, 1)]
                if all(new):
                    return max(at[0] for at in new) - began
                time.sleep(0.01)
            return None
        finally:
            for pid in [*descendants(run.pid), run.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            run.wait()


def measure(soak: bool) -> Iterator[Bound]:
    trials = 9 if soak else 3
    launchers = {
        "torchrun": [str(frameworks.python()), "-m", "torch.distributed.run"],
        "everstep": [str(Path(sys.executable).parent / "everstep"), "run"],
    }
    for framework in ("transformers", "lightning"):
        found: dict[str, list[float]] = {"torchrun": [], "everstep": []}
        failed = {"torchrun": 0, "everstep": 0}
        for _ in range(trials):
            for name, launcher in launchers.items():
                seconds = _restart(launcher, framework)
                if seconds is None:
                    failed[name] += 1
                else:
                    found[name].append(seconds)
        medians = {name: statistics.median(times) if times else HUNG for name, times in found.items()}
        spread = ", ".join(f"{n} [{min(t, default=HUNG):.2f}, {max(t, default=HUNG):.2f}]" for n, t in found.items())
        yield Bound(
            f"{framework}.seconds",
            round(medians["everstep"], 2),
            f"s from the kill to the next step, median of {trials}; {spread}",
            "<=",
            1.5,
            samples=tuple(found.items()),
        )
        ratio = round(medians["everstep"] / medians["torchrun"], 3)
        yield Bound(
            f"{framework}.ratio",
            ratio,
            f"of torchrun's {medians['torchrun']:.2f} s (torchrun did not come back {failed['torchrun']} times)",
            "<=",
            0.25,
        )
        yield Bound(f"{framework}.failed", failed["everstep"], f"of {trials} restarts that did not happen", "=", 0)
