"""Random augmentation that depends on (seed, epoch, sample) only: not on the worker, the rank or a
restart."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch
from torch.utils.data import Dataset


class SampleId(int):
    """An index with its epoch and seed. Everywhere else it is an int."""

    epoch: int
    seed: int

    @classmethod
    def of(cls, index: int, epoch: int, seed: int) -> SampleId:
        """Returns the index, tagged."""
        self = cls(index)
        self.epoch, self.seed = epoch, seed
        return self

    def __reduce__(self) -> Any:
        return SampleId.of, (int(self), self.epoch, self.seed)

    def random_seed(self) -> int:
        """Returns a 64-bit seed for this use of the sample."""
        text = f"{self.seed}/{self.epoch}/{int(self)}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Reproducible(Dataset[Any]):
    """Wraps a dataset: while a sample is made, the generators of Python, numpy and torch are seeded
    by (seed, epoch, sample), and restored afterwards.

    Args:
        dataset: map-style.
        sampler: the :class:`ElasticDistributedSampler` that draws from it.
    """

    def __init__(self, dataset: Any, sampler: Any) -> None:
        self.dataset = dataset
        self._seed = sampler.seed
        sampler.tagged = True

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = index if isinstance(index, SampleId) else SampleId.of(index, 0, self._seed)
        seed = sample.random_seed()
        numpy = sys.modules.get("numpy")
        before = random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy else None
        try:
            random.seed(seed)
            torch.default_generator.manual_seed(seed)
            if numpy:
                numpy.random.seed(seed % (1 << 32))
            return self.dataset[int(sample)]
        finally:
            random.setstate(before[0])
            torch.set_rng_state(before[1])
            if numpy:
                numpy.random.set_state(before[2])
