"""The elastic sampler: exactly once over sizes, worlds, prefetch and kills; speed; memory."""

from __future__ import annotations

import random
import resource
import time
from collections import Counter
from collections.abc import Iterator

from figures.bound import Bound


class _Numbers:
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return int(index)


def _epochs(rng: random.Random, workers: int) -> tuple[Counter[tuple[int, int]], int, int]:
    """Runs epochs with kills and changes of the world; returns how often each (epoch, sample) was used in
    committed steps, the number of samples, and of epochs."""
    from everstep.data import ElasticDistributedSampler, Reproducible
    from torch.utils.data import DataLoader

    n, batch, epochs = rng.choice([1, 2, 5, 64, 97, 300]), rng.choice([1, 3, 8]), 3
    kills, state = rng.randrange(6), None
    used: Counter[tuple[int, int]] = Counter()
    data = _Numbers(n)
    while True:
        size = rng.randrange(1, 7)
        samplers = [ElasticDistributedSampler(data, seed=7, num_replicas=size, rank=r) for r in range(size)]
        for s in samplers:
            Reproducible(data, s)  # tags the samples with their epochs
            if state is not None:
                s.load_state_dict(state)
        loaders = [DataLoader(data, batch_size=batch, sampler=s, num_workers=workers, collate_fn=list) for s in samplers]
        tagged = [[] for _ in samplers]
        for s, seen in zip(samplers, tagged, strict=True):
            draw = s._samples
            s._samples = lambda at, count, stride, draw=draw, seen=seen: (seen.append(x) or x for x in draw(at, count, stride))
        left = rng.randrange(1, 30) if kills else 1 << 30
        kills -= 1
        if _pass(samplers, loaders, tagged, epochs, left, used, lambda s: None) is None:
            return used, n, epochs
        state = _pass.state if _pass.state is not None else state  # type: ignore[attr-defined]


def _pass(samplers, loaders, tagged, epochs, left, used, _):  # type: ignore[no-untyped-def]
    """One life of a world; ``None`` when all epochs are done, else it was killed."""
    _pass.state = None
    taken = [0] * len(samplers)
    for epoch in range(epochs):
        for s in samplers:
            s.set_epoch(epoch)
        loops = [iter(x) for x in loaders]
        for seen in tagged:
            seen.clear()
        taken = [0] * len(samplers)
        while True:
            try:
                batches = [next(x) for x in loops]
            except StopIteration:
                break
            left -= 1
            if left == 0:
                return False  # killed before this step was committed
            _pass.state = samplers[0].state_dict()
            for rank, b in enumerate(batches):
                for value in b:
                    sample = tagged[rank][taken[rank]]
                    taken[rank] += 1
                    assert int(sample) == value
                    used[(sample.epoch, int(sample))] += 1
    return None


def measure(soak: bool) -> Iterator[Bound]:
    from everstep._internal import Order
    from everstep.data import ElasticDistributedSampler

    rng, wrong, runs = random.Random(1), 0, 2000 if soak else 300
    for run in range(runs):
        used, n, epochs = _epochs(rng, 2 if run % 50 == 0 else 0)
        wrong += sum(used[(e, s)] != 1 for e in range(epochs) for s in range(n))
    yield Bound("not-exactly-once", wrong, f"samples in {runs} runs over sizes, worlds of 1 to 6 ranks, prefetch and kills", "=", 0)
    order = Order(1 << 40, 3, 0, True)
    rates = []
    for _ in range(7):
        began = time.process_time()
        for first in range(0, 2_000_000, 4096):
            order.samples(first, 4096, 1)
        rates.append(2_000_000 / (time.process_time() - began) / 1e6)
    yield Bound("order", round(sorted(rates)[3], 1), "M samples/s per core", ">=", 5, samples=tuple(rates))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = iter(ElasticDistributedSampler(_Numbers(1 << 40), num_replicas=8, rank=3))
    for _ in range(1_000_000):
        next(stream)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    yield Bound("memory", round(grown, 1), "MiB more after a million of 10^12 samples", "<=", 4)
