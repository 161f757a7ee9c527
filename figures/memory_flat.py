"""Memory is constant over 200 steps, and is what `everstep memory` predicted."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import EVERSTEP, ROOT, Cluster, cluster, descendants


def _resident(pid: int) -> tuple[int, int]:
    """Returns a process's private bytes, and those of files that it maps.

    The latter include its program, which other processes map, too.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in lines)
    # Shared memory is counted where it resides, not where it is mapped.
    own, files = (int(fields.get(name, "0").split()[0]) << 10 for name in ("RssAnon", "RssFile"))
    return own, files


def _node(c: Cluster, node: int) -> tuple[int, int]:
    """Returns the bytes of one node in shared memory, and outside of it in agent and guard.

    The program's pages count once.
    """
    arena = sum(f.stat().st_blocks * 512 for f in (c.memory / str(node)).rglob("*") if f.is_file())
    agent = c.agents[node].pid
    outside = [p for p in [agent, *descendants(agent)] if b"everstep" in Path(f"/proc/{p}/exe").resolve().name.encode()]
    resident = [_resident(p) for p in outside]
    return arena, sum(own for own, _ in resident) + max(files for _, files in resident)


def _run(width: int) -> tuple[list[tuple[int, int]], int, int]:
    """Returns samples of node 1 over steps 50 to 200, its state's bytes, and what `everstep memory`
    reports."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            "figures/sharded.py",
            "--out",
            scratch,
            "--steps",
            "230",
            "--pause",
            "0.02",
            "--width",
            str(width),
            "--layers",
            "2",
        ]
        with cluster("f-memory", command, nodes=2, workers=1) as c:
            c.start_all()
            samples = []
            for step in range(50, 201, 15):
                c.wait_step(step, 120)
                samples.append(_node(c, 1))
            line = [str(EVERSTEP), "ckpt", "ls", "--json", "f-memory"]
            rows = json.loads(subprocess.run(line, env=c.env, capture_output=True, check=True).stdout)["checkpoints"]
            state = max(r["bytes"] for r in rows if r["tier"] == "local")
            c.wait(120)
    line = [str(EVERSTEP), "memory", "--json", "--state", str(state), "--nodes", "2", "--replicas", "1", "--no-persist"]
    said = json.loads(subprocess.run(line, cwd=ROOT, capture_output=True, check=False).stdout)
    return samples, state, said["need_bytes"]


def measure(soak: bool) -> Iterator[Bound]:
    found = {}
    for label, width in (("small", 1024), ("large", 2048)):
        samples, state, said = _run(width)
        total = [a + b for a, b in samples]
        slope = (total[-1] - total[0]) / total[0]
        found[label] = samples[-1][1]
        yield Bound(
            f"{label}.growth", round(slope * 100, 3), f"% from step 50 to 200 ({state >> 20} MiB of state)", "<=", 1
        )
        yield Bound(
            f"{label}.as-said",
            round(abs(total[-1] / said - 1) * 100, 2),
            f"% off what everstep memory says ({said >> 20} MiB)",
            "<=",
            5,
        )
    yield Bound(
        "outside-growth",
        round((found["large"] - found["small"]) / 2**20, 2),
        "MiB more outside the arenas with four times the state",
        "<=",
        2,
    )
