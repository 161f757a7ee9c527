"""A directory belongs to one job at a time, and the contents of memory to one directory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import EVERSTEP, Run
from torch import nn

import everstep as es
from harness.cluster import free_port

#: Trains until the file `stop` exists, and reports its steps on standard output. The second
#: argument shortens the owner's timeout.
_LOOP = """
import os, pathlib, sys, time
import torch
from torch import nn
import everstep as es
from everstep import directory

out, stop = sys.argv[1], pathlib.Path(sys.argv[2])
directory.SILENCE = float(sys.argv[3]) if len(sys.argv) > 3 else directory.SILENCE
last = int(os.environ.get("LAST", 10**9))
torch.manual_seed(0)
model = nn.Linear(4, 4)
ckpt = es.CheckpointManager(out, model=model, persist=1, keep=100)
done = ckpt.restore()
print(f"start {done}\\n", end="", flush=True)  # one write: ranks share the console
while not stop.exists() and done < last:
    done += 1
    with torch.no_grad():
        model.weight.fill_(done)
    ckpt.step(done)
    print(f"step {done}\\n", end="", flush=True)
    time.sleep(float(os.environ.get("PAUSE", 0.05)))
if done == last and "DIE" in os.environ:
    ckpt.wait("disk")
    os.kill(os.getpid(), 9)
ckpt.close()
"""


@contextmanager
def _started(*line: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _reaches(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if line.startswith(word):
            return line
    raise AssertionError(process.stderr.read())


def _steps(out: Path) -> set[int]:
    return {
        int(p.name.removeprefix("step-"))
        for p in out.glob("step-*")
        if (p / "manifest.json").exists() and ".tmp" not in p.name
    }


def _epoch(out: Path) -> int:
    return max(int(p.stem.rpartition("-")[2]) for p in out.glob("everstep-owner-*.json"))


def test_a_second_job_in_the_directory_is_refused_and_the_first_goes_on(
    tmp_path: Path, script: Callable[[str], str]
) -> None:
    train, out, stop = script(_LOOP), tmp_path / "out", tmp_path / "stop"
    with _started(sys.executable, train, str(out), str(stop)) as first:
        _reaches(first, "step 3")
        # Reading needs no ownership.
        assert es.CheckpointManager(out, model=nn.Linear(4, 4)).restore() >= 2
        second = subprocess.run(
            [sys.executable, train, str(out), str(stop)], capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode == 1
        assert (
            "belongs to" in second.stderr
            and f"pid {first.pid}" in second.stderr
            and "another directory" in second.stderr
        )
        assert "step" not in second.stdout.replace("start", "")
        at = int(_reaches(first, "step").split()[1])
        _reaches(first, f"step {at + 2}")
        stop.touch()
        assert first.wait(30) == 0


def test_everstep_run_ends_with_78_where_another_job_is(
    everstep: Run, env: dict[str, str], tmp_path: Path, script: Callable[[str], str]
) -> None:
    train, out, stop = script(_LOOP), tmp_path / "out", tmp_path / "stop"
    with _started(EVERSTEP, "run", "--standalone", "--name", "one", train, str(out), str(stop), env=env) as first:
        _reaches(first, "step 2")
        second = everstep("run", "--standalone", "--name", "two", train, str(out), str(stop))
        assert second.returncode == 78, second.stderr
        assert "belongs to job one" in second.stderr and f"pid {first.pid}" in second.stderr
        assert "was lost" not in second.stderr and "exited with code" not in second.stderr, second.stderr
        explained = everstep("explain", "--job", "two").stdout
        assert "no incident" in explained and "exit code 78" in explained and "belongs to job one" in explained
        # The coordinator goes soon. Until then, it says the same.
        status = everstep("status", "two")
        assert status.returncode == 69 or "belongs to job one" in status.stdout, status.stdout
        at = int(_reaches(first, "step").split()[1])
        _reaches(first, f"step {at + 2}")
        stop.touch()
        assert first.wait(30) == 0


def test_a_job_on_two_nodes_ends_with_78_on_both(
    everstep: Run, env: dict[str, str], tmp_path: Path, script: Callable[[str], str]
) -> None:
    train, out, stop = script(_LOOP), tmp_path / "out", tmp_path / "stop"
    with _started(EVERSTEP, "run", "--standalone", "--name", "one", train, str(out), str(stop), env=env) as first:
        _reaches(first, "step 2")
        line = [EVERSTEP, "run", "--name", "two", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        nodes = [
            subprocess.Popen(
                [*line, "--node-rank", str(node), train, str(out), str(stop)],
                env=env,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node in range(2)
        ]
        # The node that does not lead waits a minute for the one that does.
        said = [node.communicate(timeout=120)[1] for node in nodes]
        stop.touch()
        assert first.wait(30) == 0
    assert [node.returncode for node in nodes] == [78, 78], said
    reasons = {
        [line for line in text.splitlines() if "cannot use the checkpoint directory" in line][-1] for text in said
    }
    assert len(reasons) == 1 and "belongs to job one" in reasons.pop(), said
    explained = everstep("explain", "--job", "two").stdout
    assert "no incident" in explained and "belongs to job one" in explained, explained


def test_a_killed_owner_is_followed_at_once(tmp_path: Path, script: Callable[[str], str]) -> None:
    train, out, stop = script(_LOOP), tmp_path / "out", tmp_path / "stop"
    with _started(sys.executable, train, str(out), str(stop)) as first:
        _reaches(first, "step 3")
        first.kill()
        first.wait()
        epoch = _epoch(out)
        with _started(sys.executable, train, str(out), str(stop)) as second:
            start = int(_reaches(second, "start").split()[1])
            assert start >= 2
            _reaches(second, f"step {start + 1}")
            assert _epoch(out) == epoch + 1
            second.kill()
            # What waits for a live owner to fall silent says so.
            assert second.stderr is not None and "taking over" not in second.stderr.read()


def test_an_owner_that_wakes_up_late_publishes_nothing(tmp_path: Path, script: Callable[[str], str]) -> None:
    train, out, stop = script(_LOOP), tmp_path / "out", tmp_path / "stop"
    with _started(sys.executable, train, str(out), str(stop)) as first:
        _reaches(first, "step 3")
        first.send_signal(signal.SIGSTOP)
        env = {**os.environ, "PAUSE": "0.2"}
        with _started(sys.executable, train, str(out), str(stop), "3", env=env) as second:
            start = int(_reaches(second, "start").split()[1])
            _reaches(second, f"step {start + 3}")
            first.send_signal(signal.SIGCONT)
            assert first.wait(60) == 1
            assert first.stderr is not None and "taken over" in first.stderr.read()
            _reaches(second, "step")
            stop.touch()
            assert second.wait(30) == 0
        new = _epoch(out)
        for step in _steps(out):
            writer = json.loads((out / f"step-{step}/manifest.json").read_text())["manifest"]["writer"]
            assert (writer["epoch"] == new) == (step > start), (step, start, writer)


def test_memory_is_used_for_its_own_directory_only(everstep: Run, tmp_path: Path, script: Callable[[str], str]) -> None:
    train, stop = script(_LOOP), tmp_path / "stop"

    def run(out: Path, last: int, **more: str) -> subprocess.CompletedProcess[str]:
        line = ("run", "--standalone", "--name", "same", "--max-restarts", "0", train, str(out), str(stop))
        return everstep(*line, LAST=str(last), **more)

    a, b = tmp_path / "a", tmp_path / "b"
    assert run(a, 5, DIE="1").returncode != 0
    other = run(b, 3, DIE="1")
    assert "start 0" in other.stdout and "which belongs to another checkpoint directory" in other.stderr, other.stderr
    assert "fresh start" in other.stderr
    # Deleting the directory starts anew, whatever memory holds.
    shutil.rmtree(b)
    anew = run(b, 2, DIE="1")
    assert "start 0" in anew.stdout, anew.stdout
    # Its own memory is used, and reported as such.
    again = run(b, 4)
    assert "start 2" in again.stdout and "restored step 2 from memory" in again.stderr, again.stderr


#: Trains until it is killed. Writes nothing to disk unless asked to.
_IN_MEMORY = """
import sys, time
import torch
from torch import nn
import everstep as es

