"""Warm restarts, scripts watched from outside, and worlds that shrink and grow, with real
processes."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from conftest import EVERSTEP

from figures import elastic
from harness.cluster import cluster, descendants, free_port

PLAIN = "figures/scripts/plain_ddp.py"


def test_a_script_that_knows_nothing_is_watched_and_restarted_warm(tmp_path):
    end = tmp_path / "end"
    with cluster("t-warm", [PLAIN, "--steps", "100", "--until", str(end)]) as c:
        c.start_all().wait_step(40)
        c.wait_for(lambda: all(w["warm"] for w in c.workers_now().values()), 60, "a process with torch imported")
        began = c.kill_worker(1)
        c.wait_for(lambda: any(f["ts"] > began for f in c.facts("FirstStep")), 60, "a new step")
        # A forked process has its parent's command line.
        # Their pids come with the next progress report, which may be later than the first step.
        workers = c.wait_for(c.workers_now, 60, "the new workers")
        lines = [Path(f"/proc/{w['pid']}/cmdline").read_text() for w in workers.values()]
        end.touch()
        assert c.wait(60) == [0]
        assert max(f["step"] for f in c.facts("Progress")) >= 100
        assert not c.leaks(), c.leaks()
        assert lines and all("template.py" in line for line in lines), (lines, c.output()[-2000:])


def test_a_warm_worker_runs_the_script_as_a_new_one_does(env, tmp_path):
    script = tmp_path / "w.py"
    script.write_text(
        "import os, sys, torch, random\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].__dict__ is globals()\n"
        "w = torch.zeros(1, requires_grad=True); w.grad = torch.zeros(1); o = torch.optim.SGD([w], 0.1)\n"
        "import time\n"
        "here = [sys.argv, __file__, sys.path[0], os.getcwd(), os.environ.get('PYTHONPATH'), "
        "'EVERSTEP_PRELOAD' in os.environ, os.getsid(0) == os.getpid()]\n"
        "print(os.environ['TORCHELASTIC_RESTART_COUNT'], here, flush=True)\n"
        "class Local: pass\n"
        "import pickle; pickle.loads(pickle.dumps(Local()))\n"
        "for i in range(400):\n"
        "    o.step(); time.sleep(0.02)\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' and i == 3: raise KeyError('mine')\n"
        "    if i == 399: os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [EVERSTEP, "run", "--standalone", "--max-restarts", "1", str(script), "--a", "b"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    cold, warm = done.stdout.splitlines()
    assert cold.startswith("0 ") and warm.startswith("1 ") and cold[2:] == warm[2:], done.stdout
    assert done.returncode == 1 and "KeyError: 'mine'" in done.stderr and "template.py" not in done.stderr, done.stderr
    assert "restarts will be slower" not in done.stderr


def test_a_script_that_changes_its_processors_is_not_restarted_warm(env, tmp_path):
    script = tmp_path / "s.py"
    script.write_text(
        "import os, time; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "import torch\n"
        "w = torch.zeros(1, requires_grad=True); w.grad = torch.zeros(1); o = torch.optim.SGD([w], 0.1)\n"
        "for i in range(30): o.step(); time.sleep(0.02)\n"
    )
    done = subprocess.run(
        [EVERSTEP, "run", "--standalone", str(script)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and "restarts will be slower" in done.stderr, done.stderr


def test_another_sitecustomize_still_runs(env, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.was_here = 1\n")
    script = tmp_path / "s.py"
    script.write_text(
        "import os, sys; print(was_here, os.environ['PYTHONPATH'], any('preload' in p for p in sys.path))\n"
    )
    done = subprocess.run(
        [EVERSTEP, "run", "--standalone", str(script)],
        env={**env, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout.split() == ["1", str(tmp_path), "False"], done


def test_a_world_shrinks_and_grows_with_nothing_lost():
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        command = ["figures/elastic.py", "--out", scratch, "--steps", "300", "--pause", "0.03"]
        with cluster("t-elastic", command, nodes=3, workers=1, elastic="2:3") as c:
            c.start_all()
            c.wait_for(
                lambda: (
                    c.status().get("world_size") == 3
                    and c.step() >= 0
                    and len(c.workers_now()) == 3
                    and all((w["step"] or 0) > 20 for w in c.workers_now().values())
                ),
                90,
                "three nodes",
            )
            promised = c.status()["replicated_step"] or 0
            killed = time.time()
            c.agents[1].kill()
            c.wait_for(lambda: [f for f in c.facts("FirstStep") if f["ts"] > killed], 60, "the smaller world")
            c.start(1)
            c.wait_for(lambda: c.facts("Growing"), 60, "growth")
            assert [a.wait(120) for a in c.agents.values()] == [0, 0, 0], c.output()[-3000:]
            assert [f["world_size"] for f in c.facts("GenerationStarted")] == [3, 2, 3], (
                c.facts("IncidentOpened"),
                c.output()[-5000:],
            )
            first, shrunk, grown = c.facts("Restored")
            # On a slow machine, not every step is captured (`stall_budget`). A lost node costs the
            # steps since the last captured one.
            assert shrunk["step"] >= promised, (promised, shrunk)
            assert first["steps_lost"] == grown["steps_lost"] == 0, (first, grown)
        assert elastic.unaccounted(out, 300) == 0


def test_two_static_nodes_survive_a_killed_worker(env, tmp_path):
    port = free_port()
    nodes = []
    for rank in ("0", "1"):
        line = [
            EVERSTEP,
            "run",
            "--nnodes",
            "2",
            "--node-rank",
            rank,
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(port),
            "--max-restarts",
            "1",
        ]
        root = Path(__file__).resolve().parent.parent.parent
        nodes.append(
            subprocess.Popen(
                [*line, PLAIN, "--steps", "150", "--out", str(tmp_path)],
                env=env,
                cwd=root,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    log = tmp_path / "log-1"
    deadline = time.monotonic() + 60
    while not (log.exists() and len(log.read_text().splitlines()) > 40) and time.monotonic() < deadline:
        time.sleep(0.05)
    worker = next(p for p in descendants(nodes[1].pid) if b"plain_ddp" in Path(f"/proc/{p}/cmdline").read_bytes())
    os.kill(worker, signal.SIGKILL)
    assert [n.wait(90) for n in nodes] == [0, 0], [n.stderr.read() for n in nodes]
    assert log.read_text().count("start ") == 2


def test_goodput_counts_new_steps_over_held_time(env, tmp_path):
    root = Path(__file__).resolve().parent.parent.parent
    subprocess.run(
        [EVERSTEP, "run", "--standalone", "--name", "good", PLAIN, "--steps", "100"],
        env=env,
        cwd=root,
        check=True,
        timeout=60,
    )
    import json

    out = subprocess.run(
        [EVERSTEP, "goodput", "good", "--json"], env=env, capture_output=True, text=True, check=True
    ).stdout
    (job,) = json.loads(out)["jobs"]
    assert job["new_steps"] == 100 and job["repeated_steps"] == 0 and 0.1 < job["goodput"] < 1
    missing = subprocess.run([EVERSTEP, "goodput", "nobody"], env=env, capture_output=True, text=True, check=False)
    assert missing.returncode == 1 and "no records of job nobody" in missing.stderr


def test_a_hung_worker_says_where_it_hangs(env, tmp_path):
    script = tmp_path / "h.py"
    script.write_text(
        "import time, everstep\n"
        "def stuck_here():\n"
        "    while True: pass\n"
        "for i in range(1, 200):\n"
        "    everstep.heartbeat(i); time.sleep(0.02)\n"
        "stuck_here()\n"
    )
    line = [
        EVERSTEP,
        "run",
        "--standalone",
        "--name",
        "stuck",
        "--max-restarts",
        "0",
        "--detect-timeout",
        "1s",
        str(script),
    ]
    done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "hung" in done.stderr, done.stderr
    said = subprocess.run(
        [EVERSTEP, "logs", "stuck", "--first-cause"], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert "stuck_here" in said and "stacks" in said, said


def test_torchrun_meets_through_everstep(env, tmp_path):
    port, root = free_port(), Path(__file__).resolve().parent.parent.parent
    torchrun = str(Path(EVERSTEP).parent / "torchrun")
    line = [
        torchrun,
        "--nnodes",
        "2",
        "--rdzv-backend",
        "everstep",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "meet",
    ]
    line += ["--local-addr", "127.0.0.1", "--max-restarts", "1", PLAIN, "--steps", "200", "--out", str(tmp_path)]
    nodes = [subprocess.Popen(line, env=env, cwd=root, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    log = tmp_path / "log-1"
    deadline = time.monotonic() + 60
    while not (log.exists() and len(log.read_text().splitlines()) > 40) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(int(log.read_text().split()[4]), signal.SIGKILL)
    assert [n.wait(90) for n in nodes] == [0, 0], [n.stderr.read()[-2000:] for n in nodes]
    assert log.read_text().count("start ") == 2
