"""A job in strange surroundings works as under torchrun, or ends in one sentence with the right
exit code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import EVERSTEP

STEPPING = """
import os, sys, time
from pathlib import Path
out = Path(sys.argv[1]); rank = os.environ["RANK"]
(out / f"started-{rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
while not (out / "end").exists():
    time.sleep(0.05)
"""


def _until(ready, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def _coordinator(env: dict[str, str]) -> int:
    found = list(Path(env["EVERSTEP_STATE_DIR"]).glob("**/endpoint.json"))
    return int(json.loads(found[0].read_text())["pid"]) if found else 0


@contextlib.contextmanager
def _running(env: dict[str, str], tmp_path: Path, text: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "script.py").write_text(text)
    line = [EVERSTEP, "run", *options, str(tmp_path / "script.py"), str(tmp_path)]
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _read_until(process, text):
    said = ""
    for line in process.stdout:
        said += line
        if text in line:
            return
    raise AssertionError(said)


def test_a_coordinator_that_is_stopped_does_not_end_the_job(env, tmp_path):
    """The kernel accepts its connections but nothing answers, as if another program used the
    port."""
    with _running(env, tmp_path, STEPPING, "--no-warm", "--detect-timeout", "500ms") as process:
        _until(lambda: (tmp_path / "started-0-0").exists() and _coordinator(env))
        coordinator = _coordinator(env)
        os.kill(coordinator, signal.SIGSTOP)
        assert process.stdout is not None
        _read_until(process, "the coordinator does not answer")
        # Longer than an agent takes something else on the port for a coordinator that is starting.
        time.sleep(9)
        assert process.poll() is None, process.stdout.read()
        os.kill(coordinator, signal.SIGCONT)
        _read_until(process, "the coordinator is back")
        (tmp_path / "end").touch()
        assert process.wait(60) == 0, process.stdout.read()
        assert not (tmp_path / "started-0-1").exists()


#: Writes what it was given, as bytes. Its first start fails.
REPORTING = """
import json, os, sys
from pathlib import Path
out = Path(os.fsdecode(bytes.fromhex(os.environ["OUT_HEX"])))
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
seen = {
    "odd": os.environb.get(b"ODD\\xfe", b"").hex(), "argv": os.fsencode(sys.argv[1]).hex(), "cwd": os.getcwdb().hex(),
    "script": os.fsencode(sys.argv[0]).hex(), "large": sum(len(v) for k, v in os.environ.items() if k.startswith("LARGE")),
}
(out / f"seen-{attempt}.json").write_text(json.dumps(seen))
import torch, everstep
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = everstep.CheckpointManager("checkpoints", model=model, optimizer=optimizer, persist=2)
for step in ckpt.steps(6):
    optimizer.zero_grad(); model(torch.ones(2)).sum().backward(); optimizer.step()
    if step == 4 and attempt == "0":
        import time; time.sleep(float(os.environ.get("BEFORE", "0")))
        os.kill(os.getpid(), 9)
print("done")
"""


def test_bytes_that_are_not_text_arrive_as_they_are(env, tmp_path):
    """Variables, arguments, the working directory, paths of script and logs; on a warm restart,
    too."""
    odd = os.fsdecode(b"dir-\xff\xfe")
    place = tmp_path / odd
    place.mkdir()
    (place / os.fsdecode(b"train-\xe9.py")).write_text(REPORTING)
    given = {**os.environb, b"ODD\xfe": b"\xff value", b"OUT_HEX": os.fsencode(place).hex().encode(), b"BEFORE": b"8"}
    given |= {os.fsencode(k): os.fsencode(v) for k, v in env.items()}
    given[b"EVERSTEP_STATE_DIR"] = os.fsencode(place / "state")
    line = [
        EVERSTEP,
        "run",
        "--name",
        "odd",
        "--max-restarts",
        "2",
        "--log-dir",
        "logs",
        "-r",
        "1",
        os.fsdecode(b"train-\xe9.py"),
        os.fsdecode(b"\xfd=${local_rank}"),
    ]
    done = subprocess.run(line, env=given, cwd=place, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"panicked" not in done.stderr and b"restarts will be slower" not in done.stderr, done.stderr
    for attempt in (0, 1):
        seen = json.loads((place / f"seen-{attempt}.json").read_text())
        assert bytes.fromhex(seen["odd"]) == b"\xff value" and bytes.fromhex(seen["argv"]) == b"\xfd=0", seen
        assert bytes.fromhex(seen["cwd"]) == os.fsencode(place) and bytes.fromhex(seen["script"]) == b"train-\xe9.py"
    logs = list((place / "logs").glob("**/attempt_1/0/stdout.log"))
    assert [p.read_text() for p in logs] == ["done\n"]
    assert (place / "checkpoints" / "step-6" / "manifest.json").exists()
    for words in (["logs", "odd"], ["ckpt", "ls", "odd"], ["status"], ["doctor", "--json"]):
        asked = subprocess.run([EVERSTEP, *words], env=given, cwd=place, capture_output=True, timeout=30, check=False)
        assert b"panicked" not in asked.stderr and asked.returncode in (0, 69), (words, asked)
        assert words[0] != "logs" or b"done" in asked.stdout, asked


def _large(env: dict[str, str], total: int, each: int = 100_000) -> dict[str, str]:
    return {**env, **{f"LARGE_{i}": "x" * each for i in range(total // each)}}


def test_a_large_environment_reaches_the_workers(env, tmp_path, script):
    text = REPORTING.split("import torch")[0] + "print('done')"
    given = _large({**env, "OUT_HEX": os.fsencode(tmp_path).hex()}, 1_500_000)
    done = subprocess.run(
        [EVERSTEP, "run", script(text), "x"], env=given, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr
    assert json.loads((tmp_path / "seen-0.json").read_text())["large"] == 1_500_000
    # More than a default stack limit allows.
    grow = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_STACK, (-1, -1)); "
        "os.environ.update({f'LARGE_{i}': 'x' * 100_000 for i in range(40)}); os.execv(sys.argv[1], sys.argv[1:])"
    )
    line = [sys.executable, "-c", grow, EVERSTEP, "run", script(text), "x"]
    given = {**env, "OUT_HEX": os.fsencode(tmp_path).hex()}
    done = subprocess.run(line, env=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr
    assert json.loads((tmp_path / "seen-0.json").read_text())["large"] == 4_000_000


def test_an_environment_that_the_kernel_refuses_is_named(env, script):
    """everstep itself still starts in it, but with a worker's variables it is too large."""
    given = _large(env, 1_980_000, each=99_000)
    line = [EVERSTEP, "run", script("print('ran')"), "x"]
    for pad in range(130_000, 0, -300):
        try:
            done = subprocess.run(
                line, env={**given, "PAD": "x" * pad}, capture_output=True, text=True, timeout=60, check=False
            )
            break
        except OSError:
            continue
    assert done.returncode in (1, 78) and "ran" not in done.stdout, done
    assert "Argument list too long" in done.stderr and "ulimit -s" in done.stderr and "panicked" not in done.stderr, (
        done.stderr
    )


def _everstep(env: dict[str, str], cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([EVERSTEP, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


CLUSTER = 'nodes = 8\ngpus_per_node = 8\npeak = "312 TFLOP/s"\nnode_mtbf = "{time}"\n'
JOBS = (
    '[[job]]\nid = "a"\nmin = 1\nnodes = 8\nparameters = "7B"\nregroup = "{time}"\n'
    '[job.throughput]\n1 = "500 TFLOP/s"\n8 = "4 PFLOP/s"\n'
)


@pytest.mark.parametrize("time_", ["99999999999999d", "9" * 400 + "h", "106751991167d"])
def test_times_that_no_clock_reaches_are_refused(env, tmp_path, time_):
    for cluster, jobs in ((time_, "20s"), ("260d", time_)):
        (tmp_path / "cluster.toml").write_text(CLUSTER.format(time=cluster))
        (tmp_path / "jobs.toml").write_text(JOBS.format(time=jobs))
        done = _everstep(env, tmp_path, "plan", "--cluster", "cluster.toml", "--jobs", "jobs.toml")
        assert done.returncode == 2 and "too long" in done.stderr and "panicked" not in done.stderr, done


def test_a_damaged_store_says_what_to_do(env, tmp_path, script):
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    (store / "store.redb").write_bytes(os.urandom(4096))
    done = _everstep(env, tmp_path, "run", "--store", str(store), script("print('ran')"))
    assert done.returncode == 78 and "ran" not in done.stdout, done
    assert "move it away" in done.stderr and "not lost" in done.stderr and "everstep: everstep" not in done.stderr, (
        done.stderr
    )


def test_a_long_line_is_teed_whole_and_not_kept(everstep, script):
    """Such a line must not be searched repeatedly. The figure measures how long it takes."""
    text = "import sys\nfor _ in range(64): sys.stdout.write('x' * (1 << 20))\nprint('end', flush=True)\nprint('next')"
    done = everstep("run", "--tee", "3", script(text))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == ["[default0]:" + "x" * (64 << 20) + "end", "[default0]:next"]


class _Flips:
    """A proxy between an agent and its coordinator that changes a rank, as a flipped bit in a digit
    would."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to, self.flipped = to, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            ours, _ = self._listener.accept()
            theirs = socket.create_connection(self._to)
            threading.Thread(target=self._move, args=(ours, theirs, True), daemon=True).start()
            threading.Thread(target=self._move, args=(theirs, ours, False), daemon=True).start()

    def _move(self, source: socket.socket, to: socket.socket, flip: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if flip and self.flipped < 5 and b'"ranks":[{"rank":0,' in data:
                    self.flipped += 1
                    data = data.replace(b'"ranks":[{"rank":0,', b'"ranks":[{"rank":2,')
                to.sendall(data)
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_a_flipped_bit_on_the_control_stream_is_a_lost_connection(env, tmp_path):
    store = tmp_path / "store"
    line = [EVERSTEP, "coordinator", "--bind", "127.0.0.1:0", "--store", str(store)]
    with subprocess.Popen(line, env=env, stderr=subprocess.DEVNULL) as coordinator:
        try:
            _until((store / "endpoint.json").exists)
            host, port = json.loads((store / "endpoint.json").read_text())["endpoint"].split(":")
            flips = _Flips((host, int(port)))
            options = [
                "--nnodes",
                "1",
                "--rdzv-endpoint",
                f"127.0.0.1:{flips.port}",
                "--rdzv-conf",
                "is_host=0",
                "--store",
                str(store),
                "--rdzv-id",
                "flips",
                "--no-warm",
            ]
            with _running(env, tmp_path, STEPPING, *options) as process:
                seen: set[int] = set()

                def look() -> bool:
                    asked = _everstep(env, tmp_path, "status", "--json").stdout
                    jobs = json.loads(asked or "{}").get("jobs", [])
                    seen.update(w["rank"] for j in jobs for w in j["workers"])
                    return flips.flipped >= 5 and bool(seen)

                _until(look)
                look()
                (tmp_path / "end").touch()
                assert process.wait(60) == 0
                assert seen == {0}, "what was damaged on the way was believed"
                assert not (tmp_path / "started-0-1").exists()
        finally:
            coordinator.terminate()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_under_the_store_is_named_and_waited_for(env, tmp_path, script):
    """Nothing starts before the job's record is written. While that fails, the user is told why."""
    state, filler = tmp_path / "state", tmp_path / "state" / "filler"
    state.mkdir(mode=0o700)
    setup = f'mount -t tmpfs -o size=3m,mode=700 none {state} && touch {tmp_path}/mounted && exec "$@"'
    wait = f"""for i in range(1200):
    time.sleep(0.05)
    if os.path.exists({str(tmp_path / "full")!r}): break
first and os.kill(os.getpid(), 9)
print("done", flush=True)"""
    text = (
        "import os, time\nfirst = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        f"open({str(tmp_path / 'began')!r}, 'w').close()\n{wait}"
    )
    line = [
        "unshare",
        "-m",
        "--propagation",
        "private",
        "bash",
        "-c",
        setup,
        "bash",
        EVERSTEP,
        "run",
        "--no-warm",
        "--max-restarts",
        "1",
        script(text),
    ]
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        try:
            _until(lambda: (tmp_path / "began").exists() or job.poll() is not None)
            inside = Path(f"/proc/{job.pid}/root{filler}")
            with contextlib.suppress(OSError), inside.open("wb", buffering=0) as f:
                while True:
                    f.write(b"x" * 4096)
            (tmp_path / "full").touch()
            _read_until(job, "cannot write the store")
            inside.unlink()
            _read_until(job, "can be written again")
            assert job.stdout is not None
            said = job.stdout.read()
            assert job.wait(60) == 0 and "done" in said, said
        finally:
            job.terminate()


def test_a_path_that_is_too_long_is_refused_at_once(env, tmp_path, script):
    long = str(tmp_path / "/".join(["d" * 200] * 25))
    done = subprocess.run(
        [EVERSTEP, "run", script("print('ran')")],
        env={**env, "EVERSTEP_STATE_DIR": long},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 78 and "EVERSTEP_STATE_DIR" in done.stderr and not (tmp_path / ("d" * 200)).exists(), done


#: Its first start is killed.
DIES_ONCE = (
    "import os, time\nfirst = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\ntime.sleep(0.5)\n"
    "print('out', flush=True)\nfirst and os.kill(os.getpid(), 9)"
)


@pytest.mark.parametrize("where", ["2>/dev/full", ">/dev/full 2>&1", "2> >(head -c 1 >/dev/null)"])
def test_a_console_that_takes_nothing_does_not_end_the_job(env, tmp_path, script, where):
    """The terminal's log is on a full disk, or the process that reads it has gone."""
    text = f"{DIES_ONCE}\nopen({str(tmp_path / 'ended')!r}, 'w').close()"
    line = [
        "bash",
        "-c",
        f'exec "$@" {where}',
        "bash",
        EVERSTEP,
        "run",
        "--max-restarts",
        "1",
        "--tee",
        "3",
        script(text),
    ]
    done = subprocess.run(line, env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0 and (tmp_path / "ended").exists(), done


def test_an_answer_that_cannot_be_written_is_an_error(env, tmp_path):
    done = subprocess.run(
        ["bash", "-c", f"{EVERSTEP} classify --table > /dev/full"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "No space left" in done.stderr and "panicked" not in done.stderr, done
    done = subprocess.run(
        ["bash", "-c", f"{EVERSTEP} classify --table | true; exit ${{PIPESTATUS[0]}}"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, 141) and not done.stderr, done


def test_children_are_seen_to_end_where_that_was_ignored(env, script):
    """Ignoring SIGCHLD is inherited from the parent."""
    code = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    line = [sys.executable, "-c", code, EVERSTEP, "run", "--max-restarts", "1", script(DIES_ONCE)]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "restart 1" in done.stderr and done.stdout == "out\nout\n", done


SAVES = """
import everstep, sys, torch
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
manager = everstep.CheckpointManager(sys.argv[1], model=model, optimizer=optimizer, persist=2)
for step in manager.steps(6):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
manager.close()
print("done")
"""

needs_pids = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/sys/fs/cgroup/pids").is_dir(), reason="needs the pids cgroup"
)


def _run_within(limit, env, *words):
    """Runs a job that may have this many threads in all. It runs, or ends in one sentence with the
    documented code."""
    group = Path(f"/sys/fs/cgroup/pids/everstep-test-{os.getpid()}-{limit}")
    group.mkdir()
    try:
        (group / "pids.max").write_text(str(limit))
        enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        line = ["bash", "-c", enter, "bash", EVERSTEP, "run", "--max-restarts", "0", *words]
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=90, check=False)
        assert "panicked" not in done.stderr, done.stderr
        assert done.returncode in (0, 1, 69, 75, 78), done
        assert done.returncode == 0 or done.stderr.strip(), done
        return done
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        _until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@needs_pids
@pytest.mark.parametrize("limit", [2, 4, 7, 8, 12, 16, 24])
def test_a_limit_of_threads_never_panics(env, script, limit):
    _run_within(limit, env, script("print('done')"))


@needs_pids
@pytest.mark.parametrize("limit", [13, 14, 16, 18])
def test_requests_of_workers_are_answered_with_hardly_any_threads(env, tmp_path, script, limit):
    """The writer of checkpoints had kept the agent's only thread, and nothing else was ever
    answered."""
    done = _run_within(limit, env, script(SAVES), str(tmp_path / "checkpoints"))
    if done.returncode == 0:
        assert "done" in done.stdout, done
