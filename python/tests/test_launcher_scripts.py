"""A launcher script that always exits with 0 hides how its training ended; everstep finds out, or
says that it cannot."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import EVERSTEP

LAUNCHER = """
import subprocess, sys
subprocess.call([sys.executable, *sys.argv[1:]])
sys.exit(0)
"""

#: Trains 12 steps. Runs `EARLY` before each one, and `END` after all.
TRAINING = """
import os, sys, time
import torch, everstep

life, total = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), 12
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = everstep.CheckpointManager(sys.argv[1], model=model, optimizer=optimizer)
counted = "COUNTED" in os.environ
for step in ckpt.steps(total) if counted else range(ckpt.restore(), total):
    exec(os.environ.get("EARLY", ""))
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    counted or ckpt.step(step + 1)
    print(f"step {step + 1}", flush=True)
exec(os.environ.get("END", ""))
"""

KILLED = "if step == 7 and life == 0: print(f'killed {os.getpid()}', flush=True), os.kill(os.getpid(), 9)"


#: Runs the training in a forked process, and returns its exit code.
FORKS = """
import multiprocessing, runpy, sys
sys.argv = sys.argv[1:]
process = multiprocessing.get_context("fork").Process(target=runpy.run_path, args=(sys.argv[0],))
process.start(), process.join()
sys.exit(process.exitcode)
"""

#: Launchers that have the step board before the training or after it.
CLAIMS = {
    "imports-torch": "import torch\n" + LAUNCHER,
    "evaluates": LAUNCHER.replace(
        "sys.exit(0)", "subprocess.check_call([sys.executable, '-c', 'import torch, everstep; everstep.heartbeat()'])"
    ),
}


@pytest.fixture
def launched(everstep, script, tmp_path):
    """Runs the training behind the launcher script."""

    def run(*options: str, launcher: str = LAUNCHER, **how: str) -> subprocess.CompletedProcess[str]:
        line = [script(launcher, "launcher.py"), script(TRAINING, "training.py"), str(tmp_path / "out")]
        return everstep("run", "--standalone", "--name", "job", *options, *line, timeout=90, **how)

    return run


def _killed(done: subprocess.CompletedProcess[str]) -> str:
    return next(line for line in done.stdout.splitlines() if "killed" in line).split()[-1]


def test_a_training_that_is_killed_before_its_last_step_is_restarted(launched, everstep):
    done = launched(COUNTED="1", EARLY=KILLED)
    assert done.returncode == 0, done.stderr
    steps = [line.split()[-1] for line in done.stdout.splitlines() if "step " in line]
    assert steps == [str(n) for n in range(1, 13)], done.stdout
    told = f"process {_killed(done)}, which trained in its place, had ended at step 7 of 12"
    assert told in done.stderr and "restart 1" in done.stderr, done.stderr
    explained = everstep("explain", "inc-1").stdout
    assert told in explained and "trainer-vanished" in explained, explained


@pytest.mark.parametrize("launcher", CLAIMS)
def test_a_launcher_that_uses_everstep_itself_does_not_hide_a_killed_training(launched, launcher):
    done = launched(launcher=CLAIMS[launcher], COUNTED="1", EARLY=KILLED)
    assert done.returncode == 0 and "restart 1" in done.stderr, done.stderr
    assert f"process {_killed(done)}, which trained in its place, had ended at step 7 of 12" in done.stderr, done.stderr
    assert "step 12" in done.stdout, done.stdout


@pytest.mark.parametrize("launcher", CLAIMS)
def test_a_launcher_that_uses_everstep_itself_does_not_hide_an_unknown_end(launched, launcher):
    done = launched(launcher=CLAIMS[launcher], EARLY=KILLED)
    assert done.returncode == 0, done.stderr
    assert f"process {_killed(done)}, which trained up to step 7 as rank 0" in done.stderr, done.stderr


@pytest.mark.parametrize("end", ["", "if step == 7: sys.exit(0)", "if step == 7: os._exit(0)"])
def test_a_training_in_a_forked_process_ends_as_it_likes(launched, end):
    done = launched(launcher=FORKS, COUNTED="1", EARLY=end)
    assert done.returncode == 0 and "everstep: done" in done.stderr and "process " not in done.stderr, done.stderr
    assert done.stdout.count("step 1\n") == 1 and ("step 8" in done.stdout) == (not end), done.stdout


def test_a_killed_training_in_a_forked_process_is_restarted(launched):
    done = launched(launcher=FORKS, COUNTED="1", EARLY=KILLED)
    assert done.returncode == 0 and "restart 1" in done.stderr and "step 12" in done.stdout, done.stderr


def test_a_training_that_cannot_be_restarted_fails_the_job(launched):
    done = launched("--max-restarts", "0", COUNTED="1", EARLY=KILLED)
    assert done.returncode == 1 and "at step 7 of 12" in done.stderr, done.stderr
    assert "everstep: done" not in done.stderr, done.stderr


#: Ways in which a script ends itself before it is done.
GIVES_UP = {
    "interrupted": "print('killed', os.getpid(), flush=True); raise KeyboardInterrupt",
    "exits": "print('killed', os.getpid(), flush=True), sys.exit(3)",
}


@pytest.mark.parametrize("how", GIVES_UP)
def test_a_training_that_gives_up_before_its_last_step_is_restarted(launched, how):
    done = launched(COUNTED="1", EARLY=f"if step == 7 and life == 0: {GIVES_UP[how]}")
    assert done.returncode == 0 and "restart 1" in done.stderr, done.stderr
    assert f"process {_killed(done)}, which trained in its place, had ended at step 7 of 12" in done.stderr, done.stderr
    assert done.stdout.count("step 12") == 1, done.stdout


@pytest.mark.parametrize(
    "early",
    [
        KILLED,
        "if step == 7: print('killed', os.getpid(), flush=True), os._exit(3)",
        *(f"if step == 7: {early}" for early in GIVES_UP.values()),
    ],
)
def test_a_training_without_a_known_last_step_is_warned_about(launched, everstep, early):
    done = launched(EARLY=early)
    assert done.returncode == 0 and "done at step 7 after" in done.stderr, done.stderr
    told = f"process {_killed(done)}, which trained up to step 7 as rank 0"
    assert done.stderr.count(told) == 1 and "return the training's exit code" in done.stderr, done.stderr
    explained = everstep("explain").stdout
    assert "has had no incident" in explained and explained.count(told) == 1, explained
    document = json.loads(everstep("explain", "--json").stdout)
    assert document["incident"] is None and told in document["notes"][0], document


ENDS = {
    "counted": {"COUNTED": "1"},
    "counted-os-exit": {"COUNTED": "1", "END": "os._exit(0)"},
    "counted-left-early": {"COUNTED": "1", "EARLY": "if step == 7: sys.exit(0)"},
    "counted-left-early-os-exit": {"COUNTED": "1", "EARLY": "if step == 7: os._exit(0)"},
    "uncounted": {},
    "uncounted-left-early-os-exit": {"EARLY": "if step == 7: os._exit(0)"},
    "counted-failed": {"COUNTED": "1", "END": "sys.exit(3)"},
}


@pytest.mark.parametrize("end", ENDS)
def test_a_training_that_ends_normally_is_not_mentioned(launched, everstep, end):
    done = launched(**ENDS[end])
    assert done.returncode == 0 and "everstep: done" in done.stderr, done.stderr
    assert "process " not in done.stderr and "warning" not in done.stderr, done.stderr
    explained = everstep("explain").stdout
    assert explained.strip() == "job job has had no incident", explained


def test_an_evaluation_after_the_training_may_end_as_it_likes(everstep, script, tmp_path):
    launcher = script(
        "import subprocess, sys\n"
        "subprocess.check_call([sys.executable, *sys.argv[1:]])\n"
        "subprocess.call([sys.executable, '-c', 'import os, time, torch, everstep; everstep.heartbeat(); time.sleep(0.5); os._exit(0)'])\n",
        "launcher.py",
    )
    line = [launcher, script(TRAINING, "training.py"), str(tmp_path / "out")]
    done = everstep("run", "--standalone", *line, timeout=90, END="time.sleep(0.5)")
    assert done.returncode == 0 and "done at step 12 after" in done.stderr and "ended without" not in done.stderr, (
        done.stderr
    )


#: Aborts when its interpreter shuts down, as torch does now and then.
ABORTS = """
import atexit, os
atexit.register(os.abort)
import torch, everstep
everstep.heartbeat()
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.Adam(model.parameters())
for step in range(1, 6):
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
print("trained", flush=True)
"""

#: Launchers that exit with the exit code of the training.
FORWARDS = {
    "shell": f"{sys.executable} $1\nexit $?\n",
    "python": f"exec {sys.executable} -c 'import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))' {sys.executable} $1\n",
}


@pytest.mark.parametrize("launcher", FORWARDS)
def test_a_crash_after_the_end_is_known_behind_a_launcher_that_forwards_it(everstep, script, launcher):
    line = ["/bin/sh", script(FORWARDS[launcher], "run.sh"), script(ABORTS, "training.py")]
    done = everstep("run", "--standalone", "--no-python", *line, timeout=90)
    assert done.returncode == 0 and "counts as finished" in done.stderr, done.stderr
    assert done.stdout.count("trained") == 1, done.stdout


def test_an_exception_behind_a_launcher_that_hides_it_fails_the_job(everstep, script):
    training = script(
        """
