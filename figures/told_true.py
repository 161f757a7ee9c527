"""What everstep reports about failures is true.

Each statement of `explain` and `goodput` is compared with the scripts' own logs.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from figures.bound import Bound
from harness.cluster import Cluster, cluster
from harness.own_log import Altered, OwnLog

SCRIPT = "figures/scripts/own_log.py"
SAVE = 25
PATIENCE = 300
#: A count may be wrong by this share.
SHARE = 0.01
#: Nothing in these scripts carries a step number.
NUMBERLESS = ("plain", "momentum", "epochs")


@dataclass
class Run:
    """One kind of job, and how many failures it has."""

    name: str
    failures: int
    options: tuple[str, ...] = ()
    optimizer: str = "adam"
    nodes: int = 1

    def deaths(self, rng: random.Random) -> list[int]:
        """Returns the step after which some rank dies, by generation.

        Now and then, this is before the job has caught up with an earlier failure.
        """
        at, found = 0, []
        for _ in range(self.failures):
            # A script that starts over at step 1 passes the earlier steps again.
            begins = 0 if self.name == "zero-line" else at - at % SAVE if "--save" in self.options else at
            at = begins + rng.randint(30, 70) if self.name == "zero-line" else at + rng.randint(5, 40)
            found.append(at)
        return found


@dataclass
class Verdict:
    """The statements about one run, and which of them are false."""

    incidents: int = 0
    statements: int = 0
    unknown: int = 0
    wrong: list[str] = field(default_factory=list)

    def holds(self, what: str, said: float, low: float, high: float) -> None:
        self.statements += 1
        slack = SHARE * high
        if not low - slack <= said <= high + slack:
            self.wrong.append(f"{what}: said {said}, the log says {low} to {high}")

    def claim(self, what: str, true: bool) -> None:
        self.statements += 1
        if not true:
            self.wrong.append(what)


def _lost(verdict: Verdict, told: str, again: tuple[int, int], first: int, where: str) -> None:
    """Checks ``Lost``: where the script continued, and how many steps it repeats."""
    begun = re.search(r"the script (began again|continued) at step (\d+)", told)
    if begun:
        verdict.holds(f"{where} began", int(begun[2]), first, first)
        verdict.claim(f"{where} {begun[1]} at {first}", (begun[1] == "began again") == (first == 1))
    counts = re.search(
        r"(\d+) steps? (?:is|are|was|were) (?:being )?repeated|(\d+) steps? to be repeated|(no) step is repeated", told
    )
    own = re.match(
        r"(no|\d+) steps?(?:;|,)(?: recomputed)?(?:(?:, plus)? (\d+)(?: steps?)? from earlier failures)?", told
    )
    if counts:
        verdict.holds(f"{where} repeated", int(next((n for n in counts.groups() if n and n != "no"), 0)), *again)
    elif own:
        verdict.holds(f"{where} recomputed", int(own[1].replace("no", "0")) + int(own[2] or 0), *again)
    else:
        verdict.claim(f"{where} says nothing of steps: {told}", False)


def _incident(verdict: Verdict, c: Cluster, log: OwnLog, number: int, optimizer: str) -> None:
    """Checks every statement about one incident."""
    lines = c.ask("explain", f"inc-{number}", "--job", c.job).stdout.splitlines()
    told = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in lines[1:] if line[:1].strip()}
    where = f"{c.job} inc-{number}"
    verdict.incidents += 1
    generation = int(re.search(r"generation (\d+)", lines[0])[1])  # type: ignore[index]
    later = [g for g in log.generations() if g > generation]
    if told["Lost"].startswith("unknown"):
        verdict.unknown += 1
        verdict.claim(f"{where} could have known: {told['Lost']}", optimizer in NUMBERLESS)
        verdict.claim(f"{where} claims that it recovered", "RECOVERED" not in lines[0] and "yes" not in told["Worked?"])
        return
    verdict.claim(f"{where} went on without a step", bool(later))
    if not later:
        return
    first = log.first(later[0])
    earlier = [g for g in log.generations() if g <= generation]
    had = (max(log.done(g) for g in earlier), max(log.top(g) for g in earlier))
    again = (max(had[0] - first + 1, 0), max(had[1] - first + 1, 0))
    _lost(verdict, told["Lost"], again, first, where)
    if restored := re.search(r"step (\d+) restored from (.*)", told["Done"]):
        verdict.holds(f"{where} restored", int(restored[1]), first - 1, first - 1)
        verdict.claim(f"{where} one node has no others", c.nodes > 1 or "other nodes" not in restored[2])
    if "RECOVERED" in lines[0]:
        verdict.claim(f"{where} is not where it had been", log.top(later[0]) >= had[0])
    elif "SUPERSEDED" in lines[0]:
        verdict.claim(f"{where} was where it had been", log.done(later[0]) <= had[1])
    else:
        verdict.claim(f"{where} is left open: {lines[0]}", False)


def _counts(verdict: Verdict, c: Cluster, log: OwnLog, optimizer: str) -> None:
    """Checks every number of ``goodput``."""
    said = c.goodput()
    if said["new_steps"] is None or said["repeated_steps"] is None:
        verdict.claim(f"{c.job} goodput could have known", optimizer in NUMBERLESS)
        return
    each = log.generations()
    low = sum(log.done(g) - log.first(g) + 1 for g in each)
    high = sum(log.top(g) - log.first(g) + 1 for g in each)
    new = (max(log.done(g) for g in each), max(log.top(g) for g in each))
    verdict.holds(f"{c.job} new steps", said["new_steps"], *new)
    verdict.holds(f"{c.job} repeated", said["repeated_steps"], low - new[1], high - new[0])


def _judged(c: Cluster, log: OwnLog, optimizer: str) -> Verdict:
    verdict = Verdict()
    for number in range(1, len(c.facts("IncidentOpened")) + 1):
        _incident(verdict, c, log, number, optimizer)
    _counts(verdict, c, log, optimizer)
    return verdict


def _nodes_leave(c: Cluster, log: OwnLog, rng: random.Random, times: int) -> None:
    """Loses a machine, which comes back, ``times`` times."""
    for _ in range(times):
        before = log.last_generation()
        at = log.reached(0) + rng.randint(20, 40)
        c.wait_for(lambda at=at: log.reached(1) >= at, PATIENCE, f"step {at}")
        c.kill_node(1)
        c.wait_for(lambda g=before: log.last_generation() > g, PATIENCE, "a world without it")
        alone = log.last_generation()
        c.start(1)
        c.wait_for(lambda g=alone: log.last_generation() > g, PATIENCE, "a world with it")


def _run(run: Run, seed: int) -> tuple[Verdict, Verdict]:
    """Returns the verdict on one run, and the verdict with a falsified log as a control."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        log, dies = OwnLog(Path(scratch)), []
        more = {"nodes": 2, "workers": 1, "elastic": "1:2"} if run.nodes > 1 else {}
        steps, pause = (100_000, 0.03) if run.nodes > 1 else (200, 0.01)
        if run.nodes == 1:
            deaths = run.deaths(rng)
            dies = [x for g, step in enumerate(deaths, 1) for x in ("--die", f"{g}:{rng.randint(0, 1)}:{step}")]
            steps = max(deaths) + 60
        line = [
            SCRIPT,
            "--out",
            scratch,
            "--steps",
            str(steps),
            "--pause",
            str(pause),
            "--optimizer",
            run.optimizer,
            *run.options,
            *dies,
        ]
        with cluster(f"true-{run.name}-{os.getpid()}-{seed}", line, options=["--max-restarts", "99"], **more) as c:
            c.start_all()
            if run.nodes > 1:
                _nodes_leave(c, log, rng, run.failures)
                c.agents[0].terminate()
            c.wait(PATIENCE * (run.failures + 1))
            return _judged(c, log, run.optimizer), _judged(c, Altered(Path(scratch)), run.optimizer)


