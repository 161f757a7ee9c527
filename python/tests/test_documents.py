"""What the guides show works as shown."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

from harness.cluster import EVERSTEP, ROOT, free_port

GUIDE = ROOT / "docs" / "guide" / "first-run.md"


def test_the_multi_machine_command_shows_what_it_needs(env, tmp_path, script):
    """Not on loopback: the machine's own address in a network namespace."""
    blocks = re.findall(r"^```\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (line,) = (b.replace("\\\n", " ") for b in blocks if b.startswith("everstep run --nnodes 2 --node-rank N "))
    (token,) = (block for block in blocks if "> TOKEN" in block)
    subprocess.run(token, shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "TOKEN").stat().st_mode & 0o077 == 0
    # A single write, because the two share the console.
    path = script("import os\nprint(f\"rank {os.environ['RANK']}\\n\", end='', flush=True)\n")
    line = (
        line.replace("HOST:PORT", f"10.77.0.1:{free_port()}")
        .replace("--nproc-per-node 8", "--nproc-per-node 1")
        .replace("train.py", path)
    )
    commands = [
        shlex.join([str(EVERSTEP), *shlex.split(line.replace("--node-rank N", f"--node-rank {n}"))[1:]]) for n in (0, 1)
    ]
    network = "ip link set lo up; ip addr add 10.77.0.1/24 dev lo"
    both = f"{network}; {commands[0]} & {commands[1]}; second=$?; wait $! && exit $second"
    done = subprocess.run(
        ["unshare", "--net", "bash", "-c", both],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["rank 0", "rank 1"]


def test_the_refusal_without_encryption_creates_the_token_as_the_guide_does(everstep, script):
    (token,) = re.findall(r"^\(umask .*> TOKEN\)$", GUIDE.read_text(), re.MULTILINE)
    done = everstep("run", "--nnodes", "2", "--rdzv-endpoint", "10.99.99.99:29400", script("pass"))
    assert done.returncode == 78 and f"  {token}\n" in done.stderr, done.stderr
    assert "copy the file TOKEN to the other nodes" in done.stderr, done.stderr


def test_the_example_explains_why_a_second_run_trains_nothing(env, tmp_path):
    line = [sys.executable, str(ROOT / "examples/gpt/train.py"), "--steps", "1", "--layers", "1", "--width", "16"]
    first, second = (
        subprocess.run(
            [EVERSTEP, "run", "--standalone", "--no-python", *line, "--out", str(tmp_path / "out")],
            env={**env, "EVERSTEP_NO_WARM": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        for _ in range(2)
    )
    assert "already complete" not in first.stdout
    assert "already complete at step 1; give another --out to train again" in second.stdout, second.stdout