model = nn.Linear(4, 4)
ckpt = es.CheckpointManager(sys.argv[1], model=model, persist=10_000, every=1, replicated=True)
done = ckpt.restore()
assert done == 0 or bool((model.weight == done).all())
print(f"start {done}\\n", end="", flush=True)  # one write: ranks share the console
while done < int(sys.argv[2]):
    done += 1
    with torch.no_grad():
        model.weight.fill_(done)
    ckpt.step(done)
    print(f"step {done}\\n", end="", flush=True)
    time.sleep(0.02)
ckpt.close()
"""


def test_memory_of_a_killed_nameless_job_is_found_by_its_directory(
    env: dict[str, str], tmp_path: Path, script: Callable[[str], str]
) -> None:
    out, train = tmp_path / "out", script(_IN_MEMORY)
    line = [EVERSTEP, "run", "--standalone", "--nproc-per-node", "2", train, str(out)]
    with _started(*line, "100000", env=env) as first:
        assert _reaches(first, "start").strip() == "start 0"
        lines: list[str] = []
        while lines.count("step 30\n") < 2:
            lines.append(_reaches(first, "step"))
        first.kill()
        assert first.stdout is not None
        # What it printed before it died. Its workers die with it.
        lines += first.stdout.readlines()
        last = max(int(row.split()[1]) for row in lines if row.startswith("step") and lines.count(row) == 2)
    memory = Path(env["EVERSTEP_SHM_DIR"]) if "EVERSTEP_SHM_DIR" in env else None
    with _started(*line, str(last + 5), env=env) as second:
        begun, said = second.communicate(timeout=120)
    started = {int(row.split()[1]) for row in begun.splitlines() if row.startswith("start")}
    # How far the job was behind its ranks depends on how busy the machine is.
    assert len(started) == 1 and 0 < started.pop() <= last + 1, (last, begun, said)
    assert "using the checkpoints that it left in memory" in said and second.returncode == 0, said
    assert memory is None or not list(memory.glob("*/job-*/0/*-slot-*")), "nothing is left behind"


def test_memory_is_not_taken_from_a_job_that_another_one_followed(
    env: dict[str, str], tmp_path: Path, script: Callable[[str], str]
) -> None:
    """The other job went back and wrote its own branch, so the first job's memory is not its
    past."""
    out, train = tmp_path / "out", script(_IN_MEMORY)
    with _started(EVERSTEP, "run", "--standalone", train, str(out), "100000", env=env) as first:
        _reaches(first, "step 30")
        first.kill()
        assert first.stdout is not None
        first.stdout.read()
    plain = subprocess.run(
        [sys.executable, train, str(out), "3"], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert plain.returncode == 0 and "start 0" in plain.stdout, plain
    with _started(EVERSTEP, "run", "--standalone", train, str(out), "5", env=env) as last:
        begun, said = last.communicate(timeout=120)
    assert "start 3" in begun and "left in memory" not in said, (begun, said)


def test_a_loop_that_does_not_restore_is_refused_beside_checkpoints(tmp_path: Path) -> None:
    first = es.CheckpointManager(tmp_path, model=nn.Linear(2, 2), persist=1)
    first.step(1)
    first.close()
    second = es.CheckpointManager(tmp_path, model=nn.Linear(2, 2), persist=1)
    with pytest.raises(es.CheckpointError, match=r"without restore\(\).*up to step 1"):
        second.step(1)
    assert second.restore() == 1
    second.step(2)
    second.close()


def test_every_start_says_what_it_restored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    for start in (0, 1):
        ckpt = es.CheckpointManager(tmp_path, model=nn.Linear(2, 2), persist=1)
        assert ckpt.restore() == start
        said = capfd.readouterr().err
        assert ("fresh start: no checkpoint in" if start == 0 else "restored step 1 from disk") in said and str(
            tmp_path
        ) in said
        ckpt.step(start + 1)
        ckpt.close()


def test_a_copy_of_a_directory_has_its_own_memory_and_owner(
    everstep: Run, env: dict[str, str], tmp_path: Path, script: Callable[[str], str]
) -> None:
    train, stop, out, copy = script(_LOOP), tmp_path / "stop", tmp_path / "out", tmp_path / "copy"
    line = ("run", "--standalone", "--name", "same", "--max-restarts", "0", train)
    assert everstep(*line, str(out), str(stop), LAST="5", DIE="1").returncode != 0
    shutil.copytree(out, copy, symlinks=True)
    # What the original has in memory is newer than what was copied.
    later = everstep(*line, str(out), str(stop), LAST="8", DIE="1")
    assert "start 5" in later.stdout and max(_steps(copy)) == 5, later.stderr
    of_copy = everstep(*line, str(copy), str(stop), LAST="6", DIE="1")
    assert "start 5" in of_copy.stdout, (of_copy.stdout, of_copy.stderr)
    assert 5 in _steps(copy) and 8 not in _steps(copy)
    # The owner of the original is no owner of a copy.
    with _started(EVERSTEP, "run", "--standalone", "--name", "first", train, str(out), str(stop), env=env) as first:
        _reaches(first, "step")
        shutil.rmtree(copy)
        # What is published meanwhile may be gone before it is copied.
        subprocess.run(["cp", "-r", str(out), str(copy)], capture_output=True, check=False)
        second = everstep("run", "--standalone", "--name", "second", train, str(copy), str(stop), LAST="100", PAUSE="0")
        assert second.returncode == 0 and "step" in second.stdout, second.stderr
        assert "taking over" not in second.stderr, second.stderr
        stop.touch()
        assert first.wait(30) == 0


def test_a_backup_in_the_place_of_a_directory_is_restored_as_it_is(
    everstep: Run, tmp_path: Path, script: Callable[[str], str]
) -> None:
    train, stop, out, backup = script(_LOOP), tmp_path / "stop", tmp_path / "out", tmp_path / "backup"
    line = ("run", "--standalone", "--name", "same", "--max-restarts", "0", train, str(out), str(stop))
    assert everstep(*line, LAST="5", DIE="1").returncode != 0
    shutil.copytree(out, backup, symlinks=True)
    # What is in memory is newer, and of the directory that is moved away.
    assert "start 5" in everstep(*line, LAST="8", DIE="1").stdout
    out.rename(tmp_path / "away")
    shutil.copytree(backup, out, symlinks=True)
    restored = everstep(*line, LAST="6", DIE="1")
    assert "start 5" in restored.stdout and "another checkpoint directory" in restored.stderr, restored.stderr
