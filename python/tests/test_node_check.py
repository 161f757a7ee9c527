"""The nodes themselves are checked: real collectives between real agents.

Here they are on one machine; figures/node_check.py breaks networks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import EVERSTEP

from harness.cluster import free_port


def _nodes(env: dict[str, str], count: int, *line: str, **of_last: str) -> tuple[list[int], list[str]]:
    """Runs a command line on ``count`` nodes. ``of_last``: variables of the last one only."""
    meet = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    agents = []
    for node in range(count):
        own = {**env, **(of_last if node == count - 1 else {})}
        agents.append(
            subprocess.Popen(
                [EVERSTEP, line[0], *meet, "--node-rank", str(node), *line[1:]],
                env=own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [agent.communicate(timeout=120)[0] for agent in agents]
    return [agent.returncode for agent in agents], said


def _broken(tmp_path: Path) -> str:
    """Makes a Python whose collectives fail, as they do with a bad device."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        (Path(__file__).parent / "quick_torch" / "sitecustomize.py").read_text()
        + "\nimport os, signal, torch.distributed as dist\ndist.all_reduce = lambda *_: os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    return str(tmp_path / "site")


def test_a_lone_machine_and_two_good_nodes_are_well(everstep, env):
    alone = everstep("check")
    assert alone.returncode == 0 and "1 node checked in 1 round: nothing is wrong" in alone.stderr, alone.stderr
    codes, said = _nodes(env, 2, "check", "--nnodes", "2")
    assert codes == [0, 0] and all(
        "checking 2 nodes" in text and "2 nodes checked in 1 round: nothing is wrong" in text for text in said
    ), said


def test_of_three_nodes_the_one_that_crashes_is_named(env, tmp_path):
    codes, said = _nodes(env, 3, "check", "--nnodes", "3", PYTHONPATH=_broken(tmp_path))
    assert codes == [1, 1, 1] and all(
        "node 2 is bad (collectives with two good nodes failed)" in text for text in said
    ), said


def test_a_job_starts_without_the_node_that_the_check_names(env, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nprint('RANK', os.environ['RANK'], 'OF', os.environ['WORLD_SIZE'], 'ON', os.environ['EVERSTEP_NODE'], flush=True)\n"
    )
    codes, said = _nodes(env, 3, "run", "--nnodes", "2:3", "--check", str(script), PYTHONPATH=_broken(tmp_path))
    lines = sorted(line for text in said for line in text.splitlines() if line.startswith("RANK"))
    assert lines == ["RANK 0 OF 2 ON 0", "RANK 1 OF 2 ON 1"] and codes == [0, 0, 0], said
    assert any("node 2 is excluded" in text for text in said)
    (facts,) = Path(env["EVERSTEP_STATE_DIR"]).rglob("events.jsonl")
    (checked,) = [
        fact
        for fact in map(json.loads, facts.read_text().splitlines())
        if fact.get("event") == "Checked" or "found" in json.dumps(fact)
    ]
    assert "two good nodes" in json.dumps(checked)


def test_without_torch_it_says_so(everstep, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c \'import sys; sys.modules["torch"] = None; '
        "from everstep import node_check; node_check.main()'\n"
    )
    bare.chmod(0o755)
    done = everstep("check", PYTHON_EXEC=str(bare))
    assert done.returncode == 78 and "install torch" in done.stderr, done.stderr
    missing = everstep("check", PYTHON_EXEC=os.devnull)
    assert missing.returncode == 78 and "cannot be" in missing.stderr, missing.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [(["train.py"], "runs no script"), (["--nnodes", "0"], "--nnodes 1 or more"), (["--frobnicate"], "unknown option")],
)
def test_a_wrong_command_line_is_said(everstep, line, words):
    done = everstep("check", *line)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_a_busy_machine_gets_more_time(monkeypatch):
    from everstep import node_check

    processors = os.cpu_count() or 1
    times = []
    for waiting in (0, 2 * processors, 100 * processors):
        monkeypatch.setattr(os, "getloadavg", lambda n=waiting: (n, n, n))
        times.append(node_check._limit("gloo"))
    assert times == [3.0, 6.0, 12.0] and node_check._limit("nccl") == 45.0
