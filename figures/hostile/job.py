"""A real job in strange surroundings: started, disturbed, and examined afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.cluster import EVERSTEP, ROOT, descendants

SCRIPT = ROOT / "figures" / "scripts" / "hostile_loop.py"
#: Seconds after which a job that has not ended counts as hung.
HARD = 240.0


class Job:
    """An agent (or one per node), its directories, and what it printed."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.out = home / "out"
        self.cwd = home / "cwd"
        for directory in (self.out, self.cwd, home / "user"):
            directory.mkdir()
        self.memory = Path(tempfile.mkdtemp(prefix="everstep-hostile-", dir="/dev/shm"))
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")}
        self.env |= {
            "EVERSTEP_STATE_DIR": str(home / "state"),
            "EVERSTEP_SHM_DIR": str(self.memory),
            "GLOO_SOCKET_IFNAME": "lo",
            "VIRTUAL_ENV": sys.prefix,
            "HOME": str(home / "user"),
        }
        self.env["PATH"] = f"{EVERSTEP.parent}:{self.env['PATH']}"
        self.agents: list[subprocess.Popen[bytes]] = []
        self.timed_out = False
        #: Called once the job has ended, to remove what was made around it.
        self.cleanups: list[Callable[[], None]] = []

    def line(self, options: list[str], words: list[str]) -> list[str]:
        """Returns the command line of a node."""
        return [str(EVERSTEP), "run", *options, str(SCRIPT), "--out", str(self.out), *words]

    def start(
        self,
        line: list[str],
        env: dict[str, str] | dict[bytes, bytes],
        *,
        cwd: str | bytes | Path | None = None,
        **more: Any,
    ) -> None:
        """Starts an agent, which prints to ``node-N.log``."""
        with (self.home / f"node-{len(self.agents)}.log").open("ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, **more}
            self.agents.append(subprocess.Popen(line, env=env, cwd=cwd or self.cwd, start_new_session=True, **streams))

    # -- observing ---------------------------------------------------------------------------------

    def said(self) -> str:
        """Returns what the agents and their workers printed, and every log below the job's
        directories."""
        own = self.printed()
        return own + "".join(_text(p) for p in self._files(".log") if p.parent != self.home)

    def printed(self) -> str:
        """Returns what the agents and their workers printed."""
        return "".join(_text(p) for p in sorted(self.home.glob("node-*.log")))

    def own_lines(self) -> list[str]:
        """Returns what everstep itself printed, without its workers."""
        return [x for x in self.printed().splitlines() if x.startswith("everstep")]

    def _files(self, suffix: str) -> Iterator[Path]:
        """Yields the job's files with this suffix. Paths may be longer than the kernel accepts."""
        for root, _, names in os.walk(self.home):
            yield from (Path(root, name) for name in names if name.endswith(suffix))

    def steps(self, rank: int) -> list[tuple[int, str, int]]:
        """Returns the step, loss and process of each line that a rank wrote."""
        path = self.out / f"steps-{rank}"
        rows = [x.split() for x in path.read_text().splitlines()] if path.exists() else []
        return [(int(a), b, int(c)) for a, b, c in (r for r in rows if len(r) == 3)]

    def over(self) -> bool:
        """Returns whether all agents have ended."""
        return all(a.poll() is not None for a in self.agents)

    def reach(self, step: int, ranks: int = 2, seconds: float = 60.0) -> bool:
        """Waits until all ranks have completed this step.

        Returns false if the job or the time ends before.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(any(s >= step for s, _, _ in self.steps(r)) for r in range(ranks)):
                return True
            if self.over():
                return False
            time.sleep(0.02)
        return False

    def everybody(self) -> list[int]:
        """Returns all processes of the job."""
        return [p for node in range(len(self.agents)) for p in self.everybody_of(node)]

    def everybody_of(self, node: int) -> list[int]:
        """Returns all processes of one node.

        The coordinator is among those of the node that started it.
        """
        agent = self.agents[node]
        return [agent.pid, *descendants(agent.pid)] if agent.poll() is None else []

    def pids(self, role: str) -> list[int]:
        """Returns the processes of this role.

        One of ``agent``, ``coordinator``, ``guard``, ``template`` and ``worker``.
        """
        workers = {pid for rank in range(8) for _, _, pid in self.steps(rank)[-1:]}
        found = []
        for pid in self.everybody():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if _role(pid, words, workers, {a.pid for a in self.agents}) == role:
                    found.append(pid)
        return found

    # -- ending ------------------------------------------------------------------------------------

    def wait(self, seconds: float = HARD) -> None:
        """Waits for all agents to end. If one does not, the job is killed and counts as hung."""
        deadline = time.monotonic() + seconds
        for agent in self.agents:
            try:
                agent.wait(max(0.05, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.timed_out = True
        if self.timed_out:
            self.kill()

    def kill(self) -> None:
        """Kills all remaining processes."""
        doomed = [*self.everybody(), *self._coordinators()]
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.wait()

    def _coordinators(self) -> list[int]:
        """Returns the coordinators, which outlive the agent that started them."""
        found = []
        for path in self._files("endpoint.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                pid = int(json.loads(path.read_text())["pid"])
                if b"coordinator" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def codes(self) -> list[int]:
        """Returns the exit codes by node; for signals, like a shell."""
        return [128 - a.returncode if a.returncode < 0 else a.returncode for a in self.agents]


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _role(pid: int, words: list[bytes], workers: set[int], agents: set[int]) -> str:
    if pid in workers:
        return "worker"
    if pid in agents:
        return "agent"
    if b"coordinator" in words:
        return "coordinator"
    if b"guard" in words:
        return "guard"
    return "template" if any(b"template" in w for w in words) else "other"


@contextlib.contextmanager
def job() -> Iterator[Job]:
    """A job that is removed at the end of the block, with all its files."""
    home = Path(tempfile.mkdtemp(prefix="everstep-hostile-"))
    made = Job(home)
    try:
        yield made
    finally:
        made.kill()
        for clean in reversed(made.cleanups):
            clean()
        for path in (home, made.memory):
            shutil.rmtree(path, ignore_errors=True)


def meeting(node: int, nodes: int, port: int) -> list[str]:
    """Returns the options with which nodes on one machine find each other."""
    return ["--nnodes", str(nodes), "--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank", str(node)]
