"""Under kills and in changing worlds, every sample is used exactly once.

The samples of every epoch are augmented as in an undisturbed run, under a hundred kills and in
worlds of one to four ranks. In a world of constant size, kills change no bit of any loss. For
comparison, the same kills with loaders that start over with their process (CheckFreq, Figure 6): a
stream of files in order with a shuffle buffer, and an epoch whose order is drawn once.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep import convert
from everstep.data import ElasticDistributedSampler, Reproducible, SampleId, epoch_hash
from figures.bound import Bound
from figures.scripts import ledger
from figures.scripts.ledger import GLOBAL_BATCH, SAMPLES
from harness.cluster import Cluster, cluster

SCRIPT = "figures/scripts/ledger.py"
#: Cycles of 4 → 3 → 2 → 1 → 4 nodes. A cycle has three lost nodes and seven killed workers.
CYCLES, WORKER_KILLS = 10, {4: 2, 3: 2, 2: 2, 1: 1}
#: Kills in each world of constant size, and epochs of each run with the naive loaders.
KILLS, EPOCHS = 8, 12
SEED = 5


def _lines(out: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields (generation, rank, logged row)."""
    for path in out.glob("used-*"):
        _, generation, rank = path.name.split("-")
        for line in path.read_text().splitlines():
            try:
                yield int(generation), int(rank), json.loads(line)
            except ValueError:
                continue  # a line that a kill cut short


def _ledger(out: Path) -> dict[int, tuple[int, list[tuple[int, int]]]]:
    """Returns by step the number of ranks of the latest generation that ran it, and what they used.

    What they used is a list of (sample, checksum of the augmented sample).
    """
    runs: dict[int, dict[int, tuple[int, list[tuple[int, int]]]]] = {}
    for generation, _, row in _lines(out):
        if "used" in row:
            runs.setdefault(row["step"], {}).setdefault(generation, (row["ranks"], []))[1].extend(
                map(tuple, row["used"])
            )
    return {step: by[max(by)] for step, by in runs.items()}


def _losses(out: Path) -> dict[tuple[int, int], set[tuple[str, ...]]]:
    """Returns by (step, rank) every list of losses that was ever computed."""
    found: dict[tuple[int, int], set[tuple[str, ...]]] = {}
    for _, rank, row in _lines(out):
        if "losses" in row:
            found.setdefault((row["step"], rank), set()).add(tuple(row["losses"]))
    return found


def _expected(epochs: int) -> dict[tuple[int, int], int]:
    """Returns the checksum of each augmented sample by (epoch, sample), without any training."""
    pictures = ledger.Pictures(0, augment=True)
    sampler = ElasticDistributedSampler(pictures, seed=ledger.SEED, num_replicas=1, rank=0)
    made = Reproducible(pictures, sampler)
    return {
        (e, n): zlib.crc32(made[SampleId.of(n, e, ledger.SEED)][1].numpy().tobytes())
        for e in range(epochs)
        for n in range(ledger.SAMPLES)
    }


def _settled(c: Cluster, size: int) -> None:
    c.wait_for(lambda: c.runs(size), 120, f"{size} ranks that step")


def _cycle(c: Cluster, rng: random.Random, again: bool) -> int:
    """Shrinks the world from four nodes to one and, if ``again``, grows it back.

    Returns the kills.
    """
    kills, alive = 0, [0, 1, 2, 3]
    while True:
        for _ in range(WORKER_KILLS[len(alive)]):
            _settled(c, len(alive))
            time.sleep(rng.uniform(0.05, 0.4))
            c.kill_worker(rng.randrange(len(alive)))
            kills += 1
        _settled(c, len(alive))
        if len(alive) == 1:
            # The worker that was killed may still be reported.
            time.sleep(2)
            _settled(c, 1)
            break
        time.sleep(rng.uniform(0.05, 0.4))
        # Node 0 runs the coordinator; its loss is tested elsewhere.
        c.kill_node(alive.pop(rng.randrange(1, len(alive))))
        kills += 1
    for node in (1, 2, 3) if again else ():
        c.start(node)
    return kills


