"""The node check names exactly the bad or slow nodes, or the bad connection.

Simulated with 2 to 64 nodes, and with real collectives between four to six machines (network
namespaces) whose control network always works.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from figures.bound import Bound
from figures.hosts import data_path, data_rate, hosts, link
from harness.cluster import EVERSTEP, ROOT, free_port

#: What is broken, the number of nodes, and what the check must report: bad nodes, slow nodes,
#: links.
Case = tuple[str, int, Callable[[list[str]], None] | None, list[int], list[int], list[tuple[int, int]]]


def _both(names: list[str]) -> None:
    link(names, 1, "down", net=1)
    link(names, 4, "down", net=1)


CASES: list[Case] = [
    ("all-well", 6, None, [], [], []),
    ("one-bad", 6, lambda n: link(n, 3, "down", net=1), [3], [], []),
    ("two-bad", 6, _both, [1, 4], [], []),
    ("odd-one-bad", 5, lambda n: link(n, 4, "down", net=1), [4], [], []),
    ("of-four", 4, lambda n: link(n, 0, "down", net=1), [0], [], []),
    ("bad-link", 6, lambda n: data_path(n, 2, 3), [], [], [(2, 3)]),
    ("slow-network", 6, lambda n: data_rate(n, 5, "200mbit"), [], [5], []),
    ("slow-node", 6, None, [], [2], []),
]


@contextlib.contextmanager
def _quota(percent: int) -> Iterator[Path]:
    """A cgroup whose processes together get this percentage of one processor."""
    group = (
        next(p for p in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")) if p.is_dir())
        / f"everstep-figure-{os.getpid()}"
    )
    group.mkdir()
    try:
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{percent}000 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text(f"{percent}000")
        yield group
    finally:
        # Killed processes in it need their share of the processor to end.
        deadline = time.monotonic() + 20
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        group.rmdir()


def _run(names: list[str], home: Path, slow: int, group: Path | None) -> tuple[str, float, set[int]]:
    """Returns what every node was told, the seconds it took, and the exit codes."""
    token = home / "token"
    token.write_text("secret")
    token.chmod(0o600)
    env = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "eth1",
        "EVERSTEP_SHM_DIR": str(home / "shm"),
        "EVERSTEP_STATE_DIR": str(home / "state"),
    }
    (home / "shm").mkdir(exist_ok=True)
    meet = [
        "--insecure",
        "--token-file",
        str(token),
        "--nnodes",
        str(len(names)),
        "--rdzv-endpoint",
        f"10.77.8.1:{free_port()}",
    ]
    began = time.monotonic()
    nodes = []
    for i, name in enumerate(names):
        line = ["ip", "netns", "exec", name, str(EVERSTEP), "check", *meet, "--node-rank", str(i)]
        nodes.append(
            subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        )
        if group and i == slow:
            (group / "cgroup.procs").write_text(str(nodes[-1].pid))
    said = [
        next((line for line in node.communicate(timeout=180)[1].splitlines() if "checked in" in line), "nothing")
        for node in nodes
    ]
    took = time.monotonic() - began
    assert len(set(said)) == 1, said
    return said[0], took, {node.returncode for node in nodes}


def _named(said: str) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    bad = [int(n) for n in re.findall(r"node (\d+) is bad", said)]
    slow = [int(n) for n in re.findall(r"node (\d+) is slow", said)]
    links = [(int(a), int(b)) for a, b in re.findall(r"nodes (\d+) and (\d+) are good, but the link", said)]
    return bad, slow, links


def measure(soak: bool) -> Iterator[Bound]:
    line = ["cargo", "test", "-q", "--release", "-p", "everstep-core", "--lib", "node_check", "--", "--nocapture"]
    run = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.search(r"node check: (\d+) cases of 2 to 64 nodes, (\d+) with two good pairs", run.stdout)
    cases, exact = (int(n) for n in found.groups()) if found else (0, 0)
    yield Bound("simulated.cases", cases, "random cases: 2 to 64 nodes, up to 3 bad, perhaps a bad link", ">=", 10_000)
    yield Bound(
        "simulated.wrong",
        int(run.returncode != 0),
        f"not named exactly with two good pairs ({exact} cases), somebody outside the certain set, or more than 3 rounds",
        "=",
        0,
    )
    times = {}
    for name, count, breaks, *expected in CASES:
        with hosts(count, data=True) as names, tempfile.TemporaryDirectory(dir="/dev/shm") as home:
            if breaks:
                breaks(names)
            with _quota(12) if name == "slow-node" else contextlib.nullcontext() as group:
                said, took, codes = _run(names, Path(home), 2, group)
        print(f"{name}: {took:.1f} s, exit codes {sorted(codes)}: {said}")
        right = _named(said) == tuple(expected) and codes == {int(any(expected))} and "one of nodes" not in said
        times[name] = round(took, 1)
        yield Bound(f"real.{name}", int(right), f"of {count} nodes: named exactly, exit code as it should be", "=", 1)
    yield Bound(
        "real.seconds",
        max(times.values()),
        "s at worst of all of these, start of Python and torch on all nodes included",
        "<=",
        20,
        samples=tuple(times.values()),
    )
