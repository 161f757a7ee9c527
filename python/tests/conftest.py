"""Fixtures: real launches of the installed wheel, each in its own state directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
from processor_time import Measuring, Showing  # noqa: E402  # found through the line above

from harness.live import LOOP, Job  # noqa: E402

#: Each test starts processes, and most of them use little of torch.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent / "quick_torch"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Ranks share a pipe. An unbuffered print writes its parts one by one, so the lines of two ranks
# would be mixed.
os.environ.pop("PYTHONUNBUFFERED", None)

EVERSTEP = str(Path(sys.executable).parent / "everstep")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


class Failures:
    """Shows each failure at once: a run that is cut off prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.when} of {report.nodeid} failed:\n{report.longreprtext[-3000:]}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Measuring())
    # The processes that run tests report to this one.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config))
        config.pluginmanager.register(Showing())


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment that is isolated from other tests, including in shared memory."""
    memory = tempfile.mkdtemp(prefix="everstep-test-", dir="/dev/shm")
    yield {
        **os.environ,
        "EVERSTEP_STATE_DIR": str(tmp_path / "state"),
        "EVERSTEP_SHM_DIR": memory,
        "GLOO_SOCKET_IFNAME": "lo",
        "VIRTUAL_ENV": sys.prefix,
    }
    shutil.rmtree(memory, ignore_errors=True)


@pytest.fixture
def everstep(env: dict[str, str], tmp_path: Path) -> Run:
    """Runs the command line in ``tmp_path``. Keyword arguments become environment variables.

    Few of these jobs restart, so nothing is kept ready for that: importing torch takes longer than
    most of them.
    """

    def run(*arguments: str, timeout: float = 60, **more: str) -> subprocess.CompletedProcess[str]:
        line = [EVERSTEP, *arguments]
        return subprocess.run(
            line,
            env={"EVERSTEP_NO_WARM": "1", **env, **more},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a script and returns its path."""

    def write(text: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def job(env: dict[str, str], tmp_path: Path, script: Callable[[str], str]) -> Iterator[Callable[..., Job]]:
    started: list[Job] = []

    def start(*options: str) -> Job:
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        started.append(Job(env, out, script(LOOP), ["--max-restarts", "9", *options]))
        started[-1].steps()
        return started[-1]

    yield start
    for one in started:
        one.agent.terminate()
        try:
            one.agent.wait(30)
        except subprocess.TimeoutExpired:
            one.agent.kill()
