"""Parity survives any loss of two of six machines, in about half the memory of copies.

Encoding and rebuilding are timed, too. Machines are also lost while parity is being computed.
Losses use real processes; speed uses the program that moves bytes
(``crates/checkpoint/examples/erasure.rs``).
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import transfer
from figures.bound import Bound
from figures.slots import SEALED, WRITING, superblock
from harness.cluster import ROOT, Cluster, cluster

NODES = 6
PROGRAM = ROOT / "target" / "release" / "examples" / "erasure"
#: State of one node when speed is measured.
STATE = 128 << 20
#: Restarting six processes on two cores takes a while, and the job must not end before the last
#: loss.
STEPS = 100_000


def _program(*args: str) -> list[dict[str, float]]:
    out = subprocess.run([str(PROGRAM), *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in out.splitlines()]


def _speed(rounds: int) -> Iterator[Bound]:
    subprocess.run(
        ["cargo", "build", "-q", "--release", "-p", "everstep-checkpoint", "--example", "erasure"], cwd=ROOT, check=True
    )
    hot = _program("code", str(rounds))
    rates = [r["encode"] for r in hot]
    share = statistics.median(r["encode"] / r["copy"] for r in hot)
    unit = f"GB/s from cache-hot pieces on 2 cores ({min(rates):.1f}-{max(rates):.1f}; {share:.2f} of a copy within the cache)"
    yield Bound("encode-hot", round(statistics.median(rates), 2), unit, ">=", 5, samples=tuple(rates))
    coded: list[dict[str, float]] = []
    copied: list[dict[str, float]] = []
    for _ in range(rounds):
        for kind, into in (("nodes", coded), ("copies", copied)):
            with transfer.memory() as memory:
                into += _program(kind, str(memory), str(NODES), "2", str(STATE), "2")
    ours, copies = [r["encode"] for r in coded], [r["copies"] for r in copied]
    unit = (
        "GB/s of state, six nodes' slots to sealed parity over loopback, all on 2 cores "
        f"({min(ours):.2f}-{max(ours):.2f}; two full copies: {statistics.median(copies):.2f})"
    )
    yield Bound("end-to-end", round(statistics.median(ours), 2), unit, ">=", 1.5, samples=tuple(ours + copies))
    back = statistics.median(r["rebuild"] for r in coded)
    yield Bound(
        "rebuild",
        round(back, 3),
        "GB/s of a lost shard, computed from four others",
        ">=",
        0.1,
        samples=tuple(r["rebuild"] for r in coded),
    )


def _held(c: Cluster) -> tuple[int, int, int]:
    """Returns sizes for the newest step that all nodes hold, in bytes.

    The state, what is held (own shards and parity, with indexes), and all shared memory.
    """
    step = c.status().get("replicated_step") or 0
    slots = [superblock(p) for p in c.memory.glob("*/*-slot-*")]
    own = [superblock(p) for p in c.memory.glob("*/local-*-slot-*")]
    state = sum(s.region_bytes for s in own if s.state == SEALED and s.step == step)
    held = sum(s.region_bytes + s.index_bytes for s in slots if s.state == SEALED and s.step == step)
    complete = (
        sum(s.state == SEALED and s.step == step for s in own) == NODES and c.status().get("replicated_step") == step
    )
    everything = sum(p.stat().st_blocks * 512 for p in c.memory.glob("*/*-slot-*"))
    return (state, held, everything) if complete else (0, 0, 0)


def _memory(replicas: str) -> tuple[float, float]:
    """Returns the bytes held, and the shared memory, per byte of state."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            "figures/sharded.py",
            "--out",
            scratch,
            "--steps",
            str(STEPS),
            "--width",
            "2048",
            "--layers",
            "4",
            "--replicas",
            replicas,
        ]
        with cluster(f"erasure-memory-{replicas.replace('+', '-')}", command, nodes=NODES, workers=1) as c:
            c.start_all()
            c.wait_for(lambda: (c.status().get("replicated_step") or 0) >= 4, 180, "a few steps")
            # Everything may have advanced between two reads.
            state, held, everything = c.wait_for(
                lambda: next((f for f in [_held(c)] if f[0]), None), 60, "a step that lies still"
            )
            return held / state, everything / state


