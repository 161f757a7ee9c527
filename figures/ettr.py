"""For exponential failures, the simulator agrees with the closed form of the effective time.

The effective training time ratio is the share of time that trains.
"""

from __future__ import annotations

from collections.abc import Iterator

from figures.bound import Bound
from figures.papers import lines


def measure(soak: bool) -> Iterator[Bound]:
    found = lines("ettr", 200)
    for line in found:
        print(f"{line['what']}: closed form {line['paper']:.4f}, simulated {line['ours']:.4f}")
    worst = max(found, key=lambda line: abs(line["ours"] / line["paper"] - 1))
    yield Bound(
        "worst",
        round(abs(worst["ours"] / worst["paper"] - 1) * 100, 3),
        f"% apart at worst of {len(found)} settings: {worst['what']}",
        "<=",
        0.5,
    )
