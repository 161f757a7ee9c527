"""The elastic sampler counts each batch that a loop was given, whatever becomes of the loop."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from everstep.data import ElasticDistributedSampler, epoch_hash

#: Options of loaders whose iterators end, or begin again, in different ways.
LOADERS = {
    "own-process": {"batch_size": 8},
    "workers": {"batch_size": 8, "num_workers": 2},
    "persistent": {"batch_size": 8, "num_workers": 2, "prefetch_factor": 4, "persistent_workers": True},
    "pinned": {"batch_size": 8, "num_workers": 1, "persistent_workers": True, "pin_memory": True},
    "no-batches": {"batch_size": None},
    "no-batches-persistent": {"batch_size": None, "num_workers": 2, "persistent_workers": True},
}
every_loader = pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
# Without a GPU, torch does not pin, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument")


class Numbers(Dataset):
    def __init__(self, n: int = 100) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(int(index))


def _sampler(state: dict[str, Any] | None = None, n: int = 100, **options: Any) -> ElasticDistributedSampler:
    sampler = ElasticDistributedSampler(Numbers(n), seed=3, **options)
    if state is not None:
        sampler.load_state_dict(state)
    return sampler


def _loader(sampler: ElasticDistributedSampler, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), sampler=sampler, **options)


def _numbers(loader: Any, batches: int | None = None) -> list[int]:
    """Returns the samples of one loop, which ends after ``batches`` batches if given."""
    found: list[int] = []
    for count, batch in enumerate(loader, 1):
        found += batch.reshape(-1).tolist()
        if count == batches:
            break
    return found


def _at(state: dict[str, Any]) -> int:
    return state["epoch"] * state["samples"] + state["consumed"]


@every_loader
def test_a_state_saved_after_the_loop_contains_the_whole_epoch(options):
    sampler = _sampler()
    loader = _loader(sampler, **options)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert sorted(_numbers(loader)) == list(range(100))
        state = sampler.state_dict()
        assert _at(state) == 100 * (epoch + 1)
        again = _sampler(state)
        again.set_epoch(epoch)
        assert _numbers(_loader(again, **options)) == []
    assert sampler.finished == {e: epoch_hash(100, seed=3, epoch=e) for e in range(3)}


@every_loader
def test_epochs_that_nobody_asks_about_are_counted(options):
    ranks = [_sampler(num_replicas=2, rank=r) for r in range(2)]
    loaders = [_loader(s, **options) for s in ranks]
    step = 0
    for epoch in range(3):
        used: Counter[int] = Counter()
        for sampler in ranks:
            sampler.set_epoch(epoch)
        for batches in zip(*loaders, strict=True):
            step += 1
            used.update(number for b in batches for number in b.reshape(-1).tolist())
            if step % 5 == 0:
                states = [s.state_dict() for s in ranks]
                assert states[0] == states[1]
        assert used == Counter(range(100)), epoch
    assert all(s.finished == {e: epoch_hash(100, seed=3, epoch=e) for e in range(3)} for s in ranks)


@every_loader
def test_a_loop_that_was_left_goes_on_after_its_last_batch(options):
    sampler = _sampler()
    loader = _loader(sampler, **options)
    size = options["batch_size"] or 1
    found = _numbers(loader, 3)
    if not options.get("persistent_workers"):
        assert multiprocessing.active_children() == [], "the count must not keep the loader's workers"
    state = sampler.state_dict()
    assert _at(state) == 3 * size

    def fail() -> None:
        for _ in loader:
            raise RuntimeError("the first step failed: its batch comes again")

    with pytest.raises(RuntimeError, match="the first step failed"):
        fail()
    found += _numbers(loader)
    assert sorted(found) == list(range(100)) and sampler.epoch == 1
    assert sampler.finished[0] == epoch_hash(100, seed=3, epoch=0)
    # The state saved in between continues with the same samples.
    assert found[3 * size :] == _numbers(_loader(_sampler(state), **options))


@every_loader
def test_a_batch_that_was_only_looked_at_stays_in_the_epoch(options):
    sampler = _sampler()
    loader = _loader(sampler, **options)
    looked_at = next(iter(loader)).reshape(-1).tolist()
    sampler.set_epoch(0)
    assert len(sampler) == 100
    found = _numbers(loader)
    assert sorted(found) == list(range(100)) and found[: len(looked_at)] == looked_at
    assert sampler.finished == {0: epoch_hash(100, seed=3, epoch=0)}


@every_loader
def test_a_look_inside_a_loop_does_not_move_it(options):
    sampler = _sampler()
    loader, found = _loader(sampler, **options), []
    other = _loader(sampler, batch_size=4)
    for i, batch in enumerate(loader):
        found += batch.reshape(-1).tolist()
        if i == 1:
            next(iter(other))
        if i == 3:
            assert _at(sampler.state_dict()) == len(found)
            again = _sampler(sampler.state_dict())
            rest = _numbers(_loader(again, **options))
            assert sorted(found + rest) == list(range(100))
    assert sorted(found) == list(range(100)) and sampler.epoch == 1
    assert sampler.finished == {0: epoch_hash(100, seed=3, epoch=0)}


def test_a_look_on_all_ranks_and_a_question_on_one_leave_them_at_one_position():
    ranks = [_sampler(num_replicas=2, rank=r) for r in range(2)]
    loaders = [_loader(s, batch_size=10) for s in ranks]
    for loader in loaders:
        next(iter(loader))
    assert ranks[0].epoch == 0 and ranks[0].finished == {}
    found = [n for loader in loaders for n in _numbers(loader)]
    assert sorted(found) == list(range(100)) and ranks[0].state_dict() == ranks[1].state_dict()


def test_loaders_of_different_batches_take_turns():
    sampler = _sampler()
    found = _numbers(_loader(sampler, batch_size=8), 5)
    kept = _loader(sampler, batch_size=6, num_workers=1, persistent_workers=True)
    found += _numbers(kept, 5)
    found += _numbers(_loader(sampler, batch_size=5, num_workers=2), 2)
    found += _numbers(kept)
    assert sorted(found) == list(range(100))
    assert sampler.finished == {0: epoch_hash(100, seed=3, epoch=0)}


def test_an_epoch_left_before_its_end_is_left_out_from_there():
    sampler = _sampler()
    loader = _loader(sampler, batch_size=8)
    _numbers(loader, 12)  # 96 of 100
    sampler.set_epoch(1)
    assert len(_numbers(loader)) == 104 and sampler.epoch == 2
    sampler.set_epoch(2)
    _numbers(loader, 3)
    sampler.set_epoch(3)
    assert sorted(_numbers(loader)) == list(range(100))
    assert sorted(sampler.finished) == [0, 1, 3]


def _epochs(sampler: ElasticDistributedSampler, epochs: range, **options: Any) -> list[int]:
    loader, found = _loader(sampler, **options), []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        found += _numbers(loader)
    return found


def test_a_restart_uses_the_remainder_of_the_epoch_before():
    undisturbed, options = _sampler(), {"batch_size": 32, "drop_last": True}
    expected = _epochs(undisturbed, range(3), **options)
    first = _sampler()
    found = _epochs(first, range(1), **options)
    assert len(found) == 96
    second = _sampler(first.state_dict())
    found += _epochs(second, range(1, 3), **options)
    assert found == expected
    assert second.finished == undisturbed.finished and 0 in second.finished


def test_a_restart_with_fewer_ranks_uses_the_remainder_too():
    state: dict[str, Any] = {}
    found: list[int] = []
    for rank in range(4):
        sampler = _sampler(num_replicas=4, rank=rank)
        found += _epochs(sampler, range(1), batch_size=8, drop_last=True)
        state = sampler.state_dict()
    assert _at(state) == len(found) == 96
    alone = _sampler(state)
    found += _epochs(alone, range(1, 2), batch_size=1)
    assert Counter(found) == Counter(list(range(100)) * 2)
    assert sorted(alone.finished) == [0, 1]


def test_a_restart_leaves_out_what_an_undisturbed_run_leaves_out():
    first = _sampler()
    loader = _loader(first, batch_size=8)
    _numbers(loader, 5)
    state = first.state_dict()
    second = _sampler(state)
    for sampler in (first, second):
        sampler.set_epoch(1)
    assert _numbers(loader) == _numbers(_loader(second, batch_size=8))
    assert second.finished == first.finished == {1: epoch_hash(100, seed=3, epoch=1)}
    # A script that does not save the sampler's state begins with the epoch that it names.
    fresh = _sampler()
    fresh.set_epoch(5)
    assert fresh.epoch == 5


def test_a_state_of_an_earlier_version_loses_nothing():
    first = _sampler()
    _epochs(first, range(1), batch_size=32, drop_last=True)
    state = first.state_dict()
    state.pop("round", None)
    second = _sampler(state)
    assert len(_epochs(second, range(1, 2), batch_size=32, drop_last=True)) == 96
    assert second.finished[0] == epoch_hash(100, seed=3, epoch=0)
    # After a loop, the size of a step is known: an epoch that is left early is not completed.
    second.set_epoch(2)
    _numbers(_loader(second, batch_size=8), 3)
    second.set_epoch(3)
    assert second.epoch == 3


def test_torchdatas_loader_counts_from_where_its_own_state_left_off():
    module = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> tuple[ElasticDistributedSampler, Any]:
        sampler = _sampler()
        return sampler, module.StatefulDataLoader(Numbers(), batch_size=8, sampler=sampler)

    sampler, loader = make()
    loop = iter(loader)
    for _ in range(4):
        next(loop)
    state = loader.state_dict()
    rest = [number for batch in loop for number in batch.tolist()]
    assert _at(sampler.state_dict()) == 100
    again, loader = make()
    loader.load_state_dict(state)
    found = _numbers(loader, 1)
    assert _at(again.state_dict()) == 40
    assert found + _numbers(loader) == rest
    assert _at(again.state_dict()) == 100


def _drawn(loader: Any, sampler: ElasticDistributedSampler, epochs: int, until: int) -> list[tuple[int, float]]:
    """Trains with a random number for each batch, and returns what each step has used, up to step
    ``until``."""
    found: list[tuple[int, float]] = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            found.append((int(batch.reshape(-1)[0]), torch.rand(()).item()))
            if len(found) == until:
                return found
    return found


@every_loader
@pytest.mark.parametrize("saved_at", [4, 13, 30])
def test_a_resumed_loop_draws_the_numbers_of_one_that_was_not_interrupted(options, saved_at):
    if options["batch_size"] is None:
        saved_at *= 8
    torch.manual_seed(5)
    sampler = _sampler()
    whole = _drawn(_loader(sampler, **options), sampler, 3, 1000)
    torch.manual_seed(5)
    sampler = _sampler()
    first = _drawn(_loader(sampler, **options), sampler, 3, saved_at)
    state, generator = sampler.state_dict(), torch.get_rng_state()
    torch.manual_seed(6)
    torch.set_rng_state(generator)
    again = _sampler(state)
    rest = _drawn(_loader(again, **options), again, 3, 1000)
    assert first + rest == whole
