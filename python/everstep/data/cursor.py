"""A position in an endless sequence of epochs, and the proof that each sample was used exactly
once."""

from __future__ import annotations

import operator
from typing import Any

from .._internal import CheckpointError, Order
from ..damage import reading

#: Hashes of finished epochs that a state keeps.
FINISHED = 16


def _hex(pair: tuple[int, int]) -> str:
    return f"{pair[0]:016x}{pair[1]:016x}"


def _pair(text: str) -> tuple[int, int]:
    return int(text[:16], 16), int(text[16:], 16)


def epoch_hash(samples: int, *, seed: int, epoch: int) -> str:
    """Returns the hash of ``epoch`` when each of ``samples`` was used exactly once (32 hex
    digits)."""
    return _hex(Order(samples, seed, epoch, True).hash_of_all())


class Cursor:
    """The number of samples committed so far, counted through all epochs.

    Args:
        samples: in one epoch; at least 1.
        fingerprint: distinguishes this dataset from another of the same length.
    """

    def __init__(self, samples: int, *, seed: int, shuffle: bool, fingerprint: str) -> None:
        if samples < 1:
            raise ValueError("the dataset is empty: there is nothing to sample")
        self.samples, self.seed, self.shuffle, self.fingerprint = samples, seed, shuffle, fingerprint
        self.at = 0
        self.hash = (0, 0)
        self.finished: dict[int, str] = {}
        self._orders: dict[int, Order] = {}

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self.at // self.samples

    def order(self, epoch: int) -> Order:
        """Returns the order of an epoch; the latest two are cached."""
        if epoch not in self._orders:
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) <= 1}
            self._orders[epoch] = Order(self.samples, self.seed, epoch, self.shuffle)
        return self._orders[epoch]

    def advance(self, to: int) -> None:
        """Commits all samples before ``to``."""
        while self.at < to:
            epoch, first = divmod(self.at, self.samples)
            last = min(self.samples, first + to - self.at)
            total, xor = self.order(epoch).hash_range(first, last)
            self.hash = ((self.hash[0] + total) % (1 << 64), self.hash[1] ^ xor)
            self.at += last - first
            if last == self.samples:
                self.finished[epoch] = _hex(self.hash)
                self.finished = dict(list(self.finished.items())[-FINISHED:])
                self.hash = (0, 0)

    def jump(self, to: int) -> None:
        """Continues at ``to``; the samples in between are not used, and the hash of that epoch will
        not match."""
        if to != self.at:
            self.at = to
            self.hash = (0, 0)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain numbers and strings, the same on all ranks."""
        return {
            "version": 1, "seed": self.seed, "shuffle": self.shuffle, "samples": self.samples, "fingerprint": self.fingerprint,
            "epoch": self.epoch, "consumed": self.at % self.samples, "hash": _hex(self.hash),
            "finished": [[e, h] for e, h in self.finished.items()],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved position.

        Raises:
            CheckpointError: the state is of another dataset, seed or order.
        """
        of_one_order = {
            "samples": "a dataset of {} samples, but this one has {}",
            "fingerprint": "the dataset {!r}, but this is {!r}",
            "seed": "seed {}, but this sampler has seed {}",
            "shuffle": "shuffle={}, but this sampler has shuffle={}",
        }
        for name, what in of_one_order.items():
            if state.get(name) != getattr(self, name):
                text = what.format(state.get(name), getattr(self, name))
                raise CheckpointError(
                    f"the sampler's state was saved with {text}; continuing would repeat or skip samples: use the same "
                    "dataset, seed and order"
                )
        with reading("the sampler's state"):
            # set_epoch() may have been given a number of numpy's.
            epoch, consumed = map(operator.index, (state["epoch"], state["consumed"]))
            if epoch < 0 or not 0 <= consumed < self.samples:
                raise ValueError("its position is not in the dataset")
            self.at = epoch * self.samples + consumed
            self.hash = _pair(state["hash"])
            self.finished = {int(e): h for e, h in state["finished"]}
