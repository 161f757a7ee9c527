"""When a step is due for durable storage, and which steps go into memory, on a simulated clock."""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from pathlib import Path

import pytest
from torch.utils.data.distributed import DistributedSampler

from everstep import schedule


class _Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    time = _Time()
    monkeypatch.setattr(schedule, "time", time)
    return time


def _train(
    measured: schedule.Measured, clock: _Time, steps: int, cost: float, step: float = 0.1, first: int = 1
) -> list[int]:
    """A loop that waits for its writes. Returns the steps that were made durable."""
    saved: list[int] = []
    durable = 0
    for n in range(first, first + steps):
        clock.now += step
        measured.stepped(durable, False)
        if measured.steps_left() == 0:
            measured.begins(n, clock.now)
            clock.now += cost
            durable = n
            saved.append(n)
    return saved


def test_the_budget_is_kept_after_a_profile_of_fifty_steps(tmp_path, clock):
    measured = schedule.Measured(0.05, 1.0, tmp_path)
    saved = _train(measured, clock, 2000, 0.4)
    assert saved[0] == 51
    apart = [b - a for a, b in itertools.pairwise(saved)]
    # 0.4 s are 5 % of 80 steps of 0.1 s.
    assert all(78 <= n <= 82 for n in apart[1:]), apart
    kept = json.loads((tmp_path / schedule.FILE).read_text())
    assert kept["every"] == 80 and "stall budget" in kept["why"] and not kept["closed"]


def test_the_next_life_goes_on_with_what_was_measured_and_counts_a_failure(tmp_path, clock):
    first = schedule.Measured(0.05, 1.0, tmp_path)
    _train(first, clock, 500, 0.4)
    second = schedule.Measured(0.05, 1.0, tmp_path)
    assert _train(second, clock, 200, 0.4)[0] <= 90
    second.close()
    kept = json.loads((tmp_path / schedule.FILE).read_text())
    assert kept["failures"] == 1 and kept["closed"]
    third = schedule.Measured(0.05, 1.0, tmp_path)
    third.close()
    assert json.loads((tmp_path / schedule.FILE).read_text())["failures"] == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rate": 7}', '{"rate": {"budget": "x"}}'])
def test_a_file_that_is_nothing_is_as_good_as_none(tmp_path: Path, clock, text):
    (tmp_path / schedule.FILE).write_text(text)
    measured = schedule.Measured(0.05, 1.0, tmp_path)
    assert measured.steps_left() == 1 and measured.why() == "not measured yet"


def test_an_evaluation_is_no_step(tmp_path, clock):
    measured = schedule.Measured(0.05, 1.0, tmp_path)
    _train(measured, clock, 500, 0.4)
    clock.now += 3600
    measured.stepped(10_000, True)
    assert len(_train(measured, clock, 400, 0.4, first=502)) >= 4


def test_snapshots_are_rarer_only_when_they_cost_more_than_the_budget(clock):
    snapshots = schedule.Snapshots(0.01, 0.0)

    def run(stall: float, every: int = 1) -> int | None:
        asked = None
        for n in range(200):
            captured = n % every == 0
            clock.now += 0.1 + (stall if captured else 0.0)
            if captured:
                snapshots.stalled(stall, begins=True)
            asked = snapshots.stepped(stall if captured else 0.0, False) or asked
        return asked

    assert run(0.0005) is None
    # With some headroom.
    assert run(0.01) == 16
    # And back.
    assert run(0.0005, 10) == 1


def test_caches_are_filled_again_up_to_their_size():
    assert schedule.refill(1_000_000) == 30_000
    assert schedule.refill(10_000_000) == 220_000
    assert schedule.refill(1 << 40) == schedule.refill(100_000_000) == 480_000


def test_short_stalls_are_free_unless_a_budget_was_given(clock):
    snapshots = schedule.Snapshots(0.01, 0.005)
    for _ in range(100):
        clock.now += 0.01
        snapshots.stalled(0.004, begins=True)
        assert snapshots.stepped(0.004, False) is None


def test_ranks_meet_only_at_steps_that_all_know(clock):
    every = schedule.Clock(timedelta(seconds=10))
    met: list[int] = []

    def agree(value: int) -> int:
        met.append(value)
        return value

    appointments = schedule.Appointments(every, agree)
    due = []
    for n in range(1, 1000):
        clock.now += 0.1
        every.stepped(0, False)
        if appointments.due(n):
            due.append(n)
            every.begins(n, clock.now)
    assert all(99 <= b - a <= 101 for a, b in itertools.pairwise(due)) and len(due) >= 9, due
    assert len(met) < 200


def test_where_ranks_differ_only_samplers_end_an_epoch():
    """A rank's own data reader may begin its next epoch at another step than those of other
    ranks."""

    class Reader:
        epoch = 0

    reader, sampler = Reader(), DistributedSampler(range(8), num_replicas=2, rank=0)
    for alike, ends in ((True, [True, True]), (False, [False, True])):
        epochs = schedule.Epochs([reader, sampler], alike=alike)
        epochs.restored()
        found = []
        for obj in (reader, sampler):
            obj.epoch += 1
            found.append(epochs.ended())
        assert found == ends
