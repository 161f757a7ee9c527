"""Another user of the same host can neither harm nor read a job, whatever its state.

The job trains on and reveals nothing. The timed part is valid only on an idle machine.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from figures.bound import Bound
from figures.paired import middle_half
from figures.second.place import NOBODY, SCRIPT, Attacker, Place, place
from harness.cluster import EVERSTEP

#: Ways in which predictable names are planted (a directory, links, a FIFO, a file …).
PLANTED = 7
#: Steps between durable checkpoints: no restart repeats more. Not all of such short steps are
#: captured in memory (``stall_budget``).
DURABLE = 20
PHASES = ("start", "run", "restart", "clean-up")
#: Attacks that there are at least.
ATTACKS_MIN = 30


@dataclass
class Found:
    """The result of one attacked job."""

    failed: list[str] = field(default_factory=list)
    restarts: int = 0
    hangs: list[str] = field(default_factory=list)
    gained: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    #: Rounds of all attacks in each phase.
    rounds: Counter[str] = field(default_factory=Counter)
    attacks: set[str] = field(default_factory=set)

    def add(self, other: Found) -> None:
        """Adds the result of another job."""
        for name in ("failed", "hangs", "gained", "ran"):
            getattr(self, name).extend(getattr(other, name))
        self.restarts += other.restarts
        self.rounds += other.rounds
        self.attacks |= other.attacks


def _traces(p: Place, found: Found) -> None:
    """Records what the second user left in the first user's files, or ran as the first user."""
    if p.precious.read_text() != "years of work" or p.precious.stat().st_mode & 0o777 != 0o600:
        found.gained.append(f"{p.precious}: changed")
    for root, directories, files in os.walk(p.home):
        for name in directories + files:
            path = os.path.join(root, name)
            if os.lstat(path).st_uid == NOBODY or name == "planted":
                found.gained.append(f"{path}: theirs, in what is ours")
    listed = p.run("sh", "-c", "ls /tmp /dev/shm").stdout.split()
    found.ran += [x for x in listed if x.startswith("ran-as-") and x != f"ran-as-{NOBODY}"]


def _steps(p: Place, found: Found, ranks: int, killed: int) -> None:
    """Checks that each step has one loss and, except for those repeated by the restart, appears
    once."""
    for rank in range(ranks):
        rows = p.rows(rank)
        losses: dict[int, set[str]] = {}
        for step, loss, *_ in rows:
            losses.setdefault(step, set()).add(loss)
        missing = set(range(max(losses, default=0) + 1)) - set(losses)
        found.failed += [f"rank {rank}: step {s} is missing" for s in sorted(missing)]
        found.failed += [f"rank {rank}: step {s} has {len(of)} losses" for s, of in losses.items() if len(of) > 1]
        if len(rows) - len(losses) > DURABLE * killed:
            found.failed.append(f"rank {rank}: {len(rows) - len(losses)} steps were repeated: {p.said()[-600:]}")
    found.restarts += len({pid for _, _, pid, _, _ in p.rows(0)}) - 1 - killed


def _campaign(kind: int, whole: bool, only: list[str] | None = None, weaken: Any = None) -> Found:
    """Attacks one job all the time or, if not ``whole``, only during its start and end.

    ``weaken`` makes the set-up insecure.
    """
    found = Found()
    with place() as p:
        start = weaken(p) if weaken else {}
        attacker = p.attacker(kind=kind, only=only)
        try:
            _phases(p, attacker, found, whole, start)
        except TimeoutError as e:
            found.hangs.append(str(e))
        for one in attacker.end():
            found.attacks |= set(one["tally"])
            found.gained += [f"{name}: {x}" for name, of in one["gained"].items() for x in of]
        _traces(p, found)
    return found


def _phases(p: Place, attacker: Attacker, found: Found, whole: bool, start: dict[str, Any]) -> None:
    attacker.more(1)
    job = p.start(**start)
    begun = len(attacker.rounds())
    p.until(lambda: p.rows(1) and p.rows(1)[-1][0] >= 20, "the first steps")
    attacker.more(1)
    found.rounds["start"] = len(attacker.rounds()) - begun
    if whole:
        attacker.more(2)
        found.rounds["run"] = 2
        old = p.rows(1)[-1]
        (p.out / "die-1").touch()
        p.until(lambda: p.rows(1)[-1][2] != old[2] and p.rows(1)[-1][0] > old[0] + 20, "steps after the restart")
        attacker.more(1)
        found.rounds["restart"] = 1
    (p.out / "last.new").write_text(str(p.rows(0)[-1][0] + 100))
    (p.out / "last.new").rename(p.out / "last")
    deadline = time.monotonic() + 90
    while job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if job.poll() != 0:
        found.failed.append(f"exit code {job.poll()}: {p.said()[-1000:]}")
    _steps(p, found, 2, int(whole))
    begun = len(attacker.rounds())
    for words in (["doctor"], ["doctor", "--clean"], ["status"]):
        done = p.run(str(EVERSTEP), *words)
        if "panicked" in done.stderr or done.returncode not in (0, 1):
            found.failed.append(f"everstep {' '.join(words)}: {done.returncode}: {done.stderr[-500:]}")
    attacker.more(1)
    found.rounds["clean-up"] = len(attacker.rounds()) - begun


