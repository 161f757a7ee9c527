"""A manager refuses uses that would mix or lose checkpoints, before it writes or restores
anything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Run
from torch import nn

import everstep as es

_BACK = """
import sys
from torch import nn
import everstep as es
model = nn.Linear(2, 2)
ckpt = es.CheckpointManager(sys.argv[1], model=model, persist=5, keep=10)
for step in range(ckpt.restore() + 1, 21):
    ckpt.step(step)
ckpt.wait("disk")
nn.init.constant_(model.weight, 7.0)
try:
    ckpt.restore(step=10)
finally:
    print("weight", model.weight[0, 0].item())
"""

_PAIR = """
import sys
from torch import nn
import everstep as es
one = es.CheckpointManager(sys.argv[1] + "/one", model=nn.Linear(2, 2), persist=5)
other = es.CheckpointManager(sys.argv[1] + "/other", model=nn.Linear(2, 2), persist=5)
done = one.restore()
print("one", done)
if "restore" in sys.argv:
    print("other", other.restore())
for step in range(done + 1, 21):
    one.step(step)
    other.step(step)
print("trained")
"""

_FORK = """
import os, sys
from torch import nn
import everstep as es
model = nn.Linear(2, 2)
ckpt = es.CheckpointManager(sys.argv[1], model=model, persist=1)
ckpt.restore()
ckpt.step(1)
child = os.fork()
if not child:
    try:
        ckpt.step(2)
    except es.CheckpointError as e:
        print(e, flush=True)
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
ckpt.step(2)
ckpt.close()
print("durable", ckpt.latest_step("disk"))
"""


def _manager(directory: Path) -> es.CheckpointManager:
    return es.CheckpointManager(directory, model=nn.Linear(2, 2), persist=1, keep=9)


def test_a_second_restore_in_a_start_is_refused_and_changes_nothing(
    everstep: Run, script: Callable[[str], str], tmp_path: Path
) -> None:
    done = everstep("run", "--standalone", "--max-restarts", "0", script(_BACK), str(tmp_path / "out"))
    assert done.returncode == 1
    assert "restore() was called twice in this process" in done.stderr
    assert "weight 7.0" in done.stdout
    # Without a launcher, no step is chosen for all ranks, and each restore() stands on its own.
    alone = subprocess.run(
        [sys.executable, script(_BACK), str(tmp_path / "alone")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    assert "weight 7.0" not in alone.stdout


@pytest.mark.parametrize("how", ["restore", "step"])
def test_two_managers_of_a_rank_are_refused(
    everstep: Run, script: Callable[[str], str], tmp_path: Path, how: str
) -> None:
    done = everstep("run", "--standalone", "--max-restarts", "0", script(_PAIR), str(tmp_path), how)
    assert done.returncode == 1
    assert "pass all objects to one manager" in done.stderr
    assert "trained" not in done.stdout


def test_two_managers_that_write_to_one_directory_are_refused(tmp_path: Path) -> None:
    one, other, elsewhere = _manager(tmp_path / "a"), _manager(tmp_path / "a"), _manager(tmp_path / "b")
    one.step(1)
    elsewhere.step(1)
    one.step(2)
    other.restore()
    other.step(3)
    with pytest.raises(es.CheckpointError, match="pass all objects to one manager"):
        one.step(3)
    other.step(4)
    elsewhere.step(2)
    other.close()
    elsewhere.close()


def test_a_manager_made_anew_goes_on_where_the_old_one_is_not_used_any_more(tmp_path: Path) -> None:
    old = _manager(tmp_path)
    old.step(1)
    new = _manager(tmp_path)
    assert new.restore() == 1
    new.step(2)
    new.close()
    assert new.latest_step("disk") == 2


def test_steps_after_restore_starts_where_that_ended(
    everstep: Run, script: Callable[[str], str], tmp_path: Path
) -> None:
    text = (
        "import torch, everstep\n"
        "ckpt = everstep.CheckpointManager('out', model=torch.nn.Linear(2, 2), persist=1)\n"
        "print('restored', ckpt.restore())\n"
        "for step in ckpt.steps(int(__import__('sys').argv[1])): print('step', step)\n"
    )
    for total, said in (("2", "restored 0 step 0 step 1"), ("4", "restored 2 step 2 step 3")):
        done = everstep("run", "--standalone", script(text), total)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == said.split()


def test_a_step_after_close_is_refused(tmp_path: Path) -> None:
    ckpt = _manager(tmp_path)
    ckpt.step(1)
    ckpt.close()
    with pytest.raises(es.CheckpointError, match="after close"):
        ckpt.step(2)
    with pytest.raises(es.CheckpointError, match="after close"):
        ckpt.save(2)
    ckpt.close()
    again = _manager(tmp_path)
    assert again.restore() == 1
    again.step(2)
    again.close()


def test_a_forked_child_writes_nothing_and_ends_as_it_likes(script: Callable[[str], str], tmp_path: Path) -> None:
    line = [sys.executable, script(_FORK), str(tmp_path / "out")]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    )
    assert done.returncode == 0, done.stderr
    assert "was forked" in done.stdout and "durable 2" in done.stdout
    assert "panicked" not in done.stderr
