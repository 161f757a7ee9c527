"""Runs several nodes of one job on this machine, for the demo, the figures and the tests.

Starts and breaks them, and reads what the coordinator recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.facts import Facts

ROOT = Path(__file__).resolve().parent.parent
EVERSTEP = Path(sys.executable).parent / "everstep"


def free_port() -> int:
    """Returns a free port below the ephemeral range, so that the kernel assigns it to no other
    socket."""
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def processes() -> dict[int, tuple[int, str]]:
    """Returns all processes: pid → (parent, state)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                rest = (entry / "stat").read_text().rsplit(") ", 1)[1].split()
                found[int(entry.name)] = (int(rest[1]), rest[0])
    return found


def descendants(pid: int) -> list[int]:
    """Returns the living processes below ``pid``."""
    table = processes()
    found, frontier = [], [pid]
    while frontier:
        parent = frontier.pop()
        children = [p for p, (up, state) in table.items() if up == parent and state != "Z"]
        found += children
        frontier += children
    return found


def born(pid: int) -> float:
    """Returns when a process started, in Unix time to a hundredth of a second."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")


def marked(job: str) -> list[int]:
    """Returns the living processes with the job's name in their environment.

    These are workers and everything they started.
    """
    needle = f"EVERSTEP_JOB={job}".encode()
    found = []
    for pid, (_, state) in processes().items():
        with contextlib.suppress(OSError):
            if state != "Z" and needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


class Cluster:
    """One job on ``nodes`` agents of this machine, each with ``workers`` ranks."""

    def __init__(
        self,
        job: str,
        command: list[str],
        *,
        nodes: int = 1,
        workers: int = 2,
        options: list[str] | None = None,
        elastic: str | None = None,
    ) -> None:
        self.job, self.command, self.nodes, self.workers = job, command, nodes, workers
        self.options = options or []
        self.elastic = elastic
        self.home = Path(tempfile.mkdtemp(prefix="everstep-harness-"))
        self.port = free_port()
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self._facts = Facts()
        self.env = {**os.environ, "EVERSTEP_STATE_DIR": str(self.home / "state"), "GLOO_SOCKET_IFNAME": "lo"}
        self.env.setdefault("VIRTUAL_ENV", sys.prefix)

    @property
    def memory(self) -> Path:
        """The job's directory in shared memory."""
        root = self.env.get("EVERSTEP_SHM_DIR", "/dev/shm")
        return Path(root) / f"everstep-{os.getuid()}" / self.job

    @property
    def store(self) -> Path:
        """The directory of the coordinator's store."""
        if self.nodes == 1:
            return self.home / "state" / "jobs" / self.job / "store"
        return self.home / "state" / "coordinators" / f"127.0.0.1_{self.port}"

    def start(self, node: int = 0) -> None:
        """Starts the agent of a node, as a scheduler would."""
        meet = (
            ["--standalone"]
            if self.nodes == 1
            else [
                "--nnodes",
                self.elastic or str(self.nodes),
                "--rdzv-endpoint",
                f"127.0.0.1:{self.port}",
                "--node-rank",
                str(node),
            ]
        )
        line = [
            str(EVERSTEP),
            "run",
            "--name",
            self.job,
            *meet,
            "--nproc-per-node",
            str(self.workers),
            *self.options,
            *self.command,
        ]
        log = (self.home / f"node-{node}.log").open("ab")
        self.agents[node] = subprocess.Popen(line, env=self.env, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)

    def start_all(self) -> Cluster:
        """Starts every node."""
        for node in range(self.nodes):
            self.start(node)
        return self

    def output(self) -> str:
        """Returns what the agents and their workers printed."""
        return "".join(p.read_text(errors="replace") for p in sorted(self.home.glob("node-*.log")))

    # -- observing ---------------------------------------------------------------------------------

    def facts(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Returns the facts that the coordinator recorded: ``{"ts", "kind", …}``, oldest first."""
        return [f for f in self._facts.of(self.store / "events.jsonl") if kind in (None, f["kind"])]

    def status(self) -> dict[str, Any]:
        """Returns the job's status, or ``{}`` if no coordinator responds."""
        line = [str(EVERSTEP), "status", "--json", self.job]
        out = subprocess.run(line, env=self.env, capture_output=True, check=False).stdout
        jobs = json.loads(out)["jobs"] if out else []
        return jobs[0] if jobs else {}

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs an everstep command in the environment of the job."""
        return subprocess.run(
            [str(EVERSTEP), *words], env=self.env, capture_output=True, text=True, timeout=30, check=False
        )

    def goodput(self) -> dict[str, Any]:
        """Returns the output of ``everstep goodput``."""
        return dict(json.loads(self.ask("goodput", self.job, "--json").stdout)["jobs"][0])

    def workers_now(self) -> dict[int, dict[str, Any]]:
        """Returns the living workers by rank."""
        return {w["rank"]: w for w in self.status().get("workers", [])}

    def runs(self, size: int, *, warm: bool = False) -> bool:
        """Returns whether a world of ``size`` ranks trains and, if ``warm``, has warm processes for
        all."""
        workers = self.workers_now().values()
        stepping = sum(w["step"] is not None for w in workers)
        return (
            self.status().get("world_size") == size
            and stepping == size
            and (not warm or all(w["warm"] for w in workers))
        )

    def step(self) -> int:
        """Returns the number of steps that every rank has completed."""
        workers = self.workers_now()
        steps = [w["step"] or 0 for w in workers.values()]
        return min(steps) if len(steps) == self.nodes * self.workers else 0

    def wait_for(self, what: Callable[[], Any], timeout: float = 90, why: str = "") -> Any:
        """Waits until ``what()`` is true. If it never is, raises with the agents' output."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            value = what()
            if value:
                return value
            if all(a.poll() is not None for a in self.agents.values()):
                value = what()
                if value:
                    return value
                raise RuntimeError(f"the job ended while waiting for {why or what}:\n{self.output()[-3000:]}")
            time.sleep(0.02)
        raise TimeoutError(f"waited {timeout} s for {why or what}:\n{self.output()[-3000:]}\n{self.facts()[-6:]}")

    def wait_step(self, step: int, timeout: float = 120) -> None:
        """Waits until every rank has completed ``step`` steps."""
        self.wait_for(lambda: self.step() >= step, timeout, f"step {step}")

    def wait(self, timeout: float = 300) -> list[int]:
        """Waits for all agents and returns their exit codes by node."""
        deadline = time.monotonic() + timeout
        for agent in self.agents.values():
            try:
                agent.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as e:
                raise TimeoutError(
                    f"still running after {timeout} s:\n{self.output()[-3000:]}\n{self.facts()[-8:]}"
                ) from e
        return [self.agents[n].returncode for n in sorted(self.agents)]

    # -- breaking ----------------------------------------------------------------------------------

    def worker_pid(self, rank: int) -> int:
        """Returns the process id of a rank in the newest generation.

        Status may still show the previous one.
        """

        def newest() -> int | None:
            pid = self.workers_now().get(rank, {}).get("pid")
            started = self.facts("GenerationStarted")
            if not pid or not started:
                return None
            with contextlib.suppress(OSError):
                return pid if born(pid) > started[-1]["ts"] - 0.02 else None
            return None

        return int(self.wait_for(newest, why=f"rank {rank}"))

    def kill_worker(self, rank: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Sends a signal to a worker. Returns when, in Unix time."""
        pid = self.worker_pid(rank)
        at = time.time()
        os.kill(pid, number)
        return at

    def coordinator_pid(self) -> int:
        """Returns the coordinator's process id."""
        return int(json.loads((self.store / "endpoint.json").read_text())["pid"])

    def kill_coordinator(self) -> float:
        """Kills the coordinator. Returns when."""
        pid, at = self.coordinator_pid(), time.time()
        os.kill(pid, signal.SIGKILL)
        return at

    def kill_node(self, node: int) -> float:
        """Loses a machine: kills agent, guard and workers, and removes all memory at once.

        Returns when.
        """
        agent = self.agents[node]
        coordinator = self.coordinator_pid()
        doomed = [agent.pid, *(p for p in descendants(agent.pid) if p != coordinator)]
        at = time.time()
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()
        shutil.rmtree(self.memory / str(node), ignore_errors=True)
        return at

    def rot(self, node: int, at: int) -> int:
        """Flips a bit in every slot of a node's first rank, ``at`` bytes after the superblock.

        Returns the number of slots.
        """
        slots = list((self.memory / str(node)).glob("local-0-slot-*"))
        for slot in slots:
            with slot.open("r+b") as f:
                f.seek(4096 + at)
                byte = f.read(1)
                f.seek(-1, 1)
                f.write(bytes([byte[0] ^ 8]))
        return len(slots)

    def inject(self, *words: str) -> None:
        """Runs ``everstep inject`` on this job."""
        line = [str(EVERSTEP), "inject", *words, "--job", self.job]
        subprocess.run(line, env=self.env, check=True, capture_output=True, timeout=30)

    # -- cleaning up -------------------------------------------------------------------------------

    def leaks(self) -> list[str]:
        """Returns what a finished job has left behind: processes and arenas."""
        time.sleep(0.3)
        left = [f"process {pid}" for pid in marked(self.job)]
        if self.memory.exists():
            left += [f"arena {p}" for p in self.memory.rglob("*") if p.is_file()]
        return left

    def close(self) -> None:
        """Ends all remaining processes and removes the harness's files."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            os.kill(self.coordinator_pid(), signal.SIGKILL)
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
                agent.wait()
        deadline = time.monotonic() + 5
        while marked(self.job) and time.monotonic() < deadline:
            time.sleep(0.05)
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)


@contextlib.contextmanager
def cluster(job: str, command: list[str], **kwargs: Any) -> Iterator[Cluster]:
    """A cluster that is closed at the end of the block, whatever happens."""
    c = Cluster(job, command, **kwargs)
    try:
        yield c
    finally:
        c.close()
