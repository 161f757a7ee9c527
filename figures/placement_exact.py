"""The probability that memory survives equals what counting all ways to fail gives.

The time to compute it for a large cluster is bounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from math import comb

from figures import example_runs
from figures.bound import Bound


def _program(*arguments: int) -> list[float]:
    (found,) = example_runs.lines("everstep-core", "survival", *arguments)
    return found


def _holders(n: int, k: int) -> list[set[int]]:
    """Returns the holders according to Algorithm 1, implemented independently.

    Groups of k; the remaining nodes join the last group, which then is a ring.
    """
    groups = [list(range(g * k, (g + 1) * k)) for g in range(n // k)]
    groups[-1] += list(range(n // k * k, n))
    found: list[set[int]] = [set()] * n
    for group in groups:
        for i, node in enumerate(group):
            found[node] = {group[i - back] for back in range(k)}
    return found


def _counted(n: int, k: int, f: int) -> float:
    holders = _holders(n, k)
    good = sum(all(not h <= set(lost) for h in holders) for lost in itertools.combinations(range(n), f))
    return good / comb(n, f)


def _closed(n: int, k: int, f: int) -> float:
    """Returns the probability for group placement by inclusion and exclusion, in integers (k
    divides n)."""
    lost = sum((-1) ** (i + 1) * comb(n // k, i) * comb(n - i * k, f - i * k) for i in range(1, f // k + 1))
    return float(1 - Fraction(lost, comb(n, f)))


def measure(soak: bool) -> Iterator[Bound]:
    worst = 0.0
    cases = [(n, k, f) for n in range(2, 13) for k in range(1, min(n, 4) + 1) for f in range(1, n)]
    answers = _program(*(x for case in cases for x in case))
    for (n, k, f), p in zip(cases, answers[1:], strict=True):
        worst = max(worst, abs(p - _counted(n, k, f)))
    yield Bound("brute-force", worst, f"largest difference in {len(cases)} cases up to 12 nodes", "<=", 1e-12)
    large = [(10_000, k, f) for k in (2, 4, 5) for f in (1, 2, 8, 16, 32, 64)]
    answers = _program(*(x for case in large for x in case))
    worst = max(abs(p - _closed(*case)) for case, p in zip(large, answers[1:], strict=True))
    yield Bound("ten-thousand-nodes", worst, "largest difference from whole numbers, f up to 64", "<=", 1e-12)
    yield Bound("time", round(_program(10_000, 2, 64)[0] * 1e3, 3), "ms for 10,000 nodes, f = 64", "<=", 10)
