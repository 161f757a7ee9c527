"""``explain``, ``goodput`` and ``status`` compared with the script's own log, with real jobs and
kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.cluster import Cluster, cluster
from harness.live import wait
from harness.own_log import OwnLog

#: Rank 1 is killed when it has done 60 steps.
DIES = ("--die", "1:1:60")
SCRIPT = "figures/scripts/own_log.py"
Started = tuple[Cluster, OwnLog]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    with_all: list[object] = []

    def start(name: str, *arguments: str, steps: int = 150, **more: object) -> Started:
        line = [SCRIPT, "--out", str(tmp_path), "--steps", str(steps), *arguments]
        context = cluster(f"told-{name}-{os.getpid()}", line, options=["--max-restarts", "9"], **more)
        c = context.__enter__()
        with_all.append(context)
        return c.start_all(), OwnLog(tmp_path)

    yield start
    for context in with_all:
        context.__exit__(None, None, None)  # type: ignore[attr-defined]


def _explained(c: Cluster) -> dict[str, str]:
    """Returns the lines of the latest incident by their first word, and the first line as
    ``Head``."""
    lines = c.ask("explain", "--job", c.job).stdout.splitlines()
    return {
        "Head": lines[0],
        **{line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in lines[1:] if line[:1].strip()},
    }


def _counts(c: Cluster) -> dict[str, int | None]:
    return {k: v for k, v in c.goodput().items() if k in ("new_steps", "repeated_steps")}


def test_a_script_that_begins_again_is_not_recovered_until_it_is_where_it_had_been(started):
    c, log = started("zero", *DIES, "--hold", "2:20")
    wait(lambda: "REPEATING" in _explained(c)["Head"], 240)
    before = _explained(c)
    had = log.done(1)
    assert (
        before["Lost"].startswith("the script began again at step 1; ") and "steps are being repeated" in before["Lost"]
    ), before
    assert "yes" not in before["Worked?"] and f"not yet back at step {had}" in before["Worked?"], before
    (log.directory / "go").touch()
    assert c.wait(240) == [0]
    after = _explained(c)
    assert (
        "RECOVERED" in after["Head"] and f"the script began again at step 1; {had} steps were repeated" in after["Lost"]
    ), after
    assert _counts(c) == {"new_steps": 150, "repeated_steps": had}


@pytest.mark.parametrize("optimizer", ["adam", "scheduler"])
def test_a_script_that_goes_on_by_itself_is_counted_from_where_it_does(started, optimizer):
    c, log = started(optimizer, *DIES, "--save", "25", "--optimizer", optimizer)
    assert c.wait(240) == [0]
    first, had = log.first(2), log.done(1)
    told = _explained(c)
    again = had - first + 1
    assert first in (51, 76) and f"the script continued at step {first}; {again} step" in told["Lost"], told
    assert "RECOVERED" in told["Head"], told
    assert _counts(c) == {"new_steps": 150, "repeated_steps": again}


@pytest.mark.parametrize("optimizer", ["plain", "momentum", "epochs"])
def test_where_nothing_carries_a_number_nothing_is_claimed(started, optimizer):
    c, _ = started(optimizer, *DIES, "--save", "25", "--optimizer", optimizer)
    assert c.wait(240) == [0]
    told = _explained(c)
    assert "RECOVERED" not in told["Head"] and told["Lost"].startswith("unknown: ") and "yes" not in told["Worked?"], (
        told
    )
    assert _counts(c) == {"new_steps": None, "repeated_steps": None}
    line = c.ask("goodput", c.job).stdout
    assert "new steps unknown  repeated unknown" in line and "goodput at least" in line, line
    assert "everstep: done after " in c.output() and "done at step" not in c.output()
    assert f"everstep explain --job {c.job} tells what happened" in c.output()


def test_an_incident_is_over_if_the_job_was_back_just_before_the_next_one(started):
    c, log = started("twice", "--die", "1:1:60", "--die", "2:1:61")
    assert c.wait(240) == [0]
    told = c.ask("explain", "inc-1", "--job", c.job).stdout
    assert log.done(1) == 60 and "RECOVERED" in told.splitlines()[0], told


def test_one_node_has_no_other_nodes(started):
    c, log = started("six", *DIES, "--everstep", "--hold", "2:70")
    c.wait_step(69, 240)
    assert "replicated" not in c.ask("status", c.job).stdout
    (log.directory / "go").touch()
    assert c.wait(240) == [0]
    told = _explained(c)
    assert "other nodes" not in told["Done"] and f"step {log.first(2) - 1} restored" in told["Done"], told
    lost = log.done(1) - log.first(2) + 1
    assert told["Lost"].startswith({0: "no step", 1: "1 step,"}.get(lost, f"{lost} steps,")), (told, lost)
    assert _counts(c) == {"new_steps": 150, "repeated_steps": lost}


def test_steps_that_a_lost_node_may_have_done_are_not_claimed(started):
    c, log = started("lost", "--everstep", "--pause", "0.03", steps=3000)
    c.wait_for(lambda: log.reached(1) >= 60, 240)
    c.kill_node(0)
    wait(lambda: c.facts("IncidentOpened"), 240)
    said, line = c.goodput(), c.ask("goodput", c.job).stdout
    assert said["new_steps"] <= log.done(1) and said["maybe_more_new_steps"], (said, log.done(1))
    assert f"new steps at least {said['new_steps']}  repeated at least 0" in line, line


def test_no_advice_is_given_about_a_process_that_was_replaced(started):
    c, log = started("stopped", "--everstep", "--pause", "0.03", steps=300)
    c.wait_for(lambda: log.reached(1) >= 60, 240)
    pid = c.worker_pid(1)
    os.kill(pid, signal.SIGSTOP)
    assert c.wait(240) == [0]
    told = _explained(c)
    # Stacks do not show who stopped a process. Nothing would continue this one: it was replaced.
    assert "find out who or what stopped the process" in told["Next"] and "stacks" not in told["Next"], told
    assert "kill -CONT" not in told["Next"], told


def test_nodes_that_leave_take_no_counts_along(started):
    c, log = started("elastic", "--everstep", "--pause", "0.03", nodes=2, workers=1, elastic="1:2", steps=300)
    c.wait_for(lambda: log.reached(1) >= 60, 240)
    before = log.last_generation()
    c.kill_node(1)
    c.wait_for(lambda: log.last_generation() > before, 240)
    c.start(1)
    assert c.wait(240)[0] == 0
    each = log.generations()
    again = sum(log.done(g) - log.first(g) + 1 for g in each) - 300
    # A surviving rank may have done one more step.
    assert _counts(c) == {"new_steps": 300, "repeated_steps": pytest.approx(again, abs=1)}
