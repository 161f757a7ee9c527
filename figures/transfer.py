"""The program that moves bytes next to bare system calls, for several figures.

See ``crates/checkpoint/examples/transfer.rs``.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from harness.cluster import ROOT

GB = 10**9
PROGRAM = ROOT / "target" / "release" / "examples" / "transfer"


def build() -> None:
    """Compiles the program."""
    line = ["cargo", "build", "-q", "--release", "-p", "everstep-checkpoint", "--example", "transfer"]
    subprocess.run(line, cwd=ROOT, check=True)


@contextlib.contextmanager
def memory() -> Iterator[Path]:
    """A directory in shared memory."""
    path = Path(tempfile.mkdtemp(prefix="everstep-figure-", dir="/dev/shm"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def seconds(out: str) -> dict[str, list[float]]:
    """Returns the seconds that the program printed, by name, without warm-up rounds."""
    found: dict[str, list[float]] = defaultdict(list)
    for line in out.splitlines():
        row = json.loads(line)
        if not row["what"].startswith("warm-up"):
            found[row["what"]].append(row["seconds"])
    return found


def run(*arguments: object, prefix: tuple[str, ...] = ()) -> dict[str, list[float]]:
    """Runs the program to its end."""
    line = [*prefix, str(PROGRAM), *(str(a) for a in arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return seconds(done.stdout)


@contextlib.contextmanager
def serving(directory: Path, host: str, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Serves a holder and its raw counterpart. Yields their addresses."""
    directory.mkdir(exist_ok=True)
    server = subprocess.Popen([*prefix, str(PROGRAM), "serve", str(directory), host], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        holder, raw = server.stdout.readline().split()
        yield holder, raw
    finally:
        server.kill()
        server.wait()


def ratio(a: list[float], b: list[float]) -> float:
    """Returns the median of pairwise a/b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))
