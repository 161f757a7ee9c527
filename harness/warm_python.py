"""Runs Python scripts in processes that are forked from one that has imported torch: that takes
longer than most scripts of tests.

Each process has the arguments, the environment, the directory and the streams that it would have if
it had been started in the usual way, and ends like any other. What libraries read from the
environment when they are imported is that of the first process.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

#: What most scripts use.
_IMPORTED = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint")


@dataclass(frozen=True)
class Start:
    """What a process is started with."""

    #: A script and its arguments.
    line: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    #: The files for its standard output and standard error.
    out: str
    err: str


class WarmPython:
    """A process that has imported torch, and forks one that runs a script for each request."""

    def __init__(self) -> None:
        line = [sys.executable, str(Path(__file__).resolve())]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(self._process.kill)
        #: Processor time of all processes that have ended, in seconds.
        self.spent = 0.0

    def run(self, starts: Sequence[Start], timeout: float) -> list[int]:
        """Runs processes until all have ended. Returns their exit codes as :mod:`subprocess` does.
        After ``timeout`` seconds, it kills those that are left.

        Raises:
            subprocess.TimeoutExpired: when it has killed some.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([timeout, [vars(s) for s in starts]]), file=self._process.stdin, flush=True)
        late, codes, self.spent = json.loads(self._process.stdout.readline())
        if late:
            raise subprocess.TimeoutExpired(list(starts[0].line), timeout)
        return [int(code) for code in codes]


def run_cold(starts: Sequence[Start], timeout: float) -> list[int]:
    """Does what :meth:`WarmPython.run` does with processes that import everything themselves."""
    running: list[subprocess.Popen[bytes]] = []
    ends = time.monotonic() + timeout
    try:
        for start in starts:
            with open(start.out, "ab") as out, open(start.err, "ab") as err:
                line = [sys.executable, *start.line]
                running.append(subprocess.Popen(line, env=start.env, cwd=start.cwd, stdout=out, stderr=err))
        return [process.wait(max(ends - time.monotonic(), 0)) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


def _become(start: Start) -> None:
    """Makes this process what it would be if it had been started in the usual way."""
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, start.out, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, start.err, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.chdir(start.cwd)
    os.environ.clear()
    os.environ.update(start.env)
    sys.argv = list(start.line)
    sys.path[0] = os.path.dirname(os.path.abspath(start.line[0]))


def _ended(pids: list[int], timeout: float) -> tuple[bool, list[int], float]:
    """Waits for processes. Returns whether some had to be killed, the exit codes, and the processor
    time of all processes so far."""
    late = False

    def kill(*_: object) -> None:
        nonlocal late
        late = True
        for pid in left:
            os.kill(pid, signal.SIGKILL)

    left, codes = set(pids), {}
    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    while left:
        pid, status = os.waitpid(-1, 0)
        if pid in left:
            left.remove(pid)
            codes[pid] = os.waitstatus_to_exitcode(status)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return late, [codes[pid] for pid in pids], sum(os.times()[:4])


def _serve() -> Start:
    """Forks and waits. Returns in each of the processes that it has forked."""
    for line in sys.stdin:
        timeout, asked = json.loads(line)
        pids = []
        for start in asked:
            pid = os.fork()
            if pid == 0:
                _become(start := Start(**start))
                return start
            pids.append(pid)
        print(json.dumps(_ended(pids, timeout)), flush=True)
    sys.exit()


if __name__ == "__main__":
    for _name in _IMPORTED:
        importlib.import_module(_name)
    _path = _serve().line[0]
    _main = sys.modules["__main__"] = ModuleType("__main__")
    _main.__file__ = _path
    exec(compile(Path(_path).read_text(), _path, "exec"), vars(_main))
