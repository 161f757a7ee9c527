"""Every parser of foreign input is fuzzed with coverage feedback, and nothing is found.

The control arm is a parser with a planted bug behind six particular bytes. Whether coverage
feedback reaches it has not been measured yet.
"""

from __future__ import annotations

from collections.abc import Iterator

from figures.bound import Bound
from harness.fuzz import PLANTED, Run, build, fuzz, targets

#: Fewest parsers.
TARGETS = 8
#: Time for each target in seconds, with and without `--soak`.
SECONDS = {True: 600, False: 60}
#: Fewest inputs per second of a target. Servers run on streams in memory.
RATE = 50


def _bounds(run: Run, seconds: int) -> Iterator[Bound]:
    name = run.target.replace("_", "-")
    yield Bound(f"{name}-inputs", run.executions, f"inputs in {seconds} s", ">=", RATE * seconds)
    unit = f"edges of the code reached beyond the {run.seeded} of the corpus"
    yield Bound(f"{name}-coverage", run.covered - run.seeded, unit, ">", 0)
    samples = (str(run.finding), run.output) if run.finding else ()
    yield Bound(f"{name}-findings", int(run.finding is not None), "findings", "=", 0, samples=samples)


def measure(soak: bool) -> Iterator[Bound]:
    built, names = build(planted=True), targets()
    yield Bound("targets", len(names), "parsers that are fuzzed", ">=", TARGETS, samples=tuple(names))
    planted = fuzz(built, PLANTED, SECONDS[False])
    unit = f"findings in a parser with a planted bug, after {planted.executions} inputs"
    yield Bound("planted-findings", int(planted.finding is not None), unit, "=", 0, control=True)
    for name in names:
        yield from _bounds(fuzz(built, name, SECONDS[soak]), SECONDS[soak])
