"""What the README shows works as shown."""

from __future__ import annotations

import re
import shlex
import subprocess

from harness.cluster import EVERSTEP, ROOT, free_port


def test_the_multi_machine_command_shows_what_it_needs(env, tmp_path, script):
    """Not on loopback: the machine's own address in a network namespace."""
    readme = (ROOT / "README.md").read_text()
    (line,) = re.findall(r"^(everstep run --nnodes 2 .*?) +#", readme, re.MULTILINE)
    (token,) = re.findall(r"^`(\(umask .*?)`", readme, re.MULTILINE)
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
