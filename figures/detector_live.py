"""Of five live machines, the disturbed one is named in time, and no other.

Each machine is a network namespace and a control group with its own agent. On one of them, another
program uses the processor, memory or disk, the network is slowed down, or the worker is stopped.
Continuity is 20 s here to keep the measurement short.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from figures.bound import Bound
from figures.hosts import hosts
from harness.groups import groups
from harness.machines import Machines

NODES = 5
CONTINUITY = 20
SETTINGS = (
    f"[robust]\none_family_s = {CONTINUITY}\ntwo_families_s = {CONTINUITY}\ndead_s = {CONTINUITY}\nknown_s = 30\n"
)
#: A verdict is in time within this many seconds after the continuity.
LATE = 60
#: Seconds until offsets are known, and from one fault to the next.
WARM, QUIET = 70, 30

CPU = "while True: pass"
MEMORY = "import time; x = bytearray(1500 << 20); x[::4096] = b'x' * len(x[::4096]); time.sleep(600)"


class Fleet:
    def __init__(self, c: Machines, through: dict[str, list[str]], scratch: Path) -> None:
        self.c, self.through, self.scratch = c, through, scratch

    def beside(self, node: int, *line: str) -> Callable[[], None]:
        """Runs another program on this machine. Returns a function that ends it."""
        process = subprocess.Popen(
            [*self.through[self.c.names[node]], *line],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

        def end() -> None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        return end

    def cpu(self, node: int) -> Callable[[], None]:
        return self.beside(node, "python3", "-c", CPU)

    def memory(self, node: int) -> Callable[[], None]:
        return self.beside(node, "python3", "-c", MEMORY)

    def disk(self, node: int) -> Callable[[], None]:
        return self.beside(
            node, "sh", "-c", f"while :; do dd if=/dev/zero of={self.scratch}/hog bs=1M count=256 oflag=direct; done"
        )

    def network(self, node: int) -> Callable[[], None]:
        namespace = self.c.names[node]
        subprocess.run(
            f"tc -n {namespace} qdisc add dev eth0 root tbf rate 24mbit burst 32kb latency 400ms".split(), check=True
        )
        return lambda: subprocess.run(f"tc -n {namespace} qdisc del dev eth0 root".split(), check=True) and None

    def stopped(self, node: int) -> Callable[[], None]:
        pid = next(w["pid"] for w in self.c.status()["workers"] if w["rank"] == node)
        os.kill(pid, signal.SIGSTOP)
        return lambda: None


KINDS = ("cpu", "memory", "network", "disk", "stopped")


def _said(c: Machines, after: float) -> list[tuple[float, list[str], str]]:
    """Returns who was named since ``after``, and by which metrics."""
    said: list[tuple[float, list[str], str]] = [
        (f["ts"], f["finding"]["nodes"], ",".join(f["finding"]["metrics"]))
        for f in c.facts("Unlike")
        if f["ts"] >= after
    ]
    said += [(f["ts"], [f["node"]], "incident") for f in c.facts("IncidentOpened") if f["ts"] >= after]
    return sorted(said)


def _round(number: int) -> list[dict[str, Any]]:
    seen = []
    with tempfile.TemporaryDirectory(dir="target") as scratch, hosts(NODES) as names, groups(names) as through:
        settings = Path(scratch) / "detector.toml"
        settings.write_text(SETTINGS)
        options = ["--max-restarts", "1000", "--detector", str(settings.absolute())]
        c = Machines(names, "fleet", ["figures/scripts/fleet.py", "--out", scratch], options=options)
        c.through = through
        fleet = Fleet(c, through, Path(scratch).absolute())
        try:
            c.start_all()
            c.wait_for(lambda: c.step() > 20, 120, "steps")
            began = time.time()
            time.sleep(WARM)
            for at, kind in enumerate(KINDS):
                node = (at + number) % NODES
                before = list(_said(c, began))
                onset = time.time()
                end = getattr(fleet, kind)(node)
                while not _said(c, onset) and time.time() < onset + CONTINUITY + LATE:
                    time.sleep(0.5)
                said = _said(c, onset)
                end()
                seen.append(
                    {
                        "kind": kind,
                        "node": str(node),
                        "before": before,
                        "said": said[:3],
                        "after": said[0][0] - onset if said else None,
                    }
                )
                print(seen[-1], flush=True)
                time.sleep(QUIET)
                began = time.time()
        finally:
            c.close()
    return seen


def measure(soak: bool) -> Iterator[Bound]:
    rounds = 4 if soak else 1
    seen = [one for number in range(rounds) for one in _round(number)]
    right = [s for s in seen if s["said"] and s["said"][0][1] == [s["node"]] and s["after"] <= CONTINUITY + LATE]
    innocent = [s for s in seen if s["before"] or any(n != s["node"] for _, nodes, _ in s["said"] for n in nodes)]
    least = 19 / 20
    yield Bound(
        "right",
        round(len(right) / len(seen), 3),
        f"of {len(seen)} faults named rightly and in time",
        ">=",
        least if soak else 0.8,
    )
    yield Bound("innocent", len(innocent), "machines named that were well", "=", 0)
    delays = tuple(round(s["after"], 1) for s in right)
    yield Bound(
        "latest",
        max(delays, default=0.0),
        "s from the beginning of a fault to its name",
        "<=",
        CONTINUITY + LATE,
        samples=delays,
    )
