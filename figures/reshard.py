"""A job continues in another layout with the same state, bit for bit.

Random pairs of (saved by, loaded by). Plain, DDP, FSDP1, FSDP2, HSDP, tensor and pipeline
parallelism and combinations, one to four ranks, including the optimizer. DCP's own checkpoint of
the same state is the oracle.

Bytes read are all that a rank reads from files during ``restore()`` (``rchar`` of /proc/PID/io),
including headers and tables. Bytes needed are those of its parts of parameters and optimizer state.
Peak memory is the maximum of the resident set (``VmHWM``) beyond its size afterwards.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from figures.bound import Bound
from harness.cluster import ROOT

SCRIPT = "figures/scripts/reshard_ranks.py"
LAYOUTS = [
    "plain:1", "ddp:2", "ddp:3", "fsdp1:2", "fsdp1:3", "fsdp1:4", "fsdp2:2", "fsdp2:3", "fsdp2:4", "hsdp:2x2", "tp:2", "tp:4",
    "fsdp2+tp:2x2", "pp:2", "pp:3", "pp:4", "pp+ddp:2x2",
]  # fmt: skip
#: Width and hidden width of the model. The largest tensor has their product.
SIZES = [(384, 1536), (412, 1652), (448, 1792)]
PAIRS, SEED = 216, 7


def _pairs(count: int) -> list[tuple[str, str, int, int]]:
    rng = random.Random(SEED)
    return [(rng.choice(LAYOUTS), rng.choice(LAYOUTS), *rng.choice(SIZES)) for _ in range(count)]


def _found(pairs: list[tuple[str, str, int, int]]) -> Iterator[dict[str, Any]]:
    scratch = ROOT / "target" / "reshard"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    try:
        process = subprocess.Popen(
            [sys.executable, SCRIPT, json.dumps(pairs), str(scratch)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
        if process.wait():
            raise RuntimeError(f"the ranks ended with code {process.returncode}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def measure(soak: bool) -> Iterator[Bound]:
    pairs = _pairs(4 * PAIRS if soak else PAIRS)
    wrong = tensors = failed = checked = 0
    ratios, extras, losses = [], [], []
    for row in _found(pairs):
        ranks = row["loaded"]
        if row["errors"] or not ranks:
            failed += 1
            print(f"{row['save']} -> {row['load']}: {row['errors'][0][-2000:]}", file=sys.stderr)
            continue
        if all(r["oracle"] for r in ranks):
            checked += 1
            wrong += sum(r["wrong"] for r in ranks)
            tensors += sum(r["tensors"] for r in ranks)
        ratios.append(sum(r["read"] for r in ranks) / sum(r["needed"] for r in ranks))
        extras.append(max(r["extra"] for r in ranks) / (row["width"] * row["hidden"] * 4))
        right = next(r["loss"] for r in row["saved"] if r["loss"] is not None)
        losses += [abs(r["loss"] - right) / abs(right) for r in ranks if r["loss"] is not None]
    yield Bound("failed", failed, f"of {len(pairs)} pairs", "=", 0)
    yield Bound(
        "pairs", checked, "pairs with DCP as oracle (it cannot load FSDP1 where a rank has no elements)", ">=", 200
    )
    yield Bound("wrong", wrong, f"of {tensors} tensors differ in a bit", "=", 0)
    yield Bound(
        "read",
        round(max(ratios), 3),
        f"bytes read over bytes needed, the worst pair (median {sorted(ratios)[len(ratios) // 2]:.3f})",
        "<=",
        1.05,
    )
    yield Bound("memory", round(max(extras), 3), "of the largest tensor, the worst rank", "<=", 1.0)
    yield Bound("loss", max(losses), "relative difference of the next step's loss, the worst", "<=", 1e-6)
