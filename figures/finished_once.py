"""A finished training is never repeated, however its processes end.

A training that is not finished does not count as finished.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from figures.bound import Bound
from harness.cluster import cluster

SEED = 20261124
SCRIPT = "figures/scripts/ends.py"


@dataclass(frozen=True)
class Case:
    """A way to end (performed by ``SCRIPT``) and the documented result.

    See docs/guide/failures.md, "Is the training over?".
    """

    end: str
    code: int = 0
    #: Lives that do all steps, or all steps before `--at`. The last of them finishes or fails.
    lives: int = 1
    options: tuple[str, ...] = ()
    #: The number of lives in which the script is to fail.
    failing: int = 1
    #: Longest time between the ends of two ranks, in seconds.
    delay: float = 0.3


SPARE = ("--max-restarts", "3")
BLOWS = ("abort", "segfault", "os-exit")
CASES = [
    # Finished: all ranks end well, or crash when nothing is left to do.
    Case("clean"),
    Case("slow", delay=2.0),
    *(Case(f"shutdown:{blow}", delay=2.0) for blow in BLOWS),
    *(Case(f"shutdown-late:{blow}") for blow in BLOWS),
    *(Case(f"late:{blow}", delay=1.0) for blow in (*BLOWS, "kill", "exception")),
    *(Case(f"first:{blow}") for blow in (*BLOWS, "exception")),
    Case("shutdown:abort", options=SPARE),
    Case("late:kill", options=SPARE),
    Case("late:exception", options=SPARE),
    Case("first:abort", options=SPARE),
    # Failed: neither finished nor restarted.
    Case("left:abort", code=1),
    Case("left:exception", code=1),
    Case("left:kill", code=1),
    Case("middle:exception", code=1),
    Case("everywhere", code=1),
    Case("refused", code=1),
    # Not finished, so restarting does no harm.
    Case("middle:kill", lives=2),
    Case("middle:segfault", lives=2),
    Case("middle:exception", lives=2, options=("--max-restarts", "1")),
    Case("middle:exception", code=1, lives=3, options=("--max-restarts", "2"), failing=9),
]


@dataclass
class Run:
    """One run: its case and its result."""

    case: Case
    codes: list[int] = field(default_factory=list)
    #: By rank: (life, step) in the order of completion.
    steps: list[list[tuple[int, int]]] = field(default_factory=list)
    #: Steps of the training.
    total: int = 0
    #: The step that counts as the middle.
    at: int = 0
    victim: int = 0
    what: str = ""

    def repeated(self) -> int:
        """Returns the steps trained after a life in which all ranks had completed all steps."""
        lives = [{life for life, step in of if step == self.total} for of in self.steps]
        complete = set.intersection(*lives)
        return sum(life > min(complete) for of in self.steps for life, _ in of) if complete else 0

    def unexpected(self) -> str:
        """Returns what differs from the documentation, or an empty string."""
        wrong = []
        if set(self.codes) != {self.case.code}:
            wrong.append(f"exit codes {self.codes}, not {self.case.code}")
        for rank, (of, (least, most)) in enumerate(zip(self.steps, self._documented(), strict=True)):
            if not least <= len(of) <= most:
                wrong.append(f"{len(of)} steps on rank {rank}, not {least} to {most}")
        return f"{self.what}: {'; '.join(wrong)}" if wrong else ""

    def _documented(self) -> list[tuple[int, int]]:
        """Returns the least and most steps of each rank in all lives together."""
        where = self.case.end.partition(":")[0]
        before, whole = self.at - 1, self.total * (self.case.code == 0)
        if where == "middle":
            failed = self.case.lives - (self.case.code == 0)
            victim = failed * before + whole
            # The others can complete the step in which one has failed, but not the next.
            return [(victim, victim + failed * (rank != self.victim)) for rank in range(len(self.steps))]
        if where == "left":
            return [(before, before) if rank == self.victim else (self.at, self.at) for rank in range(len(self.steps))]
        return [(self.total, self.total)] * len(self.steps)


def _read(out: Path, ranks: int) -> list[list[tuple[int, int]]]:
    found = []
    for rank in range(ranks):
        path = out / f"step-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        found.append([(int(life), int(step)) for life, step in map(str.split, lines)])
    return found


def _once(case: Case, shape: str, rng: random.Random) -> Run:
    nodes, ranks = rng.choice([(1, 2), (1, 3), (2, 2)])
    run = Run(case, total=rng.randrange(8, 16), at=rng.randrange(3, 7), victim=rng.randrange(ranks))
    delay = rng.uniform(0.0, case.delay)
    run.what = (
        f"{shape} {case.end} {' '.join(case.options)} ({ranks} ranks, {nodes} nodes, rank {run.victim}, {delay:.2f} s)"
    )
    with tempfile.TemporaryDirectory() as out:
        command = [
            SCRIPT,
            "--shape",
            shape,
            "--end",
            case.end,
            "--out",
            out,
            "--steps",
            str(run.total),
            "--victim",
            str(run.victim),
        ]
        command += ["--at", str(run.at), "--lives", str(case.failing), "--delay", f"{delay:.3f}"]
        with cluster("ends", command, nodes=nodes, workers=ranks // nodes, options=list(case.options)) as c:
            run.codes = c.start_all().wait(240)
            run.steps = _read(Path(out), ranks)
            if run.unexpected():
                print(f"  {run.unexpected()}\n{c.output()[-4000:]}", flush=True)
    return run


def measure(soak: bool) -> Iterator[Bound]:
    seed, wanted = int(os.environ.get("SEED", SEED)), 200 if soak else len(CASES)
    print(f"seed {seed}")
    rng = random.Random(seed)
    runs: list[Run] = []
    wrong: list[str] = []
    for i in range(wanted):
        again, which = divmod(i, len(CASES))
        # Each way in one shape, then in the other.
        runs.append(_once(CASES[which], ("loop", "trainer")[(which + again) % 2], rng))
        if text := runs[-1].unexpected():
            wrong.append(text)
        if (i + 1) % 20 == 0:
            print(f"  {i + 1} of {wanted} runs, {len(wrong)} unexpected", flush=True)
    finished = [run for run in runs if run.case.code == 0]
    yield Bound(
        "runs", len(runs), f"runs that end in {len(CASES)} ways, {len(finished)} of them finished", ">=", wanted
    )
    yield Bound(
        "trained-twice", sum(run.repeated() for run in runs), "steps trained after the training was complete", "=", 0
    )
    yield Bound(
        "not-as-documented",
        len(wrong),
        "runs with another exit code or other steps than documented",
        "=",
        0,
        samples=tuple(wrong),
    )
    # Restarts set by the user happen while no rank has ended, even after the last step.
    control = _once(Case("everywhere", code=1, options=("--max-restarts", "1")), "loop", rng)
    yield Bound(
        "asked-for.trained-twice",
        control.repeated(),
        "steps, all ranks fail after the last step, with --max-restarts 1",
        "=",
        0,
        control=True,
    )
