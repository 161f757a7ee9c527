"""Another user of the machine can neither plant what everstep uses nor block it."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import EVERSTEP

NOBODY = 65534

#: An interpreter that other users can run, too.
PYTHON = "/usr/bin/python3"

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not Path(PYTHON).exists(), reason="becoming another user takes root and the system's Python"
)


def as_nobody(code: str, *arguments: str, wait: bool = True) -> subprocess.Popen[str]:
    """Runs Python code as the user nobody.

    Without ``wait``, it returns once the code prints a line.
    """
    line = [PYTHON, "-I", "-c", textwrap.dedent(code), *arguments]
    child = subprocess.Popen(
        line,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    assert child.stdout is not None
    if wait:
        _, err = child.communicate(timeout=20)
        assert child.returncode == 0, err
    else:
        assert child.stdout.readline(), child.communicate()[1]
    return child


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like /dev/shm and /tmp: everyone can write, but not remove the entries of
    others."""
    at = Path(f"/dev/shm/everstep-test-shared-{os.getpid()}")
    at.mkdir()
    at.chmod(0o1777)
    yield at
    subprocess.run(["rm", "-rf", "--one-file-system", str(at)], check=True)


@pytest.fixture
def binary() -> Iterator[Path]:
    """A copy of everstep that other users can run, wherever the repository is.

    Shared memory may be mounted without the right to execute."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        at = Path(directory)
        at.chmod(0o755)
        yield shutil.copy(EVERSTEP, at / "everstep")


SAVES = """
import os, sys, torch, everstep
model = torch.nn.Linear(64, 64)
ckpt = everstep.CheckpointManager(sys.argv[1], model=model, persist=0)
print("from", ckpt.restore(), flush=True)
for step in range(1, 6):
    ckpt.step(step)
