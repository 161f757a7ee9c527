"""The elastic sampler uses every sample exactly once, at high speed and in constant memory.

For many sizes and worlds, with prefetch, and through kills.
"""

from __future__ import annotations

import random
import resource
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from figures.bound import Bound


class _Numbers:
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> tuple[int, int]:
        return index.epoch, int(index)


def _epochs(rng: random.Random, workers: int) -> tuple[Counter[tuple[int, int]], int, int]:
    """Runs epochs with kills and changes of the world.

    Returns how often each (epoch, sample) was used in committed steps, the number of samples, and
    of epochs.
    """
    n, batch, epochs = rng.choice([1, 2, 5, 64, 97, 300]), rng.choice([1, 3, 8]), 3
    kills, state = rng.randrange(6), None
    used: Counter[tuple[int, int]] = Counter()
    while True:
        life = _Life(_Numbers(n), rng.randrange(1, 7), batch, workers, state)
        finished = life.run(epochs, rng.randrange(1, 30) if kills else 1 << 30, used)
        kills, state = kills - 1, life.committed
        if finished:
            return used, n, epochs


class _Life:
    """A world from its start to its end or kill: one sampler and loader per rank."""

    def __init__(self, data: _Numbers, size: int, batch: int, workers: int, state: dict[str, Any] | None) -> None:
        from torch.utils.data import DataLoader

        from everstep.data import ElasticDistributedSampler

        self.samplers = [ElasticDistributedSampler(data, seed=7, num_replicas=size, rank=r) for r in range(size)]
        for s in self.samplers:
            s.tagged = True  # the samples know their epochs
            if state is not None:
                s.load_state_dict(state)
        self.loaders = [
            DataLoader(data, batch_size=batch, sampler=s, num_workers=workers, collate_fn=list) for s in self.samplers
        ]
        self.committed = state

    def run(self, epochs: int, steps: int, used: Counter[tuple[int, int]]) -> bool:
        """Returns true if all epochs are done, or false if killed before committing its
        ``steps``-th step."""
        for epoch in range(epochs):
            for s in self.samplers:
                s.set_epoch(epoch)
            for batches in zip(*self.loaders, strict=True):
                steps -= 1
                if steps == 0:
                    return False
                states = [s.state_dict() for s in self.samplers]
                assert all(s == states[0] for s in states), "ranks disagree on the position"
                self.committed = states[0]
                used.update(sample for b in batches for sample in b)
        return True


def measure(soak: bool) -> Iterator[Bound]:
    from everstep._internal import Order
    from everstep.data import ElasticDistributedSampler

    rng, wrong, runs = random.Random(1), 0, 2000 if soak else 300
    for run in range(runs):
        used, n, epochs = _epochs(rng, 2 if run % 50 == 0 else 0)
        wrong += sum(used[(e, s)] != 1 for e in range(epochs) for s in range(n))
    yield Bound(
        "not-exactly-once",
        wrong,
        f"samples in {runs} runs over sizes, worlds of 1 to 6 ranks, prefetch and kills",
        "=",
        0,
    )
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
