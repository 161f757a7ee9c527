"""A job that runs while a test interferes with it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.cluster import EVERSTEP

#: Steps forever. A rank executes once what it finds in a file.
LOOP = """
import atexit, os, pathlib, time
import torch, everstep
out = pathlib.Path(os.environ["OUT"])
rank = os.environ["RANK"]
def slowly():
    time.sleep(1.0)
    (out / f"down-{rank}").write_text("written to its end")
atexit.register(slowly)
model = torch.nn.Linear(2, 2)
ckpt = everstep.CheckpointManager(out / "ckpt", model=model)
for step in ckpt.steps(100_000):
    (out / f"step-{rank}").write_text(str(step))
    ask = out / f"ask-{rank}"
    if ask.exists():
        what = ask.read_text()
        ask.unlink()
        exec(what)
    time.sleep(0.02)
"""


def wait(what: Callable[[], Any], seconds: float = 90) -> Any:
    """Calls ``what`` until it returns a true value. Missing or incomplete answers do not count."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError):
            if value := what():
                return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")


def workers(env: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the workers of the only job in an environment, as ``everstep status`` describes
    them."""
    line = [str(EVERSTEP), "status", "--json"]
    said = subprocess.run(line, env=env, capture_output=True, text=True, timeout=30, check=False).stdout
    return list(json.loads(said)["jobs"][0]["workers"])


class Job:
    """A running job with two workers."""

    def __init__(self, env: dict[str, str], out: Path, script: str, options: list[str]) -> None:
        self.env, self.out = {**env, "OUT": str(out), "EVERSTEP_KERNEL_LOG": str(out / "kmsg")}, out
        (out / "kmsg").touch()
        line = [str(EVERSTEP), "run", "--standalone", "--name", "job", "--nproc-per-node", "2", *options, script]
        self.agent = subprocess.Popen(line, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(EVERSTEP), *words], env=self.env, capture_output=True, text=True, timeout=30, check=False
        )

    def wait(self, what: Callable[[], Any], seconds: float = 60) -> Any:
        return wait(what, seconds)

    def steps(self, more: int = 20) -> None:
        """Waits until both workers have made ``more`` further steps."""
        for rank in (0, 1):
            at = self.out / f"step-{rank}"
            now = int(at.read_text() or 0) if at.exists() else 0
            self.wait(lambda at=at, now=now: int(at.read_text()) >= now + more)

    def incident(self, number: int) -> dict[str, Any]:
        """Waits until an incident is over, and returns it."""

        def over() -> dict[str, Any] | None:
            seen = json.loads(self.ask("explain", f"inc-{number}", "--json").stdout)["incident"]
            return seen if seen["outcome"] == "Recovered" else None

        return dict(self.wait(over))

    def pid(self, rank: int) -> int:
        return int(next(w["pid"] for w in workers(self.env) if w["rank"] == rank))