ckpt.close()
"""


def test_a_squatted_directory_in_shared_memory_is_not_used(everstep, env, script, shared, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    victim.chmod(0o600)
    plant = f"""
        import os, sys
        os.umask(0)
        top = sys.argv[1] + "/everstep-0"
        os.makedirs(top + "/squatted/0")
        for i in range(4):
            os.symlink({str(victim)!r}, f"{{top}}/squatted/0/local-0-slot-{{i}}")
        os.symlink({str(victim)!r}, top + "/squatted/0/local-0-board")
    """
    as_nobody(plant, str(shared))
    done = everstep(
        "run", "--standalone", "--name", "squatted", script(SAVES), str(tmp_path / "ck"), EVERSTEP_SHM_DIR=str(shared)
    )
    assert victim.read_text() == "mine" and victim.stat().st_size == 4
    assert done.returncode == 0, done.stderr
    assert "belongs to user 65534" in done.stderr
    ours = [p for p in shared.iterdir() if p.stat().st_uid == 0]
    assert len(ours) == 1 and stat.S_IMODE(ours[0].stat().st_mode) == 0o700
    # A later start finds the same directory and prints nothing.
    again = everstep("run", "--standalone", "--name", "squatted", script("print('ran')"), EVERSTEP_SHM_DIR=str(shared))
    assert again.returncode == 0 and "belongs" not in again.stderr, again.stderr
    assert [p for p in shared.iterdir() if p.stat().st_uid == 0] == ours


def test_a_state_directory_of_another_user_is_refused(everstep, script, shared):
    as_nobody("import os, sys; os.umask(0); os.makedirs(sys.argv[1] + '/state/jobs/j/preload')", str(shared))
    for command in (["run", "--standalone", "--name", "j", script("print('ran')")], ["status"]):
        done = everstep(*command, EVERSTEP_STATE_DIR=str(shared / "state"))
        assert done.returncode == 78 and "ran" not in done.stdout
        assert (
            len(done.stderr.splitlines()) == 1
            and "belongs to user 65534" in done.stderr
            and "EVERSTEP_STATE_DIR" in done.stderr
        ), done.stderr


def test_a_state_directory_that_others_can_write_is_refused(everstep, script, shared):
    state = shared / "open"
    state.mkdir()
    state.chmod(0o777)
    done = everstep("run", "--standalone", script("print('ran')"), EVERSTEP_STATE_DIR=str(state))
    assert done.returncode == 78 and "chmod go-w" in done.stderr, done.stderr


def test_without_a_home_nothing_goes_to_a_shared_temporary_directory(shared, binary):
    """Refused, because the user has no home. (Otherwise, the home in the user database is used.)"""
    as_nobody("import os, sys; os.umask(0); os.makedirs(sys.argv[1] + '/everstep-state-54321')", str(shared))
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(shared), "EVERSTEP_SHM_DIR": str(shared)}
    line = [binary, "run", "--standalone", "--no-python", "true"]
    done = subprocess.run(
        line,
        env=env,
        user=54321,
        group=54321,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 78 and len(done.stderr.splitlines()) == 1 and "EVERSTEP_STATE_DIR" in done.stderr, (
        done.stderr
    )
    assert list((shared / "everstep-state-54321").iterdir()) == []


def test_everything_is_the_owners_alone(everstep, script, env, tmp_path):
    text = "import sys; print('out'); print('err', file=sys.stderr)"
    done = everstep("run", "--standalone", "--name", "modes", "--tee", "3", script(text))
    assert done.returncode == 0, done.stderr
    checked = 0
    for root in (Path(env["EVERSTEP_STATE_DIR"]), Path(env["EVERSTEP_SHM_DIR"]) / "everstep-0"):
        for path in [root, *root.rglob("*")]:
            assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0, (path, oct(path.lstat().st_mode))
            checked += 1
    assert checked > 10


def test_cleaning_up_never_follows_links(everstep, env, tmp_path):
    precious = tmp_path / "precious"
    (precious / "0").mkdir(parents=True)
    (precious / "0" / "thesis").write_text("years")
    memory = Path(env["EVERSTEP_SHM_DIR"]) / "everstep-0"
    records = Path(env["EVERSTEP_STATE_DIR"]) / "jobs" / "dead"
    records.mkdir(parents=True, mode=0o700)
    (records / "node-0.lock").touch(0o600)
    (memory / "dead" / "0").mkdir(parents=True)
    (memory / "linked").symlink_to(precious)
    (memory / "dead" / "0" / "deep").symlink_to(precious)
    (memory / "dead" / "1").symlink_to(precious)
    everstep("doctor")
    everstep("doctor", "--clean")
    assert (precious / "0" / "thesis").read_text() == "years"
    assert not (memory / "dead" / "0").exists()


HOLD = """
    import fcntl, sys, time
    files = [open(path) for path in sys.argv[1:]]
    for f in files:
        fcntl.flock(f, fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(60)
"""


def test_locks_that_another_user_holds_block_nothing(everstep, script, env, shared, tmp_path):
    """Readable by all, as earlier versions created them."""
    state = shared / "state"
    store = state / "jobs" / "locked" / "store"
    store.mkdir(parents=True)
    locks = [store / "lock", state / "jobs" / "locked" / "node-0.lock"]
    for lock in locks:
        lock.touch(mode=0o644)
    holder = as_nobody(HOLD, *map(str, locks), wait=False)
    try:
        done = everstep(
            "run", "--standalone", "--name", "locked", script("print('ran')"), EVERSTEP_STATE_DIR=str(state), timeout=40
        )
        assert done.returncode == 0 and "ran" in done.stdout, done.stderr
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.parametrize("name", ["store/lock", "node-0.lock"])
def test_a_lock_that_is_waited_for_is_named_with_its_owner(everstep, script, env, name):
    path = Path(env["EVERSTEP_STATE_DIR"]) / "jobs" / "held" / name
    path.parent.mkdir(parents=True)
    for parent in path.parents[:3]:
        parent.chmod(0o700)
    with path.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        done = everstep("run", "--standalone", "--name", "held", script("print('ran')"), timeout=40)
    assert done.returncode == 78 and f"process {os.getpid()}" in done.stderr, (done.returncode, done.stderr)