import os, time, torch
rank = int(os.environ["RANK"])
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.Adam(model.parameters())
for step in range(1, 13):
    if step == 8 and rank == 0:
        time.sleep(0.5)  # the agent looks ten times a second
        raise ValueError("mine")
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    time.sleep(0.4 if rank == 1 and step > 7 else 0.05)
""",
        "training.py",
    )
    run = script(f"{sys.executable} {training} || true\n", "run.sh")
    line = ("run", "--standalone", "--name", "job", "--nproc-per-node", "2", "--no-python", "/bin/sh", run)
    done = everstep(*line, timeout=90)
    assert done.returncode == 1 and "ValueError: mine" in done.stderr, done.stderr
    assert "rank 0" in everstep("explain", "inc-1").stdout


def test_a_killed_training_is_the_cause_of_what_other_ranks_fail_at(everstep, script):
    training = script(
        """
import os, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.Adam(model.parameters())
for step in range(12):
    if step == 7 and rank == 0 and life == 0:
        print("killed", os.getpid(), flush=True), time.sleep(0.5), os.kill(os.getpid(), 9)
    model(torch.randn(2, 3)).sum().backward()
    dist.all_reduce(torch.ones(1))
    optimizer.step()
print("trained", flush=True)
dist.destroy_process_group()
""",
        "training.py",
    )
    run = script(f"{sys.executable} {training} || true\n", "run.sh")
    line = ("run", "--standalone", "--name", "job", "--nproc-per-node", "2", "--no-python", "/bin/sh", run)
    done = everstep(*line, timeout=120)
    assert done.returncode == 0 and "restart 1" in done.stderr, done.stderr
    assert done.stdout.count("trained") == 2, done.stdout
    explained = everstep("explain", "inc-1").stdout
    assert f"process {_killed(done)}, which trained in its place" in explained, explained
    assert "is not known" not in everstep("explain").stdout


def test_a_training_that_is_stopped_behind_a_launcher_is_a_hang(launched):
    done = launched(EARLY="if step == 7 and life == 0: os.kill(os.getpid(), 19)", COUNTED="1")
    assert done.returncode == 0 and "restart 1" in done.stderr and "step 12" in done.stdout, done.stderr
    assert "stopped" in done.stderr, done.stderr


@pytest.mark.parametrize("launcher", ["python", "shell"])
def test_asking_for_stacks_ends_no_launcher(env, everstep, script, tmp_path: Path, launcher):
    training = script(
        "import time, torch, everstep\neverstep.heartbeat()\n"
        "model = torch.nn.Linear(3, 3)\noptimizer = torch.optim.Adam(model.parameters())\n"
        "for step in range(400):\n    model(torch.randn(2, 3)).sum().backward(), optimizer.step()\n"
        "    print('trains', flush=True), time.sleep(0.05)\n",
        "training.py",
    )
    by_python = [sys.executable, script("import torch\n" + LAUNCHER, "launcher.py"), training]
    line = {"python": by_python, "shell": ["/bin/sh", "-c", f"{sys.executable} {training}; exit $?"]}[launcher]
    command = [EVERSTEP, "run", "--standalone", "--name", "job", "--max-restarts", "0", "--no-python", *line]
    with (tmp_path / "log").open("w") as log:
        agent = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 60
        while "trains" not in (tmp_path / "log").read_text() and agent.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        stacks = everstep("stacks", "job")
        assert stacks.returncode == 0 and "training.py" in stacks.stdout, stacks.stdout + stacks.stderr
        assert "training.py" in everstep("stacks", "job").stdout, (tmp_path / "log").read_text()
        assert agent.poll() is None, (tmp_path / "log").read_text()
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait(30)
