"""Spares sized by the first half of a real trace suffice for the second half.

The second half is resampled by blocks of days. For comparison, spares as if failures were
independent.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures.bound import Bound
from harness.cluster import ROOT

TRACE = ROOT.parent / "shared" / "data" / "infinitehbd" / "trace.json"
NODES, GOAL, REPLAYS = 400, 0.99, 200


def _half(lines: list[dict[str, Any]], first: bool, into: Path) -> Path:
    """Writes one half of a trace. What is down at its beginning is down from there on."""
    cluster = next(line for line in lines if line["kind"] == "cluster")
    middle = cluster["length_s"] / 2
    begin, end = (0.0, middle) if first else (middle, cluster["length_s"])
    kept = [{**cluster, "length_s": end - begin}]
    for line in lines:
        if line["kind"] != "sev1":
            continue
        since, until = max(line["t_s"], begin), min(line["t_s"] + line["repair_s"], end)
        if until > since:
            kept.append({**line, "t_s": since - begin, "repair_s": until - since})
    path = into / ("first.jsonl" if first else "second.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return path


def _down_beyond(trace: str, spares: list[int], seed: int) -> list[float]:
    """Returns the share of time in which more nodes are down than each number of spares."""
    said = subprocess.run(
        ["everstep", "trace", "write", trace, "--seed", str(seed)], capture_output=True, text=True, check=True
    ).stdout
    lines = [json.loads(line) for line in said.splitlines()]
    length = lines[0]["length_s"]
    changes = sorted(
        (at, step)
        for line in lines[1:]
        if line["kind"] == "sev1"
        for at, step in ((line["t_s"], 1), (min(line["t_s"] + line["repair_s"], length), -1))
    )
    beyond, down, since = [0.0] * len(spares), 0, 0.0
    for at, step in [*changes, (length, 0)]:
        beyond = [b + (at - since) * (down > n) for b, n in zip(beyond, spares, strict=True)]
        down, since = down + step, at
    return [b / length for b in beyond]


def measure(soak: bool) -> Iterator[Bound]:
    if not TRACE.exists():
        print("skipped: no real traces on this machine")
        return
    said = subprocess.run(
        ["everstep", "trace", "write", str(TRACE), "--nodes", str(NODES)], capture_output=True, text=True, check=True
    ).stdout
    lines = [json.loads(line) for line in said.splitlines()]
    with tempfile.TemporaryDirectory() as into:
        halves = [_half(lines, True, Path(into)), _half(lines, False, Path(into))]
        # Also the other way round, which is not bounded: the first half is the worse one.
        for backwards, (sized_on, replayed) in enumerate(((halves[0], halves[1]), (halves[1], halves[0]))):
            line = [
                "everstep",
                "size",
                "--slo",
                f"available={GOAL}",
                "--trace",
                str(sized_on),
                "--nodes",
                str(NODES),
                "--json",
            ]
            sized = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
            counts = [sized["spares"], sized["spares_if_independent"]]
            replays = [
                _down_beyond(f"gen:bootstrap,file={replayed},block=14d", counts, seed) for seed in range(REPLAYS)
            ]
            met = [sum(replay[at] <= 1 - GOAL for replay in replays) / REPLAYS * 100 for at in (0, 1)]
            half = "first" if backwards else "second"
            print(
                f"replays of the {half} half: {counts[0]} spares met the goal in {met[0]:.1f} %, "
                f"{counts[1]} (as if failures were independent) in {met[1]:.1f} %"
            )
            if not backwards:
                yield Bound(
                    "met",
                    round(met[0], 1),
                    f"% of {REPLAYS} replays of the second half: no more than {counts[0]} nodes down in 99 % of the time "
                    f"(independent: {counts[1]} spares, {met[1]:.1f} %)",
                    ">=",
                    90,
                )
