"""Sampling costs the agent a small share of a core, and few bytes.

The CPU time of an agent that samples every second and keeps a ring with 100 samples per second,
compared with an agent that takes no samples; and how many bytes a sample takes on the network.
"""

from __future__ import annotations

import base64
import os
import re
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.cluster import cluster

TIMES, SECONDS = 3, 30


def _used(task: Path) -> float:
    fields = (task / "stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Wire:
    """Captures the traffic to one port of the loopback device (packet(7))."""

    HEADERS = 9  # of an HTTP/2 frame, RFC 9113
    OUTGOING = 4

    def __init__(self, port: int) -> None:
        self.port, self.payloads, self.over = port, list[tuple[int, bytes]](), False
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003))
        self.socket.bind(("lo", 0))
        self.socket.settimeout(0.2)
        self.thread = threading.Thread(target=self._listen)
        self.thread.start()

    def _listen(self) -> None:
        while not self.over:
            try:
                packet, (_, protocol, kind, *_) = self.socket.recvfrom(1 << 16)
            except TimeoutError:
                continue
            # Loopback shows each packet twice: leaving and arriving.
            if protocol != 0x0800 or kind == self.OUTGOING or packet[9] != 6:
                continue
            ip = (packet[0] & 15) * 4
            if int.from_bytes(packet[ip + 2 : ip + 4], "big") == self.port:
                headers = ip + (packet[ip + 12] >> 4) * 4
                self.payloads.append((headers, packet[headers:]))

    def samples(self) -> tuple[int, int]:
        """Returns the bytes of all sample lines with their headers, and the number of samples in
        them."""
        self.over = True
        self.thread.join()
        sent = held = 0
        for headers, payload in self.payloads:
            for line in re.findall(rb'{"Samples":[^\n]*"packed":"([^"]*)"}}\n', payload):
                held += len(base64.b64decode(line + b"=" * (-len(line) % 4))) // 5
            sent += sum(len(line) + self.HEADERS + headers for line in re.findall(rb'{"Samples":[^\n]*\n', payload))
        return sent, held


def _alone() -> float:
    """Returns the percentage of a core used by a thread that only sleeps 10 ms at a time.

    No ring can be cheaper on this machine.
    """
    import resource

    before = resource.getrusage(resource.RUSAGE_THREAD)
    began = time.monotonic()
    while time.monotonic() < began + 5:
        time.sleep(0.01)
    after = resource.getrusage(resource.RUSAGE_THREAD)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / (time.monotonic() - began) * 100


def _run() -> tuple[float, float, float, float]:
    """Returns the percentage of a core of the sampling thread and of the whole agent.

    Also the bytes of a sample, and the samples per second.
    """
    with cluster(
        "collect", ["figures/scripts/plain_ddp.py", "--steps", "100000", "--pause", "0.2"], nodes=2, workers=1
    ) as c:
        c.start_all()
        c.wait_for(lambda: c.step() > 3, 120, "steps")
        agent = Path(f"/proc/{c.agents[0].pid}")
        sampler = next(t for t in (agent / "task").iterdir() if (t / "comm").read_text().startswith("everstep-sample"))

        # In the smallest unit that the kernel has: ticks are too coarse.
        def nanoseconds(at: Path) -> int:
            return int((at / "schedstat").read_text().split()[0])

        def slept() -> int:
            return int(
                re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", (sampler / "status").read_text(), re.MULTILINE)[0]
            )

        wire = Wire(c.port)
        before, whole, looks = nanoseconds(sampler), _used(agent), slept()
        began = time.monotonic()
        time.sleep(SECONDS)
        lasted = time.monotonic() - began
        used = (nanoseconds(sampler) - before) / 1e9 / lasted * 100, (_used(agent) - whole) / lasted * 100
        sent, held = wire.samples()
        return *used, sent / max(held, 1), (slept() - looks) / lasted


def measure(soak: bool) -> Iterator[Bound]:
    seen = [_run() for _ in range(TIMES)]
    samples = tuple(round(s, 3) for s, *_ in seen)
    print(f"whole agent: {statistics.median(w for _, w, *_ in seen):.2f} % of a core")
    yield Bound(
        "sampler",
        round(statistics.median(s for s, *_ in seen), 3),
        f"% of a core for the thread that samples, ring on, median of {TIMES}",
        "<=",
        0.5,
        samples=samples,
    )
    rings = tuple(round(1000 / n, 1) for *_, n in seen)
    print(f"a thread that only sleeps for 10 ms: {statistics.median(_alone() for _ in range(TIMES)):.2f} % of a core")
    yield Bound(
        "ring", statistics.median(rings), "ms between two looks of the ring, within that", "<=", 11, samples=rings
    )
    sizes = tuple(round(b, 1) for _, _, b, _ in seen)
    yield Bound(
        "bytes",
        max(sizes),
        "bytes a sample on the wire, as captured, with the headers of HTTP/2, TCP and IP",
        "<=",
        20,
        samples=sizes,
    )
    yield Bound("captured", min(sizes), "bytes a sample, at least: something was captured", ">=", 5)