def _computing(c: Cluster) -> bool:
    return any(superblock(p).state == WRITING for p in c.memory.glob("*/parity-*"))


def _lose(c: Cluster, lost: tuple[int, int], busy: bool) -> tuple[dict[str, Any], bool]:
    """Loses two machines with all their memory; they come back empty.

    Returns what was restored, and whether parity was being computed.
    """
    before = len(c.facts("Restored"))
    deadline = time.monotonic() + 20
    while busy and not _computing(c) and time.monotonic() < deadline:
        pass
    caught = _computing(c)
    for node in lost:
        c.kill_node(node)
    for node in lost:
        c.start(node)
    found = c.wait_for(lambda: next((f for f in c.facts("Restored")[before:] if f["step"]), None), 120, "a restore")
    c.wait_for(lambda: [f for f in c.facts("FirstStep") if f["ts"] > found["ts"]], 120, "a step")
    c.wait_for(lambda: (c.status().get("replicated_step") or 0) > found["step"], 60, "a step that all hold again")
    return found, caught


def _rows(out: Path, rank: int) -> list[dict[str, Any]]:
    found = []
    for line in (out / f"rank-{rank}.jsonl").read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # a line that a kill cut short
    return found


def _losses(times: int) -> Iterator[Bound]:
    pairs = [p for _ in range(times) for p in itertools.combinations(range(NODES), 2)]
    random.Random(5).shuffle(pairs)
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            "figures/sharded.py",
            "--out",
            scratch,
            "--steps",
            str(STEPS),
            "--pause",
            "0.05",
            "--width",
            "1024",
            "--layers",
            "4",
            "--replicas",
            "4+2",
        ]
        with cluster("erasure", command, nodes=NODES, workers=1, options=["--max-restarts", "1000"]) as c:
            c.start_all()
            c.wait_for(lambda: (c.status().get("replicated_step") or 0) >= 4, 180, "a few steps")
            told, during = [], 0
            for i, lost in enumerate(pairs):
                found, caught = _lose(c, lost, busy=i % 2 == 0)
                told.append((lost, found))
                during += caught
                while_computing = ", while parity was being computed" if caught else ""
                print(
                    f"  without {lost}: step {found['step']}, {found['steps_lost']} steps lost{while_computing}",
                    flush=True,
                )
        wrong = restores = 0
        for rank in range(NODES):
            rows = _rows(Path(scratch), rank)
            digests: dict[int, set[str]] = {}
            for row in rows:
                if "step" in row:
                    digests.setdefault(row["step"], set()).add(row["digest"])
                else:
                    restores += 1
                    wrong += row["digest"] not in digests.get(row["restored"], set())
            wrong += sum(len(d) > 1 for d in digests.values())
    back = sum(all(found["tiers"][n] == "Parity" for n in lost) for lost, found in told)
    yield Bound(
        "pairs",
        back,
        f"of {len(pairs)} losses of two of six machines came back from the memory of the other four",
        "=",
        len(pairs),
    )
    yield Bound("during-encode", during, "of them while parity was being computed", ">=", len(pairs) // 3)
    yield Bound("other-bits", wrong, f"of {restores} ranks' restores, or steps computed again, with other bits", "=", 0)
    worst = max(found["steps_lost"] for _, found in told)
    yield Bound("steps-lost", worst, "at most, of those that every rank had completed", "<=", 3)


def measure(soak: bool) -> Iterator[Bound]:
    yield from _speed(9 if soak else 5)
    held, everything = _memory("4+2")
    copies, everything_copied = _memory("2")
    unit = (
        f"bytes held per byte of state, own copy included (two full copies: {copies:.2f}; "
        f"all slots in shared memory, those being written too: {everything:.1f} against {everything_copied:.1f})"
    )
    yield Bound("held", round(held, 3), unit, "<=", 1.6)
    yield from _losses(4 if soak else 1)
