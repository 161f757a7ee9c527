"""Bad input ends in one clear sentence with a remedy, with the right exit code, and loses
nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from conftest import EVERSTEP
from hosts import NAMES, namespaces


def _says(done, code: int, *words: str) -> None:
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and "panicked" not in done.stderr, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) <= 12, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "missing.py"], 2, ["missing.py does not exist", "check the path"]),
        (["run", "--nnodes", "4:2", "x.py"], 2, ["--nnodes 2:4"]),
        (["run", "--nnodes", "two", "x.py"], 2, ["2:4"]),
        (["run", "--nnodes", "0", "x.py"], 2, ["--nnodes 1 or more"]),
        (["run", "--nnodes", "2", "{script}"], 2, ["--rdzv-endpoint HOST:PORT"]),
        (["run", "--nproc-per-node", "none", "{script}"], 2, ["not a number of workers"]),
        (["run", "--nproc-per-node", "0", "{script}"], 2, ["give 1 or more"]),
        (["run", "--redirects", "9", "{script}"], 2, ["0, 1, 2, 3"]),
        (["run", "--detect-timeout", "soon", "{script}"], 2, ["2s, 500ms or 90m"]),
        (["run", "--detect-timeout", "1ms", "{script}"], 2, ["200 ms or more"]),
        (["run", "--shutdown-timeout", "2.5", "{script}"], 2, ["not a whole number of seconds"]),
        (["run", "--notify", "/dev/zero", "{script}"], 78, ["--notify /dev/zero", "neither a regular file nor a pipe"]),
        (["run", "--failure-table", "/dev/zero", "{script}"], 78, ["neither a regular file nor a pipe"]),
        (["run", "--detector", "/dev/zero", "{script}"], 2, ["neither a regular file nor a pipe"]),
        (["run", "-m", "--no-python", "x"], 2, ["cannot be used together"]),
        (["run", "--name", "a/b", "{script}"], 2, ["letters, digits"]),
        (["run", "--nnodes", "2", "--rdzv-endpoint", "no.such.host.invalid:1", "{script}"], 69, ["not a known host"]),
        (["run", "--nnodes", "2", "--rdzv-endpoint", "10.99.99.99:29400", "{script}"], 78, ["no TLS", "--insecure"]),
        (["run", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:x", "{script}"], 2, ["port between 1 and 65535"]),
        (["run", "--log-dir", "/proc/nowhere", "{script}"], 78, ["--log-dir"]),
        (["run", "--frobnicate", "{script}"], 2, ["--frobnicate"]),
        (["run"], 2, ["SCRIPT"]),
        (["status", "nobody"], 69, ["no job nobody has run on this machine"]),
        (["logs", "nobody"], 1, ["no logs of job nobody"]),
    ],
)
def test_command_lines(everstep, script, arguments, code, words):
    path = script("print('ran')")
    done = everstep(*[a.replace("{script}", path) for a in arguments])
    _says(done, code, *words)
    assert "ran" not in done.stdout


def test_records_that_are_damaged_in_part_are_read_and_others_are_named(everstep, env, script):
    assert everstep("run", "--name", "half", script("raise SystemExit(3)")).returncode == 1
    (records,) = Path(env["EVERSTEP_STATE_DIR"]).rglob("events.jsonl")
    with records.open("ab") as file:
        file.write(b"\xff\xfe\n{}\n")
    told = everstep("explain", "--job", "half")
    assert told.returncode == 0 and "inc-1" in told.stdout, told.stderr
    records.unlink()
    os.mkfifo(records)
    told = everstep("explain", "--job", "half")
    assert told.returncode == 1 and f"cannot read {records}: it is not a regular file" in told.stderr, told.stderr


def test_port_in_use_by_something_else(everstep, script):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        done = everstep(
            "run", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{s.getsockname()[1]}", script("print(1)"), timeout=60
        )
    _says(done, 78, "not an everstep coordinator", "another port")


def test_unreachable_coordinator(env, script, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    with namespaces():
        arguments = [
            "--insecure",
            "--token-file",
            str(token),
            "--nnodes",
            "2",
            "--rdzv-endpoint",
            "10.77.9.2:29400",
            "--detect-timeout",
            "200ms",
        ]
        line = ["ip", "netns", "exec", NAMES[0], EVERSTEP, "run", *arguments, script("print(1)")]
        _says(
            subprocess.run(line, env=env, capture_output=True, text=True, timeout=90, check=False),
            69,
            "no coordinator answered",
            "--rdzv-endpoint",
        )


def test_too_few_nodes_asks_to_be_requeued(everstep, script):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    arguments = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank", "0", "--join-timeout", "1s"]
    _says(everstep("run", *arguments, script("print(1)"), timeout=60), 75, "1 of 2 nodes joined", "--nnodes MIN:MAX")


def test_token_that_others_can_read(everstep, script, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    done = everstep(
        "run", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:29499", "--token-file", str(token), script("print(1)")
    )
    _says(done, 78, "chmod 600")


def test_two_agents_with_one_id(env, everstep, script, tmp_path):
    up = tmp_path / "up"
    path = script(f"open({str(up)!r}, 'w').write('x'); import time; time.sleep(60)")
    first = subprocess.Popen([EVERSTEP, "run", "--standalone", "--name", "twice", path], env=env)
    try:
        while not up.exists():
            time.sleep(0.05)
        _says(everstep("run", "--standalone", "--name", "twice", path), 78, "already in use", "--name")
        assert first.poll() is None
    finally:
        first.terminate()
        first.wait(20)


def test_what_a_second_agent_waits_for_is_said_while_it_waits(env, script, tmp_path):
    """The lock may be that of an agent that is ending, so it is waited for."""
    up = tmp_path / "up"
    path = script(f"open({str(up)!r}, 'w').write('x'); import time; time.sleep(60)")
    line = [EVERSTEP, "run", "--standalone", "--name", "twice", "--log-format", "json", path]
    first = subprocess.Popen(line, env=env)
    try:
        while not up.exists():
            time.sleep(0.05)
        with subprocess.Popen(line, env=env, stderr=subprocess.PIPE, text=True) as second:
            assert second.stderr is not None
            said = json.loads(second.stderr.readline())
            assert second.poll() is None, "it says so at the end only"
            assert (said["job"], said["node"]) == ("twice", "0") and "waiting up to 5 s" in said["message"], said
            assert f"process {first.pid} (everstep)" in said["message"] or "has started" in said["message"], said
            refused = json.loads(second.stderr.readline())
            assert second.wait(60) == 78 and "already in use" in refused["message"], refused
    finally:
        first.terminate()
        first.wait(20)


def test_two_machines_with_one_id(env, everstep, script, tmp_path):
    """As above, but the second agent cannot see the first machine's lock: the coordinator refuses
    it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{s.getsockname()[1]}"
    store = str(tmp_path / "store")
    common = ["--nnodes", "2", "--rdzv-endpoint", endpoint, "--node-rank", "0", "--store", store, "--rdzv-id", "same"]
    path = script("import time; time.sleep(60)")
    first = subprocess.Popen([EVERSTEP, "run", *common, path], env=env)
    try:
        events = tmp_path / "store" / "events.jsonl"
        while not (events.exists() and "NodeJoined" in events.read_text()):
            assert first.poll() is None, "the first machine has not joined"
            time.sleep(0.05)
        elsewhere = {"EVERSTEP_STATE_DIR": str(tmp_path / "state2"), "EVERSTEP_SHM_DIR": str(tmp_path / "shm2")}
        _says(everstep("run", *common, path, **elsewhere), 78, "already in use", "--node-rank")
        assert first.poll() is None
    finally:
        first.terminate()
        first.wait(20)
