"""Signals that ask a job to stop: while its ranks start, in a handler, and sent to all of its
processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import EVERSTEP

from harness.live import wait, workers

_ONE_WAITS = """
import os, time, torch, everstep
if os.environ["RANK"] == "1": open("1", "w").close()
if os.environ["RANK"] == "1": time.sleep(600)
ckpt = everstep.CheckpointManager("out", model=torch.nn.Linear(2, 2))
for step in ckpt.steps(10): pass
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_waits_to_restore_for_one_that_has_ended_does_not_delay_the_end(
    number: signal.Signals, env: dict[str, str], script: Callable[[str], str], tmp_path: Path
) -> None:
    line = [EVERSTEP, "run", "--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "3600", script(_ONE_WAITS)]
    # A shell starts what runs in its background with SIGINT ignored, and so would the ranks be.
    run = subprocess.Popen(
        line,
        env=env,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        # Rank 0 has its own handler of SIGTERM by then.
        wait(lambda: (tmp_path / "1").exists() and any(w["doing"] == "section restore" for w in workers(env)))
        run.send_signal(number)
        _, said = run.communicate(timeout=120)
        assert run.returncode == 128 + number, said
    finally:
        run.kill()


_HANDLER_ASKS = """
import os, signal, time, torch, everstep
def ask(*_):
    everstep.report_error(RuntimeError("low on memory"))
    print("asked", flush=True)
    open("asked", "w").close()
signal.signal(signal.SIGALRM, ask)
ckpt = everstep.CheckpointManager("out", model=torch.nn.Linear(2, 2))
if os.environ["RANK"] == "0": signal.setitimer(signal.ITIMER_REAL, 1)
while os.environ["RANK"] == "1" and not os.path.exists("asked"): time.sleep(0.05)
for step in ckpt.steps(2): print("step", step, flush=True)
"""


def test_a_signal_handler_may_ask_the_agent_while_its_rank_waits_for_it(
    everstep: Callable[..., subprocess.CompletedProcess[str]], script: Callable[[str], str]
) -> None:
    done = everstep("run", "--standalone", "--nproc-per-node", "2", script(_HANDLER_ASKS), timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("asked") == 1 and done.stdout.split().count("step") == 4, done.stdout


_SAVES = """
import os, pathlib, signal, sys, time
def save(*_):
    time.sleep(0.5)
    pathlib.Path("saved").write_text("all of it")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path("ready").touch()
while True: time.sleep(0.1)
"""


def _of_job(name: str) -> list[int]:
    """Returns the processes that serve a job, and its workers."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"EVERSTEP_JOB={name}".encode() in environment or (b"everstep" in line and name.encode() in line):
                found.append(int(entry.name))
    return found


def test_a_scheduler_may_signal_all_processes_of_a_job(
    env: dict[str, str], script: Callable[[str], str], tmp_path: Path
) -> None:
    name = f"all-{os.getpid()}"
    line = [EVERSTEP, "run", "--standalone", "--name", name, script(_SAVES)]
    run = subprocess.Popen(line, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        # The agent, its guard, the coordinator and the worker.
        wait(lambda: (tmp_path / "ready").exists() and len(_of_job(name)) >= 4)
        for process in _of_job(name):
            os.kill(process, signal.SIGTERM)
        _, said = run.communicate(timeout=120)
        assert run.returncode == 143, said
        assert (tmp_path / "saved").exists(), said
        assert "the script may save what it has" in said, said
    finally:
        run.kill()
