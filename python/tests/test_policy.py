"""Machines are marked and replaced through a user's program.

Real agents, one of which is killed; the program starts the next one.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from conftest import EVERSTEP

from harness.cluster import free_port
from harness.live import wait

#: Makes steps until a file tells it to end.
LOOP = """
import os, pathlib, time
import everstep
out = pathlib.Path(os.environ["OUT"])
for step in range(100_000):
    everstep.heartbeat(step)
    (out / f"world-{os.environ['EVERSTEP_NODE']}").write_text(os.environ["WORLD_SIZE"])
    time.sleep(0.05)
    if (out / "enough").exists():
        break
"""

#: Fails the first request and takes it when it is repeated. Starts a node for each machine that is
#: requested.
PROGRAM = """#!/bin/sh
read -r request
echo "$request" >> "$OUT/requests"
if [ "$(wc -l < "$OUT/requests")" = 1 ]; then echo "no machine is free" >&2; exit 3; fi
case "$request" in *'"add"'*) setsid {everstep} run {meet} --node-rank 7 {script} > "$OUT/node-7.log" 2>&1 & ;; esac
"""


def test_a_machine_that_is_lost_is_replaced_through_the_users_program(env, tmp_path, script):
    out = tmp_path / "out"
    out.mkdir()
    env = {**env, "OUT": str(out)}
    program = tmp_path / "program"
    meet = f"--nnodes 1:2 --name policy --policy act --provisioner {program} --rdzv-endpoint 127.0.0.1:{free_port()}"
    train = script(LOOP)
    program.write_text(PROGRAM.format(everstep=EVERSTEP, meet=meet, script=train))
    program.chmod(0o755)
    nodes = [
        subprocess.Popen(
            [EVERSTEP, "run", *meet.split(), "--node-rank", str(node), train],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    try:
        wait(lambda: (out / "world-1").read_text() == "2")
        (out / "world-1").unlink()
        nodes[1].kill()
        wait(lambda: (out / "world-7").read_text() == "2")
        asked = [json.loads(line) for line in (out / "requests").read_text().splitlines()]
        assert [a["request"] for a in asked] == ["policy-1", "policy-1"], "again under the same id"
        assert all(a["action"] == "add" and a["job"] == "policy" and "1 of 2 nodes" in a["why"] for a in asked)
        told = subprocess.run(
            [EVERSTEP, "explain", "--job", "policy"], env=env, capture_output=True, text=True, check=True, timeout=30
        ).stdout
        assert "add a machine: 1 of 2 nodes have joined (done)" in told, told
        again = subprocess.run(
            [EVERSTEP, "approve", "1", "--job", "policy"],
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert again.returncode == 1 and "already been decided" in again.stderr
    finally:
        (out / "enough").touch()
        texts = [node.communicate(timeout=60)[0] for node in nodes]
    assert nodes[0].returncode == 0, texts[0]
    wait(
        lambda: (
            not subprocess.run(
                ["pgrep", "-f", f"{EVERSTEP} run {meet}"], capture_output=True, text=True, check=False
            ).stdout.strip()
        ),
        60,
    )


def test_a_bad_machine_waits_for_a_yes(env, tmp_path, script):
    out = tmp_path / "out"
    out.mkdir()
    env = {**env, "OUT": str(out), "EVERSTEP_KERNEL_LOG": str(out / "kmsg")}
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\ncat >> "$OUT/requests"\n')
    program.chmod(0o755)
    line = [
        EVERSTEP,
        "run",
        "--standalone",
        "--name",
        "yes",
        "--policy",
        "advise",
        "--provisioner",
        str(program),
        "--max-restarts",
        "5",
        script(LOOP),
    ]
    agent = subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ask(*words: str) -> str:
        return subprocess.run(
            [EVERSTEP, *words], env=env, capture_output=True, text=True, check=False, timeout=30
        ).stdout

    try:
        wait((out / "world-0").exists)
        ask("inject", "xid", "--code", "79")
        ask("inject", "kill")
        listed = wait(lambda: ask("approve"))
        assert "1  waiting  cordon node 0" in listed and "gpu-lost" in listed, listed
        assert not (out / "requests").exists()
        assert "cordon node 0" in ask("approve", "1")
        asked = json.loads(wait((out / "requests").read_text))
        assert (asked["action"], asked["node"], asked["request"]) == ("cordon", "0", "yes-1"), asked
        wait(lambda: "1  done" in ask("approve"))
    finally:
        (out / "enough").touch()
        text = agent.communicate(timeout=60)[0]
    assert agent.returncode == 0 and "everstep approve 1" in text, text


def test_a_policy_that_nobody_can_carry_out_is_refused(everstep, script, tmp_path):
    train = script("pass")
    nobody = everstep("run", "--standalone", "--policy", "act", train)
    assert nobody.returncode == 2 and "give --provisioner PROGRAM" in nobody.stderr
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "jobs.toml").write_text(JOBS.replace("90 TFLOP/s", "90"))
    unclear = everstep(
        "run", "--standalone", "--cluster", tmp_path / "cluster.toml", "--jobs", tmp_path / "jobs.toml", train
    )
    assert unclear.returncode == 2 and "has no unit" in unclear.stderr, unclear.stderr
    half = everstep("run", "--standalone", "--jobs", tmp_path / "jobs.toml", train)
    assert half.returncode == 2 and "--cluster" in half.stderr, half.stderr
    (tmp_path / "text").write_text("no program")
    for program in (tmp_path / "missing", tmp_path / "text", Path("/")):
        done = everstep("run", "--standalone", "--policy", "act", "--provisioner", str(program), train)
        assert done.returncode == 2 and "cannot be started" in done.stderr, done.stderr


CLUSTER = 'nodes = 4\ngpus_per_node = 1\npeak = "100 TFLOP/s"\nnode_mtbf = "100d"\n'
#: `large` is worth a lot on two nodes and hardly anything on one.
JOBS = """
[[job]]
id = "large"
min = 1
throughput = { 1 = "1 TFLOP/s", 2 = "90 TFLOP/s" }

