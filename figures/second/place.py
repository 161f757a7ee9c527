"""A separate host in which two users live.

Its mounts, network, processes and shared memory are isolated from this machine's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from figures.second import program
from harness.cluster import EVERSTEP, ROOT

NOBODY = 65534
PYTHON = "/usr/bin/python3"
SCRIPT = ROOT / "figures" / "scripts" / "second_loop.py"
SHARED = ["/tmp", "/dev/shm"]
_ENTER = (
    "mount -t tmpfs -o mode=1777,size=256m none /tmp && mount -t tmpfs -o mode=1777,size=256m none /dev/shm && "
    "ip link set lo up && echo ready && exec sleep 100000"
)


class Place:
    """The host, the job of its first user, and what belongs to it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.chmod(0o755)
        self.out, self.cwd, self.precious = home / "out", home / "cwd", home / "precious" / "thesis"
        for directory, mode in (
            (self.out, 0o700),
            (self.cwd, 0o755),
            (home / "private", 0o700),
            (self.precious.parent, 0o755),
            (home / "user", 0o755),
        ):
            directory.mkdir()
            directory.chmod(mode)
        self.precious.write_text("years of work")
        self.precious.chmod(0o600)
        self.mode = home / "mode"
        self.set_mode("attack")
        self.secrets = {where: f"SECRET-{where}-{os.urandom(8).hex()}" for where in ("state",)}
        line = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "--net",
            "--ipc",
            "--pid",
            "--fork",
            "--mount-proc",
            "bash",
            "-c",
            _ENTER,
        ]
        self.host = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.host.stdout is not None
        assert self.host.stdout.readline() == "ready\n"
        inner = Path(f"/proc/{self.host.pid}/task/{self.host.pid}/children").read_text().split()
        self.through = ["nsenter", "--target", inner[0], "--mount", "--net", "--ipc", "--pid"]
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")} | {
            "HOME": str(home / "user"),
            "VIRTUAL_ENV": sys.prefix,
            "GLOO_SOCKET_IFNAME": "lo",
            "SECRET": self.secrets["state"],
        }
        self.running: list[subprocess.Popen[Any]] = []

    def set_mode(self, mode: str) -> None:
        """Sets what the second user does from now on."""
        new = self.home / "mode.new"
        new.write_text(mode)
        new.chmod(0o644)
        new.rename(self.mode)

    def attacker(
        self,
        *,
        only: list[str] | None = None,
        kind: int = 0,
        fill: bool = True,
        turns: bool = False,
        cores: str | None = None,
    ) -> Attacker:
        """Starts the second user. Returns when it is ready."""
        state = self.home / "user" / ".local" / "state" / "everstep"
        orders = {
            "canaries": list(self.secrets.values()),
            "shared": SHARED,
            "ours": [str(state), str(self.cwd), str(self.home / "user"), str(self.out), str(self.home / "private")],
            "victim": os.getuid(),
        }
        orders |= {
            "job": "attacked",
            "precious": str(self.precious),
            "mode": str(self.mode),
            "only": only,
            "kind": kind,
            "fill": fill,
            "turns": turns,
        }
        return Attacker(self, orders, cores)

    def start(
        self,
        *words: str,
        ranks: int = 2,
        options: tuple[str, ...] = (),
        cores: str | None = None,
        cwd: str | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts the job of the first user."""
        pinned = ["taskset", "-c", cores] if cores else []
        line = [
            *self.through,
            f"--wd={cwd or self.cwd}",
            "setsid",
            *pinned,
            str(EVERSTEP),
            "run",
            "--standalone",
            "--name",
            "attacked",
            "--nproc-per-node",
            str(ranks),
            *options,
            *(words or (str(SCRIPT),)),
            "--out",
            str(self.out),
            "--checkpoints",
            str(self.home / "private" / "checkpoints"),
        ]
        with (self.home / "log").open("ab") as log:
            self.running.append(subprocess.Popen(line, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        return self.running[-1]

    def run(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs a command of the first user."""
        return subprocess.run(
            [*self.through, f"--wd={self.cwd}", *words],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def rows(self, rank: int = 0) -> list[tuple[int, str, int, float, float]]:
        """Returns step, loss, process, time and seconds of each step."""
        path = self.out / f"steps-{rank}"
        rows = [x.split() for x in path.read_text().splitlines()] if path.exists() else []
        return [(int(a), b, int(c), float(d), float(e)) for a, b, c, d, e in (r for r in rows if len(r) == 5)]

    def until(self, what: Callable[[], Any], why: str, seconds: float = 120) -> Any:
        """Waits for a true value.

        Raises TimeoutError with the job's output if it ends or takes too long.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := what():
                return value
            if self.running and self.running[-1].poll() is not None:
                break
            time.sleep(0.05)
        raise TimeoutError(f"waited for {why}: {self.said()[-1500:]}")

    def said(self) -> str:
        """Returns what the job printed."""
        path = self.home / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """Ends the host's first process, and with it all others."""
        for child in subprocess.run(
            ["pgrep", "-P", str(self.host.pid)], capture_output=True, text=True, check=False
        ).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), 9)
        self.host.wait()
        for one in self.running:
            one.wait()


class Attacker:
    """The second user's process, and what it reports."""

    def __init__(self, place: Place, orders: dict[str, Any], cores: str | None) -> None:
        self.place = place
        self.report = place.home / f"attacker-{time.monotonic_ns()}"
        pinned = ["taskset", "-c", cores] if cores else []
        # The program comes through a pipe, because this user can read no file of ours.
        code = "import sys; n = int(sys.stdin.readline()); exec(compile(sys.stdin.read(n), 'attacker', 'exec'))"
        become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        with self.report.open("wb") as out:
            self.process = subprocess.Popen(
                [*place.through, "--wd=/", "setsid", *pinned, *become, PYTHON, "-I", "-c", code],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                text=True,
                env={"PATH": "/usr/bin:/bin"},
            )
        place.running.insert(0, self.process)
        assert self.process.stdin is not None
        text = program.text()
        self.process.stdin.write(f"{len(text)}\n{text}{json.dumps(orders)}\n")
        self.process.stdin.close()
        deadline = time.monotonic() + 30
        while "ready" not in self.report.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self.report.read_text()[-2000:])
            time.sleep(0.05)

    def rounds(self) -> list[dict[str, Any]]:
        """Returns what it has reported so far."""
        lines = self.report.read_text().splitlines()
        if self.process.poll() not in (None, 0, -9):
            raise RuntimeError("\n".join(lines[-20:]))
        return [json.loads(x) for x in lines if x.startswith("{") and x.endswith("}")]

    def more(self, count: int, seconds: float = 120) -> None:
        """Waits until it has repeated everything ``count`` times."""
        before = len(self.rounds())
        deadline = time.monotonic() + seconds
        while len(self.rounds()) < before + count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the attacker is stuck: {self.report.read_text()[-500:]}")
            time.sleep(0.05)

    def end(self) -> list[dict[str, Any]]:
        """Ends the attacker and returns its reports."""
        self.place.set_mode("end")
        self.process.wait(60)
        return self.rounds()


@contextlib.contextmanager
def place() -> Iterator[Place]:
    """A host that is removed at the end of the block."""
    home = Path(tempfile.mkdtemp(prefix="everstep-second-", dir="/var/tmp"))
    made = None
    try:
        made = Place(home)
        yield made
    finally:
        if made:
            made.close()
        shutil.rmtree(home, ignore_errors=True)
