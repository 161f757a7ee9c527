"""Every sample of an epoch is used exactly once, whatever fails, in exact global batches."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

import everstep
from everstep.data import ElasticDistributedSampler, ElasticIterable, Reproducible, SampleId, epoch_hash
from figures.sampler import _epochs


class Numbers(Dataset):
    def __init__(self, n: int = 100) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return int(index)


@pytest.mark.parametrize("seed", range(40))
def test_each_sample_once_over_kills_and_worlds(seed):
    used, n, epochs = _epochs(random.Random(seed), workers=2 if seed == 0 else 0)
    assert all(used[(e, s)] == 1 for e in range(epochs) for s in range(n))


def test_the_hash_closes_and_a_skipped_part_shows():
    sampler = ElasticDistributedSampler(Numbers(), seed=3)
    assert len(list(sampler)) == 100
    assert sampler.finished[0] == epoch_hash(100, seed=3, epoch=0)
    sampler.set_epoch(1)
    stream = iter(sampler)
    for _ in range(50):
        next(stream)
    sampler.set_epoch(2)  # the loop was left in the middle
    list(sampler)
    assert 1 not in sampler.finished and sampler.finished[2] == epoch_hash(100, seed=3, epoch=2)


def test_what_a_loader_has_fetched_ahead_does_not_count():
    sampler = ElasticDistributedSampler(Numbers(), seed=3)
    loader = DataLoader(Numbers(), batch_size=5, sampler=sampler, num_workers=2, prefetch_factor=4)
    loop = iter(loader)
    next(loop), next(loop)
    state = sampler.state_dict()
    assert state["consumed"] == 10
    again = ElasticDistributedSampler(Numbers(), seed=3)
    again.load_state_dict(state)
    assert (
        len(again) == 90
        and next(iter(DataLoader(Numbers(), batch_size=5, sampler=again))).tolist() == next(loop).tolist()
    )
    del loop


def test_a_loader_without_batches_is_counted_too():
    sampler = ElasticDistributedSampler(Numbers(), seed=3)
    loop = iter(DataLoader(Numbers(), batch_size=None, sampler=sampler, num_workers=2, prefetch_factor=4))
    next(loop), next(loop), next(loop)
    assert sampler.state_dict()["consumed"] == 3
    del loop


def test_batches_that_somebody_else_makes_are_said():
    class Pooled(BatchSampler):
        def __iter__(self):
            yield from sorted(super().__iter__())

    sampler = ElasticDistributedSampler(Numbers(), seed=3)
    with pytest.warns(UserWarning, match="Pooled chooses the samples of a batch itself"):
        next(iter(DataLoader(Numbers(), batch_sampler=Pooled(sampler, 5, False))))


def test_a_finished_epoch_yields_nothing_and_the_next_goes_on():
    sampler = ElasticDistributedSampler(Numbers(10), seed=1, num_replicas=4, rank=0)
    assert len(list(sampler)) == 3  # 12 of 10: two come from the next epoch
    sampler.set_epoch(0)
    assert len(sampler) == 0 and list(sampler) == []
    sampler.set_epoch(1)
    assert len(sampler) == 2  # 8 remain of epoch 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seed": 9}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"fingerprint": "other"}, "other"),
        ({"n": 99}, "100 samples"),
    ],
)
def test_a_state_of_something_else_is_refused(change, word):
    state = ElasticDistributedSampler(Numbers(), seed=3).state_dict()
    options = {"seed": 3, **{k: v for k, v in change.items() if k != "n"}}
    with pytest.raises(everstep.CheckpointError, match=word):
        ElasticDistributedSampler(Numbers(change.get("n", 100)), **options).load_state_dict(state)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="empty"):
        ElasticDistributedSampler(Numbers(0))
    with pytest.raises(ValueError, match="rank 2"):
        ElasticDistributedSampler(Numbers(), num_replicas=2, rank=2)
    with pytest.raises(ValueError, match="not a multiple"):
        everstep.batch_plan(30, 8)
    with pytest.raises(ValueError, match=r"9 ranks cannot share.*at most 3"):
        everstep.batch_plan(32, 4, world_size=9)


def test_plans_cover_the_global_batch():
    for world in range(1, 9):
        plans = [everstep.batch_plan(64, 8, rank=r, world_size=world) for r in range(world)]
        spans = [(p.first_sample, p.first_sample + p.micro_steps * p.micro_batch_size) for p in plans]
        assert spans[0][0] == 0 and spans[-1][1] == 64 and all(a[1] == b[0] for a, b in itertools.pairwise(spans))


def test_micro_batches_give_the_gradient_of_the_whole_batch(tmp_path):
    torch.manual_seed(0)
    data = torch.randn(64, 4)

    class Rows(Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, i: int) -> torch.Tensor:
            return data[int(i)]

    model = torch.nn.Linear(4, 1)
    sampler = ElasticDistributedSampler(Rows(), seed=5)
    loader = DataLoader(Rows(), batch_size=8, sampler=sampler)
    ckpt = everstep.CheckpointManager(tmp_path, model=model, data=sampler, persist=0)
    for step in range(4):
        model.zero_grad()
        rows = []
        for batch in ckpt.micro_batches(loader, global_batch=32, micro_batch=8):
            rows.append(batch)
            model(batch).pow(2).mean().backward()
        got = model.weight.grad.clone()
        model.zero_grad()
        model(torch.cat(rows)).pow(2).mean().backward()
        assert torch.allclose(got, model.weight.grad, rtol=1e-5) and len(rows) == 4
        assert sampler.state_dict()["consumed"] == (step + 1) * 32 % 64
    assert sampler.finished[1] == epoch_hash(64, seed=5, epoch=1)
    with pytest.raises(ValueError, match="batches of 8"):
        next(ckpt.micro_batches(loader, global_batch=32, micro_batch=4))


class Noisy(Numbers):
    def __getitem__(self, index: int) -> float:
        return random.random() + float(torch.rand(1)) + index * 10


def test_augmentation_depends_on_seed_epoch_and_sample_only():
    def made(workers: int, ranks: int) -> dict[int, float]:
        found = {}
        for rank in range(ranks):
            sampler = ElasticDistributedSampler(Numbers(20), seed=2, num_replicas=ranks, rank=rank)
            loader = DataLoader(Reproducible(Noisy(20), sampler), batch_size=1, sampler=sampler, num_workers=workers)
            found |= {int(v) // 10: float(v) for v in loader}
        return found

    assert made(0, 1) == made(0, 2)
    assert made(0, 1) == made(2, 1)
    assert SampleId.of(3, 0, 1).random_seed() != SampleId.of(3, 1, 1).random_seed()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_shared_and_resumed(workers):
    def source(epoch: int, first: int):
        return iter(range(epoch * 1000 + first, epoch * 1000 + 50))

    used, state, ranks = [], None, [2, 3, 1]
    for size in ranks:
        streams = [
            ElasticIterable(source, samples=50, batch_size=4, num_replicas=size, rank=r, num_workers=workers)
            for r in range(size)
        ]
        for s in streams:
            if state:
                s.load_state_dict(state)
        for i, batches in enumerate(zip(*streams, strict=True)):
            used += [int(x) for b in batches for x in b]
            state = streams[0].state_dict()
            if i == 1:
                break  # killed
    assert len(used) == len(set(used)) == state["epoch"] * 50 + state["consumed"]
    assert sorted(used) == list(range(len(used)))
    with pytest.raises(ValueError, match="50 was given"):
        list(ElasticIterable(lambda e, f: iter(range(f, 30)), samples=50, batch_size=4))


def test_torchdatas_stateful_loader_goes_on_with_the_next_batch():
    loader_module = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        sampler = ElasticDistributedSampler(Numbers(40), seed=8)
        return sampler, loader_module.StatefulDataLoader(Numbers(40), batch_size=4, sampler=sampler, num_workers=2)

    sampler, loader = make()
    loop = iter(loader)
    first = [next(loop).tolist() for _ in range(3)]
    state, rest = sampler.state_dict(), [b.tolist() for b in loop]
    sampler, loader = make()
    sampler.load_state_dict(state)
    again = [b.tolist() for b in loader]
    assert again == rest and sorted(n for batch in first + again for n in batch) == list(range(40))
