"""Disks that are full and directories that are removed: nothing is lost without a line that says
what and where."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from conftest import EVERSTEP

#: Mounts a small file system, runs a command with it, and copies what is in it.
MOUNTED = """mount -t tmpfs -o "$1,mode=700" none "$2" || exit 99
"${@:4}"; code=$?
cp -r "$2" "$3"; exit $code
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")


def _with_disk(env: dict[str, str], options: str, at: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with a small disk ``at``, whose contents are in ``at``-after at the end."""
    at.mkdir(mode=0o700)
    line = ["unshare", "-m", "--propagation", "private", "bash", "-c", MOUNTED, "bash", options, str(at), f"{at}-after"]
    done = subprocess.run([*line, *command], env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode != 99, done.stderr
    return done


WRITES = """
import sys
for i in range(4000):
    print(f"out {i} " + "x" * 50, flush=True)
print("err", file=sys.stderr)
"""


@needs_root
@pytest.mark.parametrize(
    "options",
    [["-r", "3"], ["-r", "3", "--local-ranks-filter", "7"], ["-t", "3"], ["-r", "3", "--log-format", "json"]],
    ids=["redirected", "hidden", "teed", "in-json"],
)
@pytest.mark.parametrize("disk", ["size=64k", "nr_inodes=4"], ids=["full", "no-file"])
def test_output_that_the_log_directory_does_not_take_is_on_the_console(env, script, tmp_path, disk, options):
    logs = tmp_path / "logs"
    run = [EVERSTEP, "run", "--standalone", "--no-warm", "--name", "full", "--log-dir", str(logs), *options]
    done = _with_disk(env, disk, logs, *run, script(WRITES))
    assert done.returncode == 0, done
    kept = [f.read_text() for f in Path(f"{logs}-after").rglob("stdout.log")]
    shown = done.stdout.replace("[default0]:", "")
    expected = "".join(f"out {i} " + "x" * 50 + "\n" for i in range(4000))
    assert shown == expected if "-t" in options else "".join(kept) + shown == expected
    assert bool(kept) == (disk == "size=64k")
    lines = [line for line in done.stderr.splitlines() if "cannot write" in line]
    if "json" in options:
        read = [json.loads(line) for line in lines]
        assert all((m["level"], m["job"], m["node"], m["generation"]) == ("warn", "full", "0", 1) for m in read), read
    for stream in ("stdout", "stderr"):
        about = [line for line in lines if f"/attempt_0/0/{stream}.log" in line]
        # Where files can still be created, the few bytes of standard error may find room.
        assert len(about) == 1 or (stream == "stderr" and disk == "size=64k"), done.stderr
        assert all("No space left on device" in line for line in about), about
    assert "[default0]:err\n" in done.stderr or any(
        f.read_text() == "err\n" for f in Path(f"{logs}-after").rglob("stderr.log")
    )


@needs_root
@pytest.mark.parametrize(
    ("disk", "what"),
    [
        ("size=4k", "preload"),
        ("size=28k", "store/token"),
        ("size=32k", "coordinator.log"),
        ("nr_inodes=15", "coordinator.log"),
        ("nr_inodes=18", "store.redb"),
    ],
)
def test_a_full_disk_under_the_records_is_named(env, script, tmp_path, disk, what):
    state = tmp_path / "state"
    done = _with_disk(env, disk, state, EVERSTEP, "run", "--standalone", "--no-warm", script("print('ran')"))
    first = done.stderr.splitlines()[0]
    assert done.returncode == 78 and not done.stdout, done
    assert str(state) in first and what in first, done.stderr
    assert "No space left" in first or "free some space" in first, done.stderr


def test_records_that_are_removed_are_missed_once(env, script, tmp_path):
    text = f"""
import os, time
open({str(tmp_path / "began")!r}, "w").close()
while not os.path.exists({str(tmp_path / "end")!r}):
    time.sleep(0.05)
"""
    state = Path(env["EVERSTEP_STATE_DIR"])
    line = [EVERSTEP, "run", "--standalone", "--no-warm", "--name", "lost", script(text)]
    with subprocess.Popen(line, env=env, stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr is not None
        # Without the line, the job ends by itself, and so does what reads from it.
        enough = threading.Timer(30, (tmp_path / "end").touch)
        enough.start()
        try:
            while not (tmp_path / "began").exists():
                assert job.poll() is None
                time.sleep(0.05)
            shutil.rmtree(state)
            said = ""
            while "was removed while the job was running" not in said:
                line = job.stderr.readline()
                assert line, said
                said += line
            assert f"{state}/jobs/lost/store was removed" in said
        finally:
            enough.cancel()
            (tmp_path / "end").touch()
        said += job.stderr.read()
        assert job.wait(60) == 0 and said.count("was removed") == 1, said
