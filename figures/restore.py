"""A fresh process reads the state back nearly as fast as bare memory and sockets allow.

From memory against a copy, from a peer against TCP, and against DCP from disk.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator

from figures import transfer
from figures.bound import Bound
from harness.cluster import ROOT


def _dcp(disk: str, size: int) -> float:
    """Returns the seconds of a DCP load with a cold page cache."""
    line = [sys.executable, "figures/scripts/dcp_load.py", disk, str(size)]
    return transfer.seconds(subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout)[
        "dcp-load"
    ][0]


def measure(soak: bool) -> Iterator[Bound]:
    transfer.build()
    rounds = 15 if soak else 9
    size = transfer.GB
    with transfer.memory() as memory:
        transfer.run("slot", memory / "slot", size)
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            for how in ("memcpy", "verified", "unverified"):
                found[how] += transfer.run("load", memory / "slot", how)[how]
        yield Bound(
            "local-over-memcpy",
            round(transfer.ratio(found["verified"], found["memcpy"]), 3),
            "x a two-thread copy, cold mapping",
            "<=",
            1.3,
            samples=tuple(found["verified"]),
        )
        yield Bound(
            "verified-against-unverified",
            round(transfer.ratio(found["unverified"], found["verified"]), 3),
            "of the speed",
            ">=",
            0.9,
        )
        with transfer.serving(memory / "holder", "127.0.0.1") as (holder, raw):
            peer = transfer.run("send", holder, raw, memory, size, 5)
        yield Bound(
            "peer-over-tcp",
            round(transfer.ratio(peer["pull"], peer["raw-receive"]), 3),
            "x two bare streams",
            "<=",
            1.3,
            samples=tuple(peer["pull"]),
        )
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as disk:
        dcp = [_dcp(disk, size) for _ in range(3)]
    local = statistics.median(found["verified"])
    yield Bound(
        "faster-than-dcp",
        round(statistics.median(dcp) / local, 1),
        f"times ({statistics.median(dcp):.2f} s against {local:.3f} s)",
        ">=",
        10,
    )
