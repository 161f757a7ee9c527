"""A case: how a job is started and disturbed, and what is allowed then.

The examiner judges the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from figures.hostile.job import HARD, Job, job

#: Documented exit codes for problems of the surroundings (docs/guide/first-run.md).
FAILED, NO_COORDINATOR, REQUEUE, SETUP, KILLED = 1, 69, 75, 78, 137
#: Steps between durable checkpoints of the script: no restart repeats more. On a busy machine, not
#: every step is captured in memory (``stall_budget``).
PERSIST = 5
RANKS = 2
#: A sentence that tells what everstep is waiting for.
WAITS = re.compile(
    r"everstep: .*(wait|does not answer|cannot reach|still|stopped|hung|no answer|until the store)", re.IGNORECASE
)
PANIC = re.compile(r"panicked|fatal runtime error|RUST_BACKTRACE|stack overflow|core dumped", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """A job with its surroundings and its disturbance.

    ``through`` is a prefix of the command line. ``during`` disturbs the job once it makes steps.
    ``codes`` other than 0 are allowed if there is a sentence; without any, the job has to work.
    ``refused``: it must not work. ``repeats``: steps that a rank may repeat after each restart,
    each with the same loss.
    """

    name: str
    options: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    through: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    before: Callable[[Job], None] | None = None
    during: Callable[[Job], None] | None = None
    start: Callable[[Case, Job], None] | None = None
    codes: frozenset[int] = frozenset()
    refused: bool = False
    #: It may wait forever if it reports what it waits for.
    waits: bool = False
    repeats: int = 0
    #: A pattern that the output must contain.
    says: str = ""
    #: Step after which ``during`` begins.
    at: int = 8
    seconds: float = HARD

    def run(self, made: Job) -> None:
        """Starts the job, disturbs it, and waits for its end."""
        if self.before:
            self.before(made)
        if self.start:
            self.start(self, made)
        else:
            made.start([*self.through, *self.line(made)], self.environment(made))
        if self.during and made.reach(self.at, seconds=self.seconds):
            self.during(made)
        made.wait(self.seconds)

    def line(self, made: Job) -> list[str]:
        """Returns the command line."""
        return made.line(["--standalone", "--nproc-per-node", str(RANKS), *self.options], list(self.words))

    def environment(self, made: Job) -> dict[str, str]:
        """Returns the environment. ``{home}`` in a value is the job's directory."""
        env = {**made.env, **{k: v.replace("{home}", str(made.home)) for k, v in self.env.items()}}
        return {k: v for k, v in env.items() if k not in self.unset}


@dataclass(frozen=True)
class Verdict:
    """The examiner's findings: empty strings if all is well."""

    case: str
    codes: tuple[int, ...]
    panic: str = ""
    silent: str = ""
    hung: str = ""
    code: str = ""
    result: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.panic or self.silent or self.hung or self.code or self.result)


@dataclass(frozen=True)
class Reference:
    """The results of an undisturbed run."""

    losses: dict[int, dict[int, str]]
    finals: dict[int, str]


def reference(steps: int) -> Reference:
    """Runs the undisturbed job and returns its results."""
    with job() as made:
        Case("reference", words=("--steps", str(steps))).run(made)
        if made.codes() != [0]:
            raise RuntimeError(f"the undisturbed job failed: {made.said()[-2000:]}")
        losses = {r: {s: loss for s, loss, _ in made.steps(r)} for r in range(RANKS)}
        return Reference(losses, {r: (made.out / f"final-{r}").read_text() for r in range(RANKS)})


def judge(case: Case, made: Job, expected: Reference, steps: int) -> Verdict:
    """Judges a job that has ended."""
    said, own = made.said(), made.own_lines()
    found: dict[str, str] = {}
    if panic := PANIC.search(said):
        found["panic"] = said[max(0, panic.start() - 120) : panic.start() + 200]
    if made.timed_out:
        # An early line about something else explains nothing; only the last ones count.
        told = any(WAITS.search(x) for x in own[-4:])
        if not (told and case.waits):
            found["hung" if told else "silent"] = "\n".join(own[-4:]) or "no line at all"
        return Verdict(case.name, tuple(made.codes()), **found)
    codes = made.codes()
    worked = all(c == 0 for c in codes)
    bad = [c for c in codes if c and c not in case.codes]
    if bad or (worked and case.refused) or not (worked or case.codes):
        found["code"] = f"{codes}: {' | '.join(own[-3:]) or said[-300:]}"
    if not worked and not found and not (own or said.startswith("error: ") or codes == [KILLED]):
        found["code"] = f"{codes} without a sentence: {said[-300:]}"
    if case.says and not re.search(case.says, said):
        found.setdefault("code", f"{codes}: does not say {case.says!r}: {' | '.join(own[-3:])}")
    if worked and (wrong := _wrong(case, made, expected, steps)):
        found["result"] = wrong
    return Verdict(case.name, tuple(codes), **found)


def _wrong(case: Case, made: Job, expected: Reference, steps: int) -> str:
    for rank in range(RANKS):
        rows = made.steps(rank)
        missing = sorted(set(range(steps)) - {s for s, _, _ in rows})
        differ = sorted({s for s, loss, _ in rows if expected.losses[rank].get(s) != loss})
        again = len(rows) - len({s for s, _, _ in rows})
        allowed = case.repeats * max(1, len({pid for _, _, pid in rows}) - 1)
        final = made.out / f"final-{rank}"
        if missing or differ or again > allowed:
            return f"rank {rank}: missing {missing}, different {differ}, repeated {again} (allowed {allowed})"
        if not final.exists():
            return f"rank {rank}: never came to its end"
        if final.read_text() != expected.finals[rank]:
            return f"rank {rank}: other weights at the end"
    return ""