[[job]]
id = "small"
min = 1
throughput = { 1 = "10 TFLOP/s", 2 = "20 TFLOP/s" }
"""

#: Keeps each step in memory. Reports the number of ranks, and the step at which a start begins.
KEEPS = """
import os, pathlib, time
import torch
import everstep
out, name = pathlib.Path(os.environ["OUT"]), os.environ["NAME"]
node = os.environ["EVERSTEP_NODE"]
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ckpt = everstep.CheckpointManager(out / name, model=model, optimizer=optimizer)
first = True
for step in ckpt.steps(100_000):
    if first:
        with (out / f"{name}-begins-{node}").open("a") as f:
            f.write(f"{step} {os.environ['WORLD_SIZE']}\\n")
        first = False
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    (out / f"{name}-at-{node}").write_text(f"{step} {os.environ['WORLD_SIZE']}")
    time.sleep(0.05)
    stop = torch.tensor(float((out / "enough").exists()))
    torch.distributed.all_reduce(stop)
    if stop:
        break
"""

#: Starts the agent of the job that receives the machine.
MOVER = """#!/bin/sh
read -r request
echo "$request" >> "$OUT/requests"
case "$request" in *'"move"'*) NAME=large setsid {everstep} run --name large {meet} --node-rank 7 {script} > "$OUT/moved.log" 2>&1 & ;; esac
"""


def test_a_node_goes_to_the_job_that_is_worth_more_with_it(env, tmp_path, script):
    out = tmp_path / "out"
    out.mkdir()
    for name, text in {"cluster.toml": CLUSTER, "jobs.toml": JOBS}.items():
        (tmp_path / name).write_text(text)
    env = {**env, "OUT": str(out)}
    program = tmp_path / "program"
    files = f"--cluster {tmp_path / 'cluster.toml'} --jobs {tmp_path / 'jobs.toml'}"
    meet = f"--nnodes 1:2 --policy act --provisioner {program} {files} --rdzv-endpoint 127.0.0.1:{free_port()}"
    train = script(KEEPS)
    program.write_text(MOVER.format(everstep=EVERSTEP, meet=meet, script=train))
    program.chmod(0o755)
    agents = {}
    for name in ("large", "small"):
        for node in (0, 1):
            line = [EVERSTEP, "run", "--name", name, *meet.split(), "--node-rank", str(node), train]
            agents[name, node] = subprocess.Popen(
                line, env={**env, "NAME": name}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
    try:
        for name in ("large", "small"):
            for node in (0, 1):
                wait(lambda name=name, node=node: int((out / f"{name}-at-{node}").read_text().split()[0]) > 100)
        agents["large", 1].kill()
        # The killed node does not return. The plan takes a node from the other job, which continues
        # at the step after its last one.
        wait(lambda: (out / "large-at-7").read_text().split()[1] == "2", 120)
        wait(lambda: (out / "small-at-0").read_text().split()[1] == "1")
        assert agents["small", 1].wait(timeout=30) == 0
        moves = [json.loads(line) for line in (out / "requests").read_text().splitlines() if '"move"' in line]
        assert [(m["job"], m["node"], m["to"]) for m in moves] == [("small", "1", "large")], moves
        told = subprocess.run(
            [EVERSTEP, "explain", "--job", "large"], env=env, capture_output=True, text=True, check=True, timeout=30
        ).stdout
        assert "plan (prepared in advance): large 2, small 1 nodes" in told, told
        begins = [line.split() for line in (out / "small-begins-0").read_text().splitlines()]
        assert [ranks for _, ranks in begins] == ["2", "1"], begins
        goodput = subprocess.run(
            [EVERSTEP, "goodput", "small", "--json"], env=env, capture_output=True, text=True, check=True, timeout=30
        ).stdout
        assert json.loads(goodput)["jobs"][0]["repeated_steps"] == 0, goodput
    finally:
        (out / "enough").touch()
        texts = {who: agent.communicate(timeout=90)[0] for who, agent in agents.items()}
    assert "node 1 goes to another job" in texts["small", 1], texts["small", 1]
    assert agents["large", 0].returncode == 0 and agents["small", 0].returncode == 0, texts
    wait(
        lambda: (
            not subprocess.run(
                ["pgrep", "-f", f"{EVERSTEP} run --name large {meet}"], capture_output=True, text=True, check=False
            ).stdout.strip()
        ),
        60,
    )
