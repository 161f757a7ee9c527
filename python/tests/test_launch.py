"""The launcher: environment, exit codes, signals, logs, orphans."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from conftest import EVERSTEP

from harness.cluster import free_port, marked

SHOW = "import json, os, sys; print(json.dumps(dict(os.environ))); print(json.dumps(sys.argv[1:]))"


def test_every_variable_of_torchrun_is_there(everstep, script):
    done = everstep(
        "run", "--standalone", "--nproc_per_node=2", "--max-restarts", "4", "--tee", "3", script(SHOW), "--x_y", "1"
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("]:", 1)[1] for line in done.stdout.splitlines() if line.startswith("[default1]:")]
    env, arguments = json.loads(rows[0]), json.loads(rows[1])
    assert arguments == ["--x_y", "1"]
    wanted = {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2", "ROLE_NAME": "default", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "4", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }  # fmt: skip
    assert {k: env.get(k) for k in wanted} == wanted
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
        assert env[name]


def test_defaults_come_from_torchruns_variables(everstep, script):
    text = (
        "import os; os.write(1, f\"{os.environ['WORLD_SIZE']} {os.environ['TORCHELASTIC_MAX_RESTARTS']}\\n\".encode())"
    )
    done = everstep(
        "run", script(text), PET_STANDALONE="1", PET_NPROC_PER_NODE="2", PET_MAX_RESTARTS="5", PET_NO_PYTHON="0"
    )
    assert done.returncode == 0 and done.stdout.split() == ["2", "5"] * 2, done.stderr


def test_module_program_and_redirects(everstep, script, tmp_path):
    assert everstep("run", "--standalone", "-m", "this").stdout.startswith("The Zen of Python")
    assert everstep("run", "--standalone", "--no-python", "echo", "${local_rank}", "x").stdout == "0 x\n"
    done = everstep("run", "--standalone", "--redirects", "3", "--log-dir", "logs", script("print('hidden')"))
    assert done.stdout == ""
    assert [p.read_text() for p in (tmp_path / "logs").rglob("stdout.log")] == ["hidden\n"]


def test_a_failure_is_short_names_its_cause_first_and_exits_with_one(everstep, script):
    text = "import os\nif os.environ['RANK'] == '1': raise ValueError('bad learning rate')\nimport time; time.sleep(60)"
    done = everstep("run", "--standalone", "--nproc-per-node", "2", "--redirects", "3", script(text))
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    start, cause = lines[:2]
    assert start.startswith("everstep: job ") and len(lines) <= 12
    assert "ValueError: bad learning rate" in cause and "rank 1" in cause
    shown = everstep("logs", "--first-cause")
    cause, *rest = shown.stdout.splitlines()
    assert "ValueError: bad learning rate" in cause
    assert any(re.fullmatch(r"inc-1, generation 1, at \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", line) for line in rest), rest


def test_max_restarts_is_honoured_exactly(everstep, script, tmp_path):
    text = f"open({str(tmp_path / 'tries')!r}, 'a').write('x'); raise SystemExit(5)"
    assert everstep("run", "--standalone", "--max-restarts", "2", script(text)).returncode == 1
    assert (tmp_path / "tries").read_text() == "xxx"


def _start(env, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [EVERSTEP, "run", *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _until(what, timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_workers_and_all_they_started_die_with_their_agent(env, script, tmp_path):
    text = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(300)"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({str(tmp_path / "daemon")!r}, "w").write("up")
        time.sleep(300)
    os._exit(0)
open({str(tmp_path / "worker")!r}, "w").write("up")
time.sleep(300)
"""
    agent = _start(env, "--standalone", "--name", "orphans", script(text))
    _until(lambda: (tmp_path / "daemon").exists() and (tmp_path / "worker").exists() and len(marked("orphans")) >= 3)
    agent.kill()
    _until(lambda: not marked("orphans"))


def test_term_reaches_the_workers_and_ends_with_its_code(env, script, tmp_path):
    text = f"""
import signal, sys, time
def bye(*_):
    open({str(tmp_path / "bye")!r}, "w").write("term"); sys.exit(0)
signal.signal(signal.SIGTERM, bye)
signal.signal(signal.SIGUSR1, lambda *_: open({str(tmp_path / "usr1")!r}, "w").write("usr1"))
open({str(tmp_path / "ready")!r}, "w").write("up")
while True: time.sleep(0.05)
"""
    agent = _start(env, "--standalone", script(text))
    _until((tmp_path / "ready").exists)
    agent.send_signal(signal.SIGUSR1)
    _until((tmp_path / "usr1").exists)
    assert agent.poll() is None
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(20) == 143
    assert (tmp_path / "bye").read_text() == "term"