def _elastic(cycles: int) -> Iterator[Bound]:
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        command = [SCRIPT, "--out", scratch, "--steps", "1000000", "--pause", "0.02", "--workers", "1"]
        with cluster("ledger", command, nodes=4, workers=1, elastic="1:4", options=["--max-restarts", "10000"]) as c:
            c.start_all()
            kills = 0
            for n in range(cycles):
                kills += _cycle(c, rng, n + 1 < cycles)
                print(
                    f"cycle {n + 1}: {kills} kills, step {max(w['step'] or 0 for w in c.workers_now().values())}",
                    file=sys.stderr,
                )
            c.agents[0].terminate()
            code = c.agents[0].wait(60)
            restored = [f["steps_lost"] for f in c.facts("Restored")]
        used = _ledger(out)
        state = _final_state(out)
        # Steps in the last checkpoint. The step after it, which was cut short at the end, does not
        # count.
        steps, rest = divmod(state["epoch"] * SAMPLES + state["consumed"], GLOBAL_BATCH)
        if rest or max(used) > steps:
            raise RuntimeError(
                f"the last checkpoint has {steps} steps and {rest} samples; steps up to {max(used)} were run"
            )
        sizes = Counter(ranks for ranks, _ in used.values())
        epochs = steps * GLOBAL_BATCH // SAMPLES
        # Steps are contiguous, and samples flow from one epoch into the next.
        wrong = sum(len(used.get(s, (0, []))[1]) != GLOBAL_BATCH for s in range(steps))
        expected, other, seen = _expected(epochs + 1), 0, Counter[tuple[int, int]]()
        for step in range(steps):
            # A step may use samples of two epochs. The augmentation shows which epoch a sample is
            # of.
            first = step * GLOBAL_BATCH // SAMPLES
            for sample, crc in used.get(step, (0, []))[1]:
                epoch = next((e for e in (first, first + 1) if expected.get((e, sample)) == crc), None)
                other += epoch is None
                if epoch is not None:
                    seen[epoch, sample] += 1
        twice = sum(count != 1 for count in seen.values())
        missing = sum((e, n) not in seen for e in range(epochs) for n in range(SAMPLES))
    closed = {int(e): h for e, h in state["finished"]}
    open_epochs = sum(h != epoch_hash(SAMPLES, seed=ledger.SEED, epoch=e) for e, h in closed.items())
    yield Bound(
        "kills",
        kills,
        f"kills in worlds of 1 to 4 ranks: {dict(sorted(sizes.items()))} steps by ranks, {steps} steps, {epochs} epochs",
        ">=",
        10 * cycles,
    )
    yield Bound(
        "samples-wrong",
        wrong + twice + missing,
        f"of {epochs * SAMPLES} samples not used exactly once, by what the ranks wrote down",
        "=",
        0,
    )
    yield Bound(
        "augmented-otherwise", other, "samples that augmentation made something else of than undisturbed", "=", 0
    )
    yield Bound(
        "epochs-open", open_epochs, f"of the last {len(closed)} finished epochs whose hash does not close", "=", 0
    )
    yield Bound("steps-lost", sum(restored), f"over {len(restored)} restarts", "=", 0)
    yield Bound("exit", code, "of the last node, asked to stop", "=", 143)


def _final_state(out: Path) -> dict[str, Any]:
    """Returns the sampler's state in the newest durable checkpoint."""
    state: dict[str, Any] = convert.load(out / "ckpt")["data"]
    return state


def _run(out: Path, ranks: int, steps: int, data: str, kills: int, rng: random.Random) -> float:
    """Trains in a world of constant size and kills a worker ``kills`` times.

    Returns the accuracy.
    """
    command = [SCRIPT, "--out", str(out), "--steps", str(steps), "--data", data]
    with cluster("ledger", command, workers=ranks, options=["--max-restarts", "1000"]) as c:
        c.start()
        for n in range(kills):
            # Once in each part of the run.
            c.wait_step(int((n + rng.uniform(0.3, 0.9)) * steps / kills))
            c.kill_worker(rng.randrange(ranks))
        codes = c.wait()
        if codes != [0]:
            raise RuntimeError(f"the run ended with {codes}:\n{c.output()[-2000:]}")
    return float(json.loads((out / "result.json").read_text())["accuracy"])


@dataclass(frozen=True)
class Pair:
    """The same run, undisturbed and with kills."""

    #: The number of (step, rank) whose losses differ.
    differ: int
    #: Accuracy of both, in percent.
    whole: float
    killed: float
    #: With kills: the number of uses of the most and of the least used sample.
    most: int
    least: int


def _pair(ranks: int, steps: int, data: str, kills: int) -> Pair:
    rng = random.Random(f"{SEED} {data} {ranks}")
    with tempfile.TemporaryDirectory() as scratch:
        outs = [Path(scratch) / "whole", Path(scratch) / "killed"]
        for out in outs:
            out.mkdir()
        whole, killed = (_run(out, ranks, steps, data, k, rng) for out, k in zip(outs, (0, kills), strict=True))
        right, found = (_losses(out) for out in outs)
        uses = Counter(sample for _, used in _ledger(outs[1]).values() for sample, _ in used)
    differ = sum(right.get(key) != found.get(key) for key in right | found)
    counts = [uses[n] for n in range(SAMPLES)]
    return Pair(differ, 100 * whole, 100 * killed, max(counts), min(counts))


def measure(soak: bool) -> Iterator[Bound]:
    yield from _elastic(60 if soak else CYCLES)
    differ = {ranks: _pair(ranks, 4 * SAMPLES // GLOBAL_BATCH, "everstep", KILLS).differ for ranks in (1, 2, 3, 4)}
    yield Bound(
        "losses",
        sum(differ.values()),
        f"losses of a step and rank that {KILLS} kills change in a bit, in worlds of {list(differ)} ranks",
        "=",
        0,
    )
    steps = EPOCHS * SAMPLES // GLOBAL_BATCH
    for data in ("everstep", "stream", "epoch"):
        pair = _pair(2, steps, data, 2 * EPOCHS)
        beside = (
            f"{pair.killed:.1f} % after {2 * EPOCHS} kills in {EPOCHS} epochs, {pair.whole:.1f} % undisturbed; "
            f"samples were used {pair.least} to {pair.most} times"
        )
        lost = round(pair.whole - pair.killed, 2)
        if data == "everstep":
            yield Bound("accuracy", lost, f"points lost: {beside}", "=", 0)
        elif data == "stream":
            yield Bound("naive-stream", lost, f"points lost by a stream that begins anew: {beside}", ">=", 2)
        else:
            yield Bound(
                "naive-epoch",
                pair.most - pair.least,
                f"uses between samples where an epoch begins anew: {beside}",
                ">=",
                2,
            )
