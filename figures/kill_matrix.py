"""Whoever is killed, and whenever: all ranks continue from the same step, bit for bit.

Three nodes in network namespaces train with sharded state in real processes. After each kill, all
ranks must continue from the newest reachable step, bit for bit.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from figures.bound import Bound
from figures.hosts import hosts
from figures.slots import SEALED, WRITING, superblock
from harness.cluster import EVERSTEP, ROOT, Cluster

VICTIMS = ("worker", "agent", "node", "node-0", "group", "coordinator")
MOMENTS = ("idle", "capture", "replicate", "persist", "restore")
STEPS = 80


class Hosts(Cluster):
    """A cluster whose nodes are separate hosts."""

    def __init__(self, names: list[str], job: str, command: list[str]) -> None:
        super().__init__(job, command, nodes=len(names), workers=1)
        self.names = names
        self.token = self.home / "token"
        self.token.write_text(os.urandom(16).hex())
        self.token.chmod(0o600)
        self.env["GLOO_SOCKET_IFNAME"] = "eth0"

    @property
    def store(self) -> Path:
        return self.home / "state" / "coordinators" / f"10.77.8.1_{self.port}"

    def start(self, node: int = 0) -> None:
        line = [
            "ip",
            "netns",
            "exec",
            self.names[node],
            str(EVERSTEP),
            "run",
            "--name",
            self.job,
            "--nnodes",
            str(self.nodes),
        ]
        line += ["--rdzv-endpoint", f"10.77.8.1:{self.port}", "--node-rank", str(node), "--nproc-per-node", "1"]
        line += ["--insecure", "--token-file", str(self.token), *self.command]
        log = (self.home / f"node-{node}.log").open("ab")
        self.agents[node] = subprocess.Popen(line, env=self.env, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)

    def status(self) -> dict[str, Any]:
        line = ["ip", "netns", "exec", self.names[0], str(EVERSTEP), "status", "--json", self.job]
        out = subprocess.run(line, env=self.env, capture_output=True, check=False).stdout
        jobs = json.loads(out)["jobs"] if out else []
        return jobs[0] if jobs else {}


def _reachable(c: Hosts, out: Path) -> int:
    """Returns the newest step of which every rank's shard is complete somewhere.

    That is, in a slot of a remaining node or on disk.
    """
    held: dict[int, set[int]] = {rank: set() for rank in range(3)}
    for slot in [*c.memory.glob("*/local-*-slot-*"), *c.memory.glob("*/peer-*-slot-*")]:
        of = superblock(slot)
        if of.state == SEALED:
            held[of.rank].add(of.step)
    durable = {
        int(p.parent.name.removeprefix("step-"))
        for p in (out / "ckpt").glob("step-*/manifest.json")
        if ".tmp-" not in p.parent.name
    }
    return max(set.intersection(*held.values()) | durable, default=0)


def _moment(c: Hosts, out: Path, when: str) -> Callable[[], bool]:
    """Returns a function that is true during the given moment."""
    if when == "idle":
        return lambda: True
    if when == "persist":
        return lambda: any(p.name.count(".tmp-") for p in (out / "ckpt").glob("step-*"))
    pattern = "local-0-slot-*" if when == "capture" else "peer-*-slot-*"
    slots = [p for node in range(c.nodes) for p in (c.memory / str(node)).glob(pattern)]
    return lambda: any(superblock(p).state == WRITING for p in slots)


def _kill(c: Hosts, victim: str) -> list[int]:
    """Kills the victim. Returns the nodes whose agents have to be started again."""
    if victim == "worker":
        c.kill_worker(1)
        return []
    if victim == "coordinator":
        c.kill_coordinator()
        return []
    if victim == "agent":
        c.agents[1].kill()
        c.agents[1].wait()
        return [1]
    if victim == "group":
        c.kill_node(1)
        c.kill_node(2)
        return [1, 2]
    node = 0 if victim == "node-0" else 1
    if node == 0:
        # The whole machine, including the coordinator and its store.
        with contextlib.suppress(OSError, ValueError, KeyError):
            os.kill(c.coordinator_pid(), signal.SIGKILL)
    c.kill_node(node)
    if node == 0:
        shutil.rmtree(c.store, ignore_errors=True)
        for agent in (1, 2):
            c.agents[agent].wait(90)
        return [0, 1, 2]
    return [node]


def _lines(out: Path, rank: int) -> list[dict[str, Any]]:
    found = []
    for line in (out / f"rank-{rank}.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def _reached(out: Path) -> int:
    """Returns the number of steps that every rank had completed."""
    return min(max((r.get("step", 0) for r in _lines(out, rank)), default=0) for rank in range(3))


def once(names: list[str], victim: str, when: str, seed: int) -> dict[str, Any]:
    """Makes one kill and returns the result."""
    rng = random.Random(f"{victim}/{when}/{seed}")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        command = [
            "figures/sharded.py",
            "--out",
            scratch,
            "--steps",
            str(STEPS),
            "--pause",
            "0.02",
            "--width",
            "768",
            "--layers",
            "3",
            "--persist",
            "10",
        ]
        c = Hosts(names, f"km-{victim}-{when}-{seed}", command)
        try:
            c.start_all()
            c.wait_for(lambda: c.facts("Replicated") and _reached(out) >= 25 + rng.randrange(10), 90, "the first steps")
            if when == "restore":
                before = len(c.facts("Restored"))
                c.kill_worker(2)
                c.wait_for(lambda: len(c.facts("Restored")) > before, 60, "the first restore")
            else:
                going_on = _moment(c, out, when)
                time.sleep(rng.uniform(0, 0.1))
                deadline = time.monotonic() + 20
                while not going_on() and time.monotonic() < deadline:
                    pass
            committed = c.status().get("replicated_step") or 0 if when == "idle" else 0
            again = _kill(c, victim)
            reachable, reached = _reachable(c, out), _reached(out)
            seen = [
                max((i for i, r in enumerate(_lines(out, rank)) if "restored" in r), default=-1) for rank in range(3)
            ]
            for node in again:
                c.start(node)
            codes = c.wait(180)
            worst = older = wrong = 0
            # If its store was lost, a coordinator may reuse the number of a generation that had
            # sealed nothing.
            together: dict[tuple[int, bool], set[int]] = {}
            for rank in range(3):
                rows = _lines(out, rank)
                digests: dict[int, set[str]] = {}
                for i, row in enumerate(rows):
                    if "step" in row:
                        digests.setdefault(row["step"], set()).add(row["digest"])
                    else:
                        wrong += row["digest"] not in digests.get(row["restored"], set())
                        life = victim == "node-0" and i > seen[rank]
                        together.setdefault((row["generation"], life), set()).add(row["restored"])
                        if i > seen[rank]:
                            worst = max(worst, reached - row["restored"])
                            older = max(older, reachable - row["restored"])
                # What is computed again is bit-identical.
                wrong += sum(len(d) > 1 for d in digests.values())
                wrong += max(digests) != STEPS
            mixed = sum(len(steps) > 1 for steps in together.values())
            facts = [f["kind"] for f in c.facts() if f["kind"] in ("RestoreFailed",)]
            return {
                "codes": codes,
                "lost": worst,
                "older": older,
                "wrong": wrong,
                "mixed": mixed,
                "failed": len(facts),
                "committed": committed,
            }
        finally:
            c.close()


def _code() -> str:
    """Returns a name for the code that runs, whatever else is committed meanwhile."""
    trees = [
        "git",
        "-C",
        str(ROOT),
        "rev-parse",
        *(f"HEAD:{part}" for part in ("crates", "python", "harness", "figures")),
    ]
    found = subprocess.run(trees, capture_output=True, text=True, check=False).stdout.split()
    edited = subprocess.run(["git", "-C", str(ROOT), "diff", "--quiet", "HEAD"], check=False).returncode
    # Edited code belongs to this run alone: later runs do not continue it.
    return "-".join(tree[:8] for tree in found) + (f"-edited-{time.time_ns()}" if edited else "")


def _runs(cells: list[tuple[str, str, int]]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Returns the result of each cell.

    A soak of several hours may be interrupted, even with Ctrl-C, and continues later on the same
    code.
    """
    file, code = ROOT / "target" / "figures" / "kill-matrix.runs.jsonl", _code()
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = {tuple(r["cell"]): r for r in rows if r["code"] == code}
    with contextlib.suppress(KeyboardInterrupt), hosts(3) as names, file.open("a", buffering=1) as log:
        for cell in (c for c in cells if c not in found):
            found[cell] = {"code": code, "cell": cell, **once(names, *cell)}
            log.write(json.dumps(found[cell]) + "\n")
            print(f"  {cell}: {found[cell]}", flush=True)
    return {cell: found[cell] for cell in cells if cell in found}


