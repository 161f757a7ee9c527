"""What runs of the example leave behind, and whether two runs are identical to the last bit."""

from __future__ import annotations

import json
from pathlib import Path


def losses(out: Path, rank: int) -> dict[int, set[str]]:
    """Returns every loss computed for each step, as hexadecimal floats: one value if re-runs agree.

    A kill can cut a line short where a page of the file ends. The next process then continues that
    line.
    """
    found: dict[int, set[str]] = {}
    for line in (out / f"losses-{rank}.jsonl").read_text().splitlines():
        try:
            row = json.loads(line[line.rindex("{") :])
        except ValueError:
            continue  # the last line of a rank that did not come back
        found.setdefault(row["step"], set()).add(row["loss"])
    return found


def differences(reference: Path, other: Path, ranks: int, steps: int) -> list[str]:
    """Returns where two runs differ: empty if losses and final parameters are bit-identical."""
    wrong = []
    for rank in range(ranks):
        a, b = losses(reference, rank), losses(other, rank)
        wrong += [f"rank {rank} step {s}: {a.get(s)} and {b.get(s)}" for s in range(steps) if a.get(s) != b.get(s)]
        finals = [d / f"final-{rank}.txt" for d in (reference, other)]
        texts = [f.read_text() if f.exists() else "missing" for f in finals]
        if texts[0] != texts[1] or texts[0] == "missing":
            wrong.append(f"rank {rank} final parameters: {texts[0][:16]} and {texts[1][:16]}")
    return wrong
