"""What surrounds a job may be strange: it works as under torchrun, or ends in one sentence with the right exit code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import EVERSTEP

STEPPING = """
import os, sys, time
from pathlib import Path
out = Path(sys.argv[1]); rank = os.environ["RANK"]
(out / f"started-{rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
while not (out / "end").exists():
    time.sleep(0.05)
"""


def _until(ready, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "not within {seconds} s"
        time.sleep(0.05)


def _coordinator(env: dict[str, str]) -> int:
    found = list(Path(env["EVERSTEP_STATE_DIR"]).glob("**/endpoint.json"))
    return int(json.loads(found[0].read_text())["pid"]) if found else 0


@contextlib.contextmanager
def _running(env: dict[str, str], tmp_path: Path, text: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "script.py").write_text(text)
    line = [EVERSTEP, "run", *options, str(tmp_path / "script.py"), str(tmp_path)]
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def test_a_coordinator_that_is_stopped_does_not_end_the_job(env, tmp_path):
    """Its connections are accepted by the kernel and never answered, which looks like another program on the port."""
    with _running(env, tmp_path, STEPPING, "--no-warm", "--detect-timeout", "500ms") as process:
        _until(lambda: (tmp_path / "started-0-0").exists() and _coordinator(env))
        coordinator = _coordinator(env)
        os.kill(coordinator, signal.SIGSTOP)
        assert process.stdout is not None
        lost = process.stdout.readline()
        assert "the coordinator does not answer" in lost, lost
        # Longer than an agent takes something else on the port for a coordinator that is starting.
        time.sleep(9)
        assert process.poll() is None, process.stdout.read()
        os.kill(coordinator, signal.SIGCONT)
        back = process.stdout.readline()
        assert "the coordinator is back" in back, back
        (tmp_path / "end").touch()
        assert process.wait(60) == 0, process.stdout.read()
        assert not (tmp_path / "started-0-1").exists()