def measure(soak: bool) -> Iterator[Bound]:
    seeds = 5 if soak else 1
    cells = [(victim, when, seed) for seed, victim, when in itertools.product(range(seeds), VICTIMS, MOMENTS)]
    runs = _runs(cells)
    told = list(runs.values())
    yield Bound(
        "runs",
        len(told),
        f"of {len(VICTIMS)} victims × {len(MOMENTS)} moments × {seeds} seeds",  # noqa: RUF001
        ">=",
        len(cells),
    )
    yield Bound("unfinished", sum(t["codes"] != [0, 0, 0] for t in told), "jobs that did not end well", "=", 0)
    yield Bound("other-bits", sum(t["wrong"] for t in told), "steps restored or computed again with other bits", "=", 0)
    yield Bound(
        "mixed", sum(t["mixed"] for t in told), "restores in which two ranks went on from different steps", "=", 0
    )
    older = max((t["older"] for t in told), default=0)
    yield Bound(
        "older", older, "steps older than the newest that was whole in memory that was left, or on disk", "<=", 0
    )
    for victim in VICTIMS:
        lost = max((t["lost"] for cell, t in runs.items() if cell[0] == victim), default=0)
        # A group takes all copies with it, so the job goes back to durable storage. Otherwise, at
        # most the steps in progress are lost.
        limit = 12 if victim == "group" else 3
        yield Bound(f"{victim}.steps-lost", lost, "at most, of those that every rank had completed", "<=", limit)