def test_status_and_doctor_answer_in_json(env, everstep, script, tmp_path):
    text = f"open({str(tmp_path / 'up')!r}, 'w').write('x'); import time; time.sleep(60)"
    agent = _start(env, "--standalone", "--name", "seen", script(text))
    try:
        _until((tmp_path / "up").exists)
        (job,) = json.loads(everstep("status", "--json").stdout)["jobs"]
        assert (job["job"], job["phase"], job["world_size"]) == ("seen", "training", 1)
        assert json.loads(everstep("doctor", "--json").stdout)["shm"]["total"] > 0
    finally:
        agent.terminate()
        agent.wait(20)


def test_status_names_the_host_of_a_coordinator_elsewhere(env, everstep, script, tmp_path):
    """Two nodes with their own records, as on two machines."""
    text = f"import os, time; open({str(tmp_path)!r} + '/up-' + os.environ['RANK'], 'w').close(); time.sleep(60)"
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    meet = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--token-file", str(token)]
    line = ["--name", "apart", "--nnodes", "2", *meet]
    path, other = script(text), {**env, "EVERSTEP_STATE_DIR": str(tmp_path / "other")}
    agents = [_start(env, *line, "--node-rank", "0", path)]
    try:
        _until(lambda: "apart" in everstep("status").stdout)
        agents.append(_start(other, *line, "--rdzv-conf", "is_host=0", "--node-rank", "1", path))
        _until(lambda: all((tmp_path / f"up-{rank}").exists() for rank in (0, 1)))
        of_other = {"EVERSTEP_STATE_DIR": other["EVERSTEP_STATE_DIR"]}
        for words, code in ((["status"], 0), (["status", "apart"], 69), (["inject", "kill"], 69)):
            asked = everstep(*words, **of_other)
            assert asked.returncode == code and "its coordinator runs on 127.0.0.1" in asked.stderr, asked
            assert "start one with" not in asked.stderr
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait(20)
    gone = everstep("status", **of_other)
    assert gone.returncode == 0 and "no job is running here; start one with" in gone.stderr, gone


def test_doctor_removes_what_dead_jobs_left(env, everstep, tmp_path):
    memory = tmp_path / "shm" / f"everstep-{os.getuid()}"
    records = Path(env["EVERSTEP_STATE_DIR"]) / "jobs" / "gone"
    records.mkdir(parents=True, mode=0o700)
    (records / "node-0.lock").touch(0o600)
    for job in ("gone", "elsewhere"):
        (memory / job / "0").mkdir(parents=True)
        (memory / job / "0" / "local-0-slot-0").write_bytes(b"x" * 4096)
    shm = {"EVERSTEP_SHM_DIR": str(tmp_path / "shm")}
    found = json.loads(everstep("doctor", "--json", **shm).stdout)
    assert [Path(a["path"]).parent.name for a in found["leftovers"]] == ["gone"]
    cleaned = everstep("doctor", "--clean", **shm)
    assert "left alone" in cleaned.stdout and "elsewhere" in cleaned.stdout, cleaned
    assert "checkpoint memory of 1 node, 0 MiB, removed" in cleaned.stdout and "arena" not in cleaned.stdout, cleaned
    assert "heartbeat interval" in cleaned.stdout, cleaned
    assert not (memory / "gone").exists()
    assert (memory / "elsewhere" / "0" / "local-0-slot-0").exists(), "its job may have its records elsewhere"


def test_doctor_leaves_running_jobs_with_other_records_alone(env, everstep, script, tmp_path):
    """Records of a dead job of the same name do not count against a job with records elsewhere, and
    a second job of its name is refused."""
    text = f"open({str(tmp_path / 'up')!r}, 'w').write('x'); import time; time.sleep(60)"
    records = Path(env["EVERSTEP_STATE_DIR"]) / "jobs" / "twice"
    records.mkdir(parents=True, mode=0o700)
    (records / "node-0.lock").touch(0o600)
    other = {**env, "EVERSTEP_STATE_DIR": str(tmp_path / "other")}
    agent = _start(other, "--standalone", "--name", "twice", script(text))
    try:
        _until((tmp_path / "up").exists)
        arena = Path(env["EVERSTEP_SHM_DIR"]) / f"everstep-{os.getuid()}" / "twice" / "0"
        (arena / "kept").touch()
        assert json.loads(everstep("doctor", "--json", "--clean").stdout)["leftovers"] == []
        second = everstep("run", "--standalone", "--name", "twice", script("print('ran')"))
        assert second.returncode == 78 and "ran" not in second.stdout, second
        assert "another job named twice runs on this machine" in second.stderr, second.stderr
        assert (arena / "kept").exists()
    finally:
        agent.terminate()
        agent.wait(20)
