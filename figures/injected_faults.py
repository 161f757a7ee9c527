"""Of many kinds of faults in a job of four machines, nearly all are blamed rightly.

Faults are injected at seeded times and places. The machines are network namespaces with their own
kernel logs. Checks whether each fault is noticed, the right machine is named for the right reason,
the job continues, and `everstep explain` reports it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from figures.bound import Bound
from figures.hosts import hosts, link
from harness.machines import Machines

NODES = 4
#: What the lines of an explanation begin with.
ANSWERS = ("What", "Why", "Lost", "Done", "Worked?", "Next")
SEED = int(os.environ.get("EVERSTEP_FAULT_SEED", "1"))
#: What the script raises on request, by its class.
RAISED = [
    "script-error",
    "cuda-out-of-memory",
    "gpu-memory",
    "cuda-illegal-access",
    "disk-full",
    "numerics",
    "nvlink",
    "data-damaged",
]
#: Machines are excluded for these until they are repaired.
BROKEN = {"gpu-memory", "nvlink", "xid", "xid-hang"}
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid={pid}, name=python, GPU has fallen off the bus."
OOM = "Memory cgroup out of memory: Killed process {pid} (python) total-vm:1kB, anon-rss:1kB"


class Run:
    """The job, and operations on it."""

    def __init__(self, c: Machines, names: list[str], out: Path) -> None:
        self.c, self.names, self.out = c, names, out

    def whole(self) -> None:
        """Waits until all machines take part and each has made some steps."""

        def ready() -> bool:
            status = self.c.status()
            steps = [w["step"] for w in status.get("workers", []) if w["step"] is not None]
            first, opened = self.c.facts("FirstStep"), self.c.facts("IncidentOpened")
            newest = (
                bool(first)
                and first[-1]["generation"] == status.get("generation")
                and not (opened and opened[-1]["ts"] > first[-1]["ts"])
            )
            return (
                newest
                and status.get("world_size") == NODES
                and len(steps) == NODES
                and min(steps) >= first[-1]["step"] + 3
            )

        self.c.wait_for(ready, 180, "all machines")

    def pid(self, node: int) -> int:
        """Returns the worker of a machine.

        Ranks follow the order of the machines if all take part.
        """
        return self.c.worker_pid(node)

    def inject(self, node: int, what: str) -> float:
        failed = self.out / f"failed-{node}-0"
        failed.unlink(missing_ok=True)
        (self.out / f"fail-{node}-0").write_text(what)
        return float(self.c.wait_for(lambda: failed.exists() and failed.read_text(), 30, what))

    def signal(self, node: int, number: signal.Signals) -> float:
        pid, at = self.pid(node), time.time()
        os.kill(pid, number)
        return at

    def said_and_killed(self, node: int, line: str, number: signal.Signals, after: float = 0.0) -> float:
        pid, at = self.pid(node), time.time()
        self.c.kernel_says(node, line.format(pid=pid))
        time.sleep(after)
        os.kill(pid, number)
        return at

    def cut(self, node: int) -> float:
        at = time.time()
        link(self.names, node, "down")
        time.sleep(3)
        link(self.names, node, "up")
        return at

    def lose(self, node: int) -> float:
        at = self.c.kill_node(node)
        time.sleep(2)
        self.c.start(node)
        return at

    def lose_agent(self, node: int) -> float:
        at = time.time()
        self.c.agents[node].kill()
        self.c.agents[node].wait()
        time.sleep(1)
        self.c.start(node)
        return at

    def split(self, node: int) -> float:
        at = time.time()
        done = self.c.ask("inject", "netsplit", "--rank", str(node), "--for", "4s", "--job", self.c.job)
        assert done.returncode == 0, done.stderr
        return at

    def mend(self, node: int) -> None:
        """Simulates a repair: restarts the machine's agent (TERM would ask the whole job to
        stop)."""
        self.c.agents[node].kill()
        self.c.agents[node].wait()
        self.c.start(node)


def _faults(run: Run) -> dict[str, tuple[Callable[[int], float], set[str]]]:
    """Returns by kind how the fault is caused, and the acceptable names."""
    faults: dict[str, tuple[Callable[[int], float], set[str]]] = {
        kind: (lambda n, k=kind: run.inject(n, k), {kind}) for kind in RAISED
    }  # type: ignore[misc]
    faults |= {
        "kill": (lambda n: run.signal(n, signal.SIGKILL), {"killed"}),
        "segv": (lambda n: run.signal(n, signal.SIGSEGV), {"crashed"}),
        "abort": (lambda n: run.signal(n, signal.SIGABRT), {"crashed"}),
        "stop": (lambda n: run.signal(n, signal.SIGSTOP), {"hung"}),
        "gil": (lambda n: run.inject(n, "gil"), {"hung"}),
        "line": (lambda n: run.inject(n, "line"), {"hung"}),
        "exit": (lambda n: run.inject(n, "exit"), {"unknown"}),
        "oom": (lambda n: run.said_and_killed(n, OOM, signal.SIGKILL), {"host-memory"}),
        "xid": (lambda n: run.said_and_killed(n, XID, signal.SIGKILL, 0.1), {"gpu-lost"}),
        "xid-hang": (lambda n: run.said_and_killed(n, XID, signal.SIGSTOP, 0.1), {"gpu-lost"}),
        "cut": (run.cut, {"node-lost"}),
        "node": (run.lose, {"node-lost"}),
        "agent": (run.lose_agent, {"node-lost"}),
        "netsplit": (run.split, {"node-lost"}),
    }
    return faults


def _blame(incident: dict[str, Any]) -> tuple[str, str, bool]:
    """Returns the node, the class, and whether any node is named."""
    blamed, failure = incident["blamed"], incident["failure"]
    verdict = blamed["verdict"] if blamed else failure["verdict"] if failure else None
    node = (blamed or incident)["node"]
    return node, verdict["class"] if verdict else "node-lost", not (verdict and verdict["follows"])


def _place(rng: random.Random, kind: str) -> int:
    """Returns the node for a fault.

    The first machine runs the coordinator: its loss ends the job by design, unless the store is
    shared.
    """
    return rng.randrange(int(kind in ("cut", "node", "agent", "netsplit", *BROKEN)), NODES)


def _verdict(told: list[tuple[str, str, bool]], node: int, classes: set[str]) -> str:
    """Returns how a fault on a node was judged, by what was said of its incidents."""
    named = [(n, k) for n, k, sure in told if sure]
    if any(n != str(node) for n, _ in named):
        return "healthy blamed"
    if any(k in classes for _, k in named):
        return "right"
    return "unknown" if all(k == "unknown" for _, k in named) else "wrong class"


def _bounds(tally: Counter[str], kinds: Counter[str], times: int) -> Iterator[Bound]:
    n = sum(kinds.values())
    yield Bound("faults", n, f"faults of {len(kinds)} kinds, seed {SEED}", ">=", times)
    yield Bound("kinds", len(kinds), "kinds", ">=", 12)
    right, named = (round(100 * tally[k] / n, 1) for k in ("right", "explained right"))
    yield Bound("right", right, "% are blamed on the right machine for the right thing", ">=", 98)
    other = tally["wrong class"]
    yield Bound("wrong-class", other, "called something else (the rest say that they do not know)", "=", 0)
    yield Bound("missed", tally["missed"], "missed", "=", 0)
    yield Bound("healthy-blamed", tally["healthy blamed"], "blamed on a healthy machine", "=", 0)
    yield Bound("explain.answered", tally["explained"], "explained, with all answers", "=", n - tally["missed"])
    yield Bound("explain.named", named, "% of explanations name the machine", ">=", 98)


def measure(soak: bool) -> Iterator[Bound]:
    times = 300 if soak else 60
    rng = random.Random(SEED)
    tally: Counter[str] = Counter()
    wrong: list[str] = []
    kinds: Counter[str] = Counter()
    longest, latest = 0, 0.0
    with tempfile.TemporaryDirectory() as scratch, hosts(NODES) as names:
        command = ["figures/scripts/faulty.py", "--out", scratch, "--pause", "0.04"]
        c = Machines(names, "faults", command, options=["--max-restarts", "100000"], elastic=f"{NODES - 1}:{NODES}")
        run = Run(c, names, Path(scratch))
        faults = _faults(run)
        try:
            c.start_all()
            order = [k for _ in range(times // len(faults) + 1) for k in rng.sample(sorted(faults), len(faults))][
                :times
            ]
            for i, kind in enumerate(order):
                run.whole()
                time.sleep(rng.uniform(0.0, 0.5))
                node = _place(rng, kind)
                began = time.time()
                how, classes = faults[kind]
                at = how(node)
                kinds[kind] += 1
                try:
                    c.wait_for(lambda t=began: any(f["ts"] >= t for f in c.facts("IncidentOpened")), 40, kind)
                except TimeoutError:
                    tally["missed"] += 1
                    wrong.append(f"{i} {kind} on {node}: missed")
                    continue
                first = c.wait_for(
                    lambda t=began: next(
                        (f for f in reversed(c.facts("FirstStep")) if f["ts"] >= t and f["incident"]), None
                    ),
                    120,
                    f"{kind}: recovery",
                )
                # The blame must be reported within 2 s of the recovery.
                time.sleep(max(0.0, first["ts"] + 1.9 - time.time()))
                asked = time.time()
                listed = json.loads(c.ask("incidents", "ls", c.job, "--json").stdout)["incidents"]
                of_fault = [r["incident"] for r in listed if r["incident"]["opened"] / 1e6 >= began - 0.01]
                told = [_blame(x) for x in of_fault]
                judged = _verdict(told, node, classes)
                tally[judged] += 1
                if judged != "right":
                    wrong.append(f"{i} {kind} on {node}: {told}")
                number = next((x["number"] for x, t in zip(of_fault, told, strict=True) if t[2]), of_fault[0]["number"])
                text = c.ask("explain", f"inc-{number}", "--job", c.job).stdout.splitlines()
                latest = max(latest, asked - first["ts"])
                longest = max(longest, len(text))
                tally["explained"] += int(all(any(line.startswith(w) for line in text) for w in ANSWERS))
                where = next((line for line in text if line.startswith("What")), "")
                tally["explained right"] += int(f"node {node}" in where)
                if kind in BROKEN:
                    run.mend(node)
                print(
                    f"{i:3} {kind:20} node {node}  noticed {of_fault[0]['opened'] / 1e6 - at:6.3f} s  {told}",
                    flush=True,
                )
            run.whole()
            alive = all(a.poll() is None for a in c.agents.values())
        finally:
            c.close()
    print("\n".join(wrong))
    print(dict(kinds))
    yield from _bounds(tally, kinds, times)
    yield Bound("goes-on", int(alive), "the job runs on all machines at the end", "=", 1)
    yield Bound("explain.lines", longest, "lines at most", "<=", 12)
    yield Bound("explain.after", round(latest, 2), "s after the recovery at most", "<=", 2)
