"""Whatever connects to everstep's ports, the job continues, and memory and time are bounded."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import EVERSTEP
from test_other_users import PYTHON, as_nobody

from harness.cluster import descendants

#: Starts at once and ends on request.
WAITS = """
import os, pathlib, time
here = pathlib.Path(os.environ["HERE"])
(here / f"began-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
while not (here / "go").exists():
    time.sleep(0.02)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    (here / "go").unlink()
    os._exit(1)
import datetime
import torch.distributed as dist
s = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 1, False, datetime.timedelta(seconds=20))
s.set("a", "b")
print("again", s.get("a"), flush=True)
"""


def ports(pid: int) -> dict[int, str]:
    """Returns the ports that a process listens on, with the address in hexadecimal."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(fd)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {int(r[1].split(":")[1], 16): r[1].split(":")[0] for r in rows if r[3] == "0A" and r[9] in inodes}


def until(what, timeout: float = 30):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = what()
        if value:
            return value
        time.sleep(0.02)
    raise TimeoutError("it never came")


class Waiting:
    """A job that waits, and its processes."""

    def __init__(self, env: dict[str, str], here: Path, script: str, files: int | None) -> None:
        def limit() -> None:
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        self.here = here
        line = [EVERSTEP, "run", "--standalone", "--max-restarts", "2", script]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.agent = subprocess.Popen(line, env={**env, "HERE": str(here)}, preexec_fn=limit, **pipes)  # noqa: PLW1509
        until((here / "began-0").exists)

    def coordinator(self) -> int:
        """Returns its coordinator's process id."""
        named = [
            p
            for p in descendants(self.agent.pid)
            if b"coordinator" in Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0")
        ]
        return named[0]

    def go(self) -> None:
        (self.here / "go").touch()


@pytest.fixture
def waiting(env, tmp_path, script) -> Iterator:
    started: list[Waiting] = []

    def start(text: str = WAITS, files: int | None = None) -> Waiting:
        here = tmp_path / "here"
        here.mkdir()
        started.append(Waiting(env, here, script(text), files))
        return started[-1]

    yield start
    for one in started:
        if one.agent.poll() is None:
            one.agent.terminate()
        one.agent.communicate(timeout=40)


FLOOD = """
    import socket, sys, time
    held = []
    for port in map(int, sys.argv[2:]):
        for _ in range(int(sys.argv[1])):
            s = socket.socket()
            s.settimeout(2)
            try:
                s.connect(("127.0.0.1", port))
                s.send(bytes([0, 0, 16, 0, 1]))
                held.append(s)
            except OSError:
                pass
    print("held", flush=True)
    time.sleep(60)
"""


