"""Consoles show a line, in words, at each moment that people wait for."""

from __future__ import annotations

import signal
import subprocess

from harness.cluster import cluster
from harness.live import wait, workers

LOOP = """
import os, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    model(torch.ones(1, 2)).sum().backward()
    dist.barrier()
    optimizer.step()
    time.sleep(0.02)
"""


def test_start_and_end(everstep, script):
    done = everstep("run", "--standalone", "--name", "short", "--nproc-per-node", "2", script(LOOP), "5")
    lines = [x for x in done.stderr.splitlines() if x.startswith("everstep:")]
    assert done.returncode == 0
    assert (
        lines[0]
        == "everstep: job short: 2 ranks here, 2 ranks on 1 node; everstep status short shows it, Ctrl-C stops it"
    )
    assert lines[-1].startswith("everstep: done at step 5 after "), lines


def test_a_stop_says_so_and_offers_no_diagnosis(env, script, tmp_path):
    from conftest import EVERSTEP

    line = [EVERSTEP, "run", "--standalone", "--name", "stopped", script(LOOP), "100000"]
    run = subprocess.Popen(line, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait(lambda: any(w["step"] for w in workers(env)))
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130
    # A script without checkpoints.
    assert "everstep: stopping: the script may save what it has" in said
    assert "--first-cause" not in said


def test_nodes_that_wait_and_lost_nodes_are_on_every_console(script):
    path = script(LOOP)
    with cluster("console", [path, "100000"], nodes=2, workers=1, options=["--max-restarts", "3"]) as c:
        c.start(0)
        log = c.home / "node-0.log"
        c.wait_for(lambda: "waiting for nodes: 1 of 2 joined" in log.read_text(), 60, "the line about waiting")
        c.start(1)
        c.wait_step(3)
        c.kill_node(1)
        cause = ("node 1 was lost", "the cause: node 1")
        c.wait_for(lambda: any(text in log.read_text() for text in cause), 60, "the cause on the other console")
        c.wait_for(
            lambda: log.read_text().count("waiting for nodes: 1 of 2 joined") == 2, 60, "the line about waiting again"
        )
        c.start(1)
        c.wait_for(lambda: "everstep: restart 1 of 3: 2 ranks on 2 nodes" in log.read_text(), 90, "the restart")
        text = c.output()
        assert "{" not in "".join(x for x in text.splitlines() if x.startswith("everstep:")), "Rust's own words"


def test_an_option_that_is_like_none_of_ours_is_not_guessed(everstep):
    far = everstep("run", "--quantum", "x.py").stderr
    near = everstep("run", "--max-restart-s", "3", "x.py").stderr
    assert "did you mean" not in far and "--quantum" in far
    assert "did you mean --max-restarts?" in near


def test_messages_of_everstep_are_never_the_cause(everstep, script):
    """A worker may be a wrapper of another launch, whose messages are then the last lines of its
    standard error."""
    text = """
import json, sys
for line in sys.argv[1:]:
    print(line, file=sys.stderr)
print("everstep: job inner: 1 rank here; Ctrl-C stops it", file=sys.stderr)
print(json.dumps({"from": "everstep", "level": "info", "message": "No space left on device"}), file=sys.stderr)
sys.exit(3)
"""
    own = ("run", "--standalone", "--max-restarts", "0", "--name", "outer", script(text))
    done = everstep(*own)
    (failed, _) = [line for line in done.stderr.splitlines() if "exited with code 3" in line]
    assert "inner" not in failed and "space" not in failed, failed
    done = everstep(*own, "no GPU here")
    assert "exited with code 3: no GPU here" in done.stderr, done.stderr
