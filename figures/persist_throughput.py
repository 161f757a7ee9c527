"""A durable checkpoint is nearly as fast as the bare device, and faster than other savers."""

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


def measure(soak: bool) -> Iterator[Bound]:
    transfer.build()
    rounds = 9 if soak else 5
    size = transfer.GB
    with transfer.memory() as memory, tempfile.TemporaryDirectory(dir=ROOT / "target") as disk:
        found = transfer.run("persist", disk, memory, size, rounds)
        over = transfer.ratio(found["persist"], found["raw"])
        rate = size / statistics.median(found["persist"]) / 1e9
        yield Bound(
            "over-raw",
            round(over, 3),
            f"x raw O_DIRECT ({rate:.2f} GB/s)",
            "<=",
            1.2,
            samples=tuple(found["persist"] + found["raw"]),
        )
        peers: dict[str, list[float]] = defaultdict(list)
        for _ in range(3):
            line = [sys.executable, "figures/scripts/disk_savers.py", disk, str(size)]
            for name, times in transfer.seconds(
                subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
            ).items():
                peers[name] += times
            for name, times in transfer.run("persist", disk, memory, size, 1).items():
                peers[name] += times
        ours, raw = statistics.median(peers["persist"]), statistics.median(peers["raw"])
        for name, limit in (("dcp", 5), ("torch-save", 4), ("safetensors", 2)):
            theirs = statistics.median(peers[name])
            yield Bound(
                f"faster-than-{name}",
                round(theirs / ours, 2),
                f"times (raw O_DIRECT itself: {theirs / raw:.2f})",
                ">=",
                limit,
                samples=tuple(peers[name]),
            )
