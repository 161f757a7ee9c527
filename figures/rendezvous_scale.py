"""A thousand agents on real sockets, or ten thousand simulated ones, join within seconds."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import ROOT

EVERSTEP = str(Path(sys.executable).parent / "everstep")


def _build() -> tuple[Path, Path]:
    subprocess.run(
        ["cargo", "build", "-q", "--release", "-p", "everstep-wire", "--features", "net", "--example", "attach_many"],
        cwd=ROOT,
        check=True,
    )
    subprocess.run(
        ["cargo", "build", "-q", "--release", "-p", "everstep-sim", "--example", "scale"], cwd=ROOT, check=True
    )
    examples = ROOT / "target" / "release" / "examples"
    return examples / "attach_many", examples / "scale"


def _files(limit: int = 8192) -> None:
    """Runs in the child: a thousand connections need descriptors."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _gather(attach: Path, nodes: int) -> tuple[float, float]:
    """Returns the seconds from the last join until every node has its place.

    Also the coordinator's peak memory in MiB.
    """
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        coordinator = subprocess.Popen(
            [EVERSTEP, "coordinator", "--bind", "127.0.0.1:0", "--store", str(store)],
            preexec_fn=_files,  # noqa: PLW1509
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + 10
            while not (store / "endpoint.json").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            endpoint = json.loads((store / "endpoint.json").read_text())["endpoint"]
            out = subprocess.run(
                [str(attach), endpoint, str(store / "token"), str(nodes)],
                preexec_fn=_files,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            peak = next(
                x for x in Path(f"/proc/{coordinator.pid}/status").read_text().splitlines() if x.startswith("VmHWM")
            )
            return json.loads(out)["from_last_join"], int(peak.split()[1]) / 1024
        finally:
            coordinator.kill()
            coordinator.wait()


def measure(soak: bool) -> Iterator[Bound]:
    attach, scale = _build()
    runs = [_gather(attach, 1000) for _ in range(10 if soak else 5)]
    seconds = [s for s, _ in runs]
    yield Bound(
        "sockets-1000",
        round(max(seconds), 3),
        f"s from the last join to everyone having the world (median {statistics.median(seconds):.3f})",
        "<=",
        1,
        samples=tuple(runs),
    )
    yield Bound("coordinator-memory", round(max(m for _, m in runs), 1), "MiB peak", "<=", 512)
    runs_10k = [
        json.loads(subprocess.run([str(scale), "10000"], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    yield Bound("simulated-10000.placed", min(r["placed"] for r in runs_10k), "nodes", "=", 10_000)
    yield Bound(
        "simulated-10000.seconds",
        round(max(r["simulated"] for r in runs_10k), 3),
        "s simulated, all joining at once",
        "<=",
        2,
    )
    yield Bound(
        "simulated-10000.core",
        round(statistics.median(r["core_cpu"] for r in runs_10k), 3),
        "CPU-s of core",
        "<=",
        2,
        samples=tuple(runs_10k),
    )
