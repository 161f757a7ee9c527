"""What it costs to be looked at: the agent's CPU with samples every second and a ring of 100 looks a second, against an agent that takes none; and
bytes of a sample on its way."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import cluster

TIMES, SECONDS = 3, 30


def _used(task: Path) -> float:
    fields = (task / "stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _run() -> tuple[float, float]:
    """Percent of a core that the sampling thread uses, and the whole agent."""
    with cluster("collect", ["figures/scripts/plain_ddp.py", "--steps", "100000", "--pause", "0.2"], workers=1) as c:
        c.start_all()
        c.wait_for(lambda: c.step() > 3, 120, "steps")
        agent = Path(f"/proc/{c.agents[0].pid}")
        sampler = next(t for t in (agent / "task").iterdir() if (t / "comm").read_text().startswith("everstep-sample"))
        # In the smallest unit that the kernel has: ticks are too coarse.
        def nanoseconds(at: Path) -> int:
            return int((at / "schedstat").read_text().split()[0])

        before, whole = nanoseconds(sampler), _used(agent)
        began = time.monotonic()
        time.sleep(SECONDS)
        lasted = time.monotonic() - began
        return (nanoseconds(sampler) - before) / 1e9 / lasted * 100, (_used(agent) - whole) / lasted * 100


def _bytes() -> float:
    """A line as it is sent, of twelve metrics."""
    import base64
    import struct

    packed = base64.b64encode(b"".join(struct.pack("<Bf", n, 1.0) for n in range(12))).rstrip(b"=").decode()
    line = json.dumps({"Samples": {"at": 1_790_000_000_000, "packed": packed}}, separators=(",", ":")) + "\n"
    # With the header of its HTTP/2 frame (RFC 9113), and those of TCP and IP.
    return (len(line) + 9 + 52) / 12


def measure(soak: bool) -> Iterator[Bound]:
    seen = [_run() for _ in range(TIMES)]
    samples = tuple(round(s, 3) for s, _ in seen)
    print(f"whole agent: {statistics.median(w for _, w in seen):.2f} % of a core")
    yield Bound("sampler", round(statistics.median(s for s, _ in seen), 3), f"% of a core for the thread that samples, ring of 10 ms on, median of {TIMES}", "<=", 0.5, samples=samples)
    yield Bound("bytes", round(_bytes(), 1), "bytes a sample on the wire, of twelve metrics", "<=", 20)