# -- deliberately weak set-ups -------------------------------------------------------------------


def _open_state(p: Place) -> dict[str, Any]:
    """Puts a secret in a file of the user's that everybody can read and write."""
    path = p.cwd / "notes"
    path.write_text(p.secrets["state"])
    path.chmod(0o666)
    return {}


def _path_of_theirs(p: Place) -> dict[str, Any]:
    """Makes Python look for modules where everybody can write."""
    p.env["PYTHONPATH"] = "/tmp"
    return {}


CONTROLS = {
    "gained": ("files of the user that all can read and write", _open_state),
    "ran": ("a search path that all can write", _path_of_theirs),
}


# -- cost ----------------------------------------------------------------------------------------


def _slower(seconds: float) -> tuple[list[float], float]:
    """Returns by how many percent steps are longer in each turn of attacks, and the attack's share
    of a core.

    The steps during an attack are compared with those just before and just after it, while the same
    user burns as much processor time. This machine's speed may change by a fifth from one second to
    the next, so the turns are short.
    """
    with place() as p:
        attacker = p.attacker(fill=False, turns=True, cores="0")
        p.start(str(SCRIPT), "--core", "1", "--work", "8", ranks=1, options=("--no-warm",), cores="0")
        p.until(lambda: len(p.rows()) > 50, "the first steps")
        first = len(attacker.rounds())
        time.sleep(seconds)
        turns = attacker.rounds()[first:]
        rows = p.rows()
        attacker.end()
    ends = [row[3] for row in rows]

    def step(turn: dict[str, Any]) -> float | None:
        """The median of the steps that lie in it entirely."""
        within = rows[bisect_left(ends, turn["at"]) : bisect_right(ends, turn["at"] + turn["wall"])][1:]
        return statistics.median(took for *_, took in within) if within else None

    took = [step(turn) for turn in turns]
    longer = []
    for i in range(1, len(turns) - 1):
        before, during, after = took[i - 1 : i + 2]
        if turns[i]["mode"] == "attack" and before and during and after:
            longer.append(100 * (during / ((before + after) / 2) - 1))
    attacks = [turn for turn in turns if turn["mode"] == "attack"]
    return longer, sum(t["cpu"] for t in attacks) / sum(t["wall"] for t in attacks)


def _error(values: list[float]) -> float:
    """Returns the standard error of the mean of the middle half, by resampling."""
    draws = random.Random(1)
    means = [middle_half(draws.choices(values, k=len(values))) for _ in range(1000)]
    return statistics.stdev(means)


def measure(soak: bool) -> Iterator[Bound]:
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        raise RuntimeError("needs root: two users, in namespaces of their own")
    found = Found()
    for kind in range(PLANTED):
        for whole in [True] * (5 if soak else 1) if kind == 0 else [soak]:
            found.add(_campaign(kind, whole))
    for name in ("failed", "hangs", "gained", "ran"):
        for text, times in Counter(getattr(found, name)).most_common(20):
            print(f"{name}: {times} times {text}", flush=True)
    yield Bound("attacks", len(found.attacks), f"attacks, names planted in {PLANTED} ways", ">=", ATTACKS_MIN)
    for phase in PHASES:
        yield Bound(
            f"rounds.{phase}",
            found.rounds[phase],
            "rounds of all attacks",
            ">=",
            PLANTED if phase in ("start", "clean-up") else 1,
        )
    yield Bound(
        "failed",
        len(found.failed),
        "steps missing, different or repeated beyond the forced restart; commands that failed",
        "=",
        0,
    )
    yield Bound("restarts", found.restarts, "restarts beyond the forced one", "=", 0)
    yield Bound("hangs", len(found.hangs), "waits that took too long", "=", 0)
    yield Bound("gained", len(found.gained), "things of ours read, written, stopped or held", "=", 0)
    yield Bound("ran", len(found.ran), "programs of theirs run as us", "=", 0)
    for name, (what, weaken) in CONTROLS.items():
        weak = _campaign(0, False, weaken=weaken)
        yield Bound(name, len(getattr(weak, name)), f"the same with {what}", "=", 0, control=True)
    each, share = _slower(600 if soak else 240)
    yield Bound(
        "slower",
        round(middle_half(each), 2),
        f"% longer steps than while the same user burns as much ({share:.2f} of the other core), "
        f"mean of the middle half of {len(each)} turns of attacks, standard error {_error(each):.2f}",
        "<=",
        1.0,
        samples=tuple(round(x, 2) for x in each),
    )