def resident(pid: int) -> int:
    """Returns the resident memory in KiB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0])


@pytest.mark.skipif(os.getuid() != 0 or not Path(PYTHON).exists(), reason="becoming another user takes root")
def test_connections_of_another_user_neither_end_a_job_nor_cost_memory(waiting):
    job = waiting(files=256)
    targets = {**ports(job.agent.pid), **ports(job.coordinator())}
    assert len(targets) == 3
    before = resident(job.agent.pid)
    attacker = as_nobody(FLOOD, "300", *map(str, targets), wait=False)
    try:
        assert resident(job.agent.pid) - before < 40 << 10
        job.go()
        until((job.here / "began-1").exists)
        job.go()
        out, err = job.agent.communicate(timeout=60)
        assert job.agent.returncode == 0 and "again b'b'" in out, err
    finally:
        attacker.kill()
        attacker.communicate()


def test_what_proves_nothing_is_closed(waiting):
    """Half a frame on the replica port, half a header and half a preface on the HTTP port."""
    job = waiting()
    replica = [p for p in ports(job.agent.pid) if p != int(master_port(job))]
    http = list(ports(job.coordinator()))
    starts = [
        (replica[0], struct.pack("<I", 4000) + b"{"),
        (http[0], b"GET /v1/status HTTP/1.1\r\nx:"),
        (http[0], b"PRI * HTTP/2.0\r\n\r\nSM"),
    ]
    starts.append((int(master_port(job)), b"\0\xce"))
    open_now = {}
    for port, text in starts:
        s = socket.create_connection(("127.0.0.1", port))
        s.send(text)
        open_now[s] = text
    # A frame longer than the first may be is refused without waiting for it.
    s = socket.create_connection(("127.0.0.1", replica[0]))
    s.send(struct.pack("<I", 1 << 20) + b"{")
    s.settimeout(5)
    assert closed(s)
    deadline = time.monotonic() + 30
    while open_now and time.monotonic() < deadline:
        for s in select.select(list(open_now), [], [], 1)[0]:
            if closed(s):
                del open_now[s]
    assert not open_now, list(open_now.values())


def closed(s: socket.socket) -> bool:
    """Returns whether the other side has closed the connection, after reading pending data."""
    try:
        return not s.recv(4096)
    except ConnectionError:
        return True


def master_port(job: Waiting) -> str:
    """Returns the MASTER_PORT of the current worker."""
    for pid in descendants(job.agent.pid):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"MASTER_PORT="):
                return variable.removeprefix(b"MASTER_PORT=").decode()
    raise LookupError("no worker")


def test_waits_for_many_keys_cost_nothing_while_others_set_theirs(waiting):
    job = waiting()
    at = ("127.0.0.1", int(master_port(job)))

    def client() -> socket.socket:
        s = socket.create_connection(at)
        s.sendall(b"\0" + struct.pack("<I", 0x3C85F7CE))
        return s

    def text(key: bytes) -> bytes:
        return struct.pack("<Q", len(key)) + key

    setter = client()

    def answered() -> None:
        setter.sendall(b"\7")
        assert len(setter.recv(8)) == 8

    keys = [b"%05x" % i for i in range(65535)]
    setter.sendall(b"\x0b" + struct.pack("<Q", len(keys)) + b"".join(text(key) + text(b"") for key in keys))
    answered()
    waits = [client() for _ in range(4)]
    for s in waits:
        # All but the last are already set.
        s.sendall(b"\6" + struct.pack("<Q", len(keys) + 1) + b"".join(map(text, keys)) + text(b"never"))
    # A short wait behind a long one on each connection would be an error: ask the kernel whether
    # all was read.
    until(lambda: all(fcntl.ioctl(s, termios.TIOCOUTQ, b"\0" * 4) == b"\0" * 4 for s in waits))
    answered()
    stat = Path(f"/proc/{job.agent.pid}/stat")

    def spent() -> int:
        fields = stat.read_text().rsplit(") ", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before = spent()
    for i in range(100):
        setter.sendall(b"\1" + text(b"other-%d" % i) + text(b"x"))
        answered()
    # In hundredths of a second. Checking all keys each time would take more than a thousand.
    assert spent() - before < 300


LOOKS = """
import os, pathlib
own = os.getpid()
def parent(pid): return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[1])
guard = parent(own)
agent = parent(guard)
inodes = set()
for pid in [agent] + [int(p.name) for p in pathlib.Path("/proc").iterdir() if p.name.isdigit()]:
    try:
        if pid == agent or parent(pid) == agent:
            inodes |= {os.readlink(fd)[8:-1] for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        pass
for name in ("tcp", "tcp6"):
    for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
        row = line.split()
        if row[3] == "0A" and row[9] in inodes:
            print("listens", row[1], flush=True)
import datetime
import torch.distributed as dist
dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 1, False, datetime.timedelta(seconds=20)).set("a", "b")
"""


@pytest.mark.parametrize(
    "options",
    [
        ["--standalone", "--local-addr", "0.0.0.0"],
        ["--nnodes", "1", "--master-addr", "0.0.0.0", "--master-port", "29871"],
    ],
)
def test_one_node_listens_on_loopback_only(everstep, script, options):
    done = everstep("run", *options, script(LOOKS))
    assert done.returncode == 0, done.stderr
    listens = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("listens")]
    assert len(listens) >= 3 and all(at.startswith("0100007F:") for at in listens), listens
    assert "listening on 127.0.0.1 instead of 0.0.0.0" in done.stderr


def test_an_address_that_other_machines_reach_needs_a_word(everstep, script):
    done = everstep(
        "run",
        "--nnodes",
        "2",
        "--rdzv-endpoint",
        "127.0.0.1:29872",
        "--local-addr",
        "0.0.0.0",
        script("print()"),
        timeout=40,
    )
    assert done.returncode == 78 and "--insecure" in done.stderr, done.stderr


ASKS = """
import json, os, socket, struct
def ask(body):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(20)
    s.connect(os.environ["EVERSTEP_SOCKET"])
    s.sendall(struct.pack("<I", len(body)) + body)
    answer = b""
    while len(answer) < 4 or len(answer) < 4 + struct.unpack("<I", answer[:4])[0]:
        more = s.recv(65536)
        if not more:
            return answer, True
        answer += more
    s.settimeout(2)
    try:
        closed = s.recv(1) == b""
    except TimeoutError:
        closed = False
    return json.loads(answer[4:]), closed
def request(ask, local_rank=0):
    generation = int(os.environ["EVERSTEP_GENERATION"])
    return json.dumps({"from": {"generation": generation, "rank": 0, "local_rank": local_rank}, "ask": ask}).encode()


print(json.dumps([
    ask(b"this is not JSON"),
    ask(request({"Reserve": {"slot_bytes": 4096, "slots": 4_000_000_000}})),
    ask(request({"Reserve": {"slot_bytes": 2**63, "slots": 3}})),
    ask(request({"Reserve": {"slot_bytes": 4096, "slots": 3}}, local_rank=7)),
    ask(request({"Heal": {"path": os.path.dirname(os.environ["EVERSTEP_BOARD"]) + "/../../x-slot-0", "chunks": [0]}})),
]), flush=True)
"""


def test_bad_requests_of_a_worker_are_answered_and_change_nothing(everstep, script):
    import json

    done = everstep("run", "--standalone", "--max-restarts", "0", script(ASKS))
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert all("Refused" in answer for answer, _ in answers), answers
    assert [closed for _, closed in answers] == [True, False, False, False, False]


def test_workers_get_the_users_limit_of_open_files(env, script):
    text = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 5000))

    done = subprocess.run(
        [EVERSTEP, "run", "--standalone", script(text)],
        env=env,
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["100", "5000"], done.stderr


def test_the_agent_uses_what_the_hard_limit_allows(env, tmp_path, script):
    here = tmp_path / "here"
    here.mkdir()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 5000))

    line = [EVERSTEP, "run", "--standalone", "--max-restarts", "2", script(WAITS)]
    agent = subprocess.Popen(
        line,
        env={**env, "HERE": str(here)},
        preexec_fn=limit,  # noqa: PLW1509
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until((here / "began-0").exists)
        rows = Path(f"/proc/{agent.pid}/limits").read_text().splitlines()
        row = next(r for r in rows if r.startswith("Max open files"))
        assert row.split()[3:5] == ["5000", "5000"]
    finally:
        agent.terminate()
        agent.wait(40)