def _runs(soak: bool) -> list[Run]:
    zero, six, own = (), ("--everstep",), ("--save", str(SAVE))
    each = [
        Run("zero-line", 3, zero),
        Run("six-line", 3, six),
        Run("resumes", 2, own),
        Run("resumes", 2, own, "scheduler"),
        Run("resumes", 1, own, "plain"),
        Run("elastic", 1, six, nodes=2),
    ]
    if not soak:
        return each
    return [
        *(Run("zero-line", 4, zero) for _ in range(4)),
        *(Run("six-line", 4, six) for _ in range(4)),
        *(Run("resumes", 4, own) for _ in range(2)),
        *(Run("resumes", 4, own, "scheduler") for _ in range(2)),
        *(Run("resumes", 2, own, optimizer) for optimizer in NUMBERLESS),
        *(Run("elastic", 3, six, nodes=2) for _ in range(2)),
    ]


def measure(soak: bool) -> Iterator[Bound]:
    """Makes all runs, one after the other."""
    found, altered = Verdict(), Verdict()
    for seed, run in enumerate(_runs(soak)):
        said, against = _run(run, seed)
        for total, one in ((found, said), (altered, against)):
            total.incidents += one.incidents
            total.statements += one.statements
            total.unknown += one.unknown
            total.wrong += one.wrong
    yield Bound("incidents", found.incidents, "", ">=", 60 if soak else 12)
    yield Bound(
        "contradicted", len(found.wrong), f"of {found.statements} statements", "=", 0, samples=tuple(found.wrong[:20])
    )
    yield Bound("unknown", found.unknown, "incidents of which nothing carries a step number", "<=", 10)
    yield Bound(
        "altered-log.contradicted",
        len(altered.wrong),
        "by logs whose later generations are moved by three steps",
        "=",
        0,
        control=True,
    )
