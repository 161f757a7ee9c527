"""Programs that a script starts do not count as its rank, although they inherit the rank's
environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from conftest import Run

#: Starts a helper after step 10, and dies at step 20 of its first attempt.
TRAINING = """
import os, signal, subprocess, sys, time
import torch
import everstep

out, helper, last = sys.argv[1], sys.argv[2], 30
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.Adam(model.parameters())
ckpt = everstep.CheckpointManager(out, model=model, optimizer=optimizer, persist=10)
done = ckpt.restore()
print(f"start {done}", flush=True)
while done < last:
    done += 1
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    ckpt.step(done)
    if done == 10:
        ckpt.wait("disk")
        subprocess.run([sys.executable, helper, out], check=False)
        time.sleep(1)  # the agent looks ten times a second
    if done == 20 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
ckpt.close()
print(f"end {done}", flush=True)
"""

#: Uses everstep, and comes to its end.
EVALUATION = """
import sys
import torch
import everstep

with everstep.section("evaluation"):
    everstep.heartbeat(5)
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.Adam(model.parameters())
print("restored", everstep.CheckpointManager(sys.argv[1], model=model, optimizer=optimizer).restore(), flush=True)
"""


def _train(
    everstep: Run, script: Callable[[str, str], str], out: Path, helper: str
) -> subprocess.CompletedProcess[str]:
    line = ("run", "--standalone", "--name", "job", script(TRAINING, "training.py"), str(out))
    return everstep(*line, script(helper, "helper.py"), timeout=120)


def test_the_end_of_a_helper_is_not_the_end_of_the_training(everstep, script, tmp_path) -> None:
    done = _train(everstep, script, tmp_path / "out", "import everstep; everstep.heartbeat(); print('helped')")
    assert done.returncode == 0, done.stderr
    assert "helped" in done.stdout and "start 20" in done.stdout and "end 30" in done.stdout, done.stdout
    assert "restart 1" in done.stderr and "counts as finished" not in done.stderr, done.stderr


def test_a_helper_reads_the_checkpoints_of_a_running_training(everstep, script, tmp_path) -> None:
    done = _train(everstep, script, tmp_path / "out", EVALUATION)
    assert done.returncode == 0, done.stderr
    assert "restored 10" in done.stdout and "end 30" in done.stdout, (done.stdout, done.stderr)


def test_an_exception_in_a_helper_is_not_the_ranks(everstep, script, tmp_path) -> None:
    done = _train(everstep, script, tmp_path / "out", "import everstep; everstep.heartbeat(); raise ValueError('mine')")
    assert done.returncode == 0 and "end 30" in done.stdout, (done.stdout, done.stderr)
    said = everstep("explain", "inc-1").stdout
    assert "mine" not in said and "SIGKILL" in said, said


def test_the_second_program_of_a_shell_script_is_restarted(everstep, tmp_path, script) -> None:
    program = script(
        """
import os, signal, sys
import torch
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.Adam(model.parameters())
for step in range(1, 31):
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    if sys.argv[1] == "second" and step == 10 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
print("end", sys.argv[1], flush=True)
"""
    )
    shell = tmp_path / "job.sh"
    python = sys.executable
    shell.write_text(f"#!/bin/sh\nset -e\n{python} {program} first\n{python} {program} second\n")
    shell.chmod(0o755)
    done = everstep("run", "--standalone", "--no-python", str(shell), timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("end ")[1:] == ["first\n", "first\n", "second\n"], done.stdout


def test_a_program_that_starts_the_training_leaves_the_rank_to_it(everstep, script, tmp_path) -> None:
    wrapper = script(
        "import subprocess, sys, torch, everstep\n"
        "everstep.heartbeat()\n"
        "sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)\n",
        "wrapper.py",
    )
    line = (script(TRAINING, "training.py"), str(tmp_path / "out"), script("pass", "helper.py"))
    done = everstep("run", "--standalone", "--max-restarts", "1", wrapper, *line, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "start 20" in done.stdout and "end 30" in done.stdout, (done.stdout, done.stderr)


def test_a_helper_from_before_the_first_step_is_not_the_rank(everstep, script) -> None:
    program = script(
        """
import atexit, os, subprocess, sys
atexit.register(os.abort)  # torch does that now and then when the interpreter shuts down
import torch
line = [sys.executable, "-c", "import everstep; everstep.heartbeat(); print('ready', flush=True); input()"]
helper = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert helper.stdout.readline() == "ready\\n"
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.Adam(model.parameters())
for step in range(1, 6):
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
print("trained", flush=True)
"""
    )
    done = everstep("run", "--standalone", "--max-restarts", "1", program, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 1 and "counts as finished" in done.stderr, (done.stdout, done.stderr)


def test_a_forked_child_does_not_speak_for_the_rank(everstep, script, tmp_path) -> None:
    program = script(
        """
import os, sys, everstep
everstep.report_error(RuntimeError("of the rank"))
child = os.fork()
if child == 0:
    everstep.report_error(RuntimeError("of the child"))
    os._exit(0)
os.waitpid(child, 0)
sys.exit(3)
"""
    )
    done = everstep("run", "--standalone", "--max-restarts", "0", program, timeout=120)
    assert done.returncode != 0
    assert "of the rank" in done.stderr and "of the child" not in done.stderr, done.stderr


def test_reading_a_checkpoint_writes_none(tmp_path) -> None:
    import torch

    import everstep as es

    def objects():
        model = torch.nn.Linear(2, 2)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    training = objects()
    ckpt = es.CheckpointManager(tmp_path, persist=1, **training)
    ckpt.restore()
    for step in (1, 2, 3):
        training["model"](torch.ones(1, 2)).sum().backward()
        training["optimizer"].step()
        ckpt.step(step)
    ckpt.close()
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    for step in (None, 2):
        reader = es.CheckpointManager(tmp_path, model=torch.nn.Linear(2, 2))
        assert reader.restore(step=step) == (step or 3)
        reader.close()
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    assert es.CheckpointManager(tmp_path, **objects()).restore() == 3
