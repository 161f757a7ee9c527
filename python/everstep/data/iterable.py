"""Streams: samples that come in an order of their own, shared by any number of ranks, each used
once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..world import world
from .cursor import Cursor

Source = Callable[[int, int], Iterable[Any]]


class _Part(IterableDataset[Any]):
    """What one rank draws in one pass; inside a loader's workers, every k-th batch of it."""

    def __init__(
        self, source: Source, start: int, rounds: int, samples: int, ranks: int, rank: int, batch: int
    ) -> None:
        self.source, self.start, self.rounds, self.samples = source, start, rounds, samples
        self.ranks, self.rank, self.batch = ranks, rank, batch

    def _stream(self) -> Iterator[Any]:
        epoch, first = divmod(self.start, self.samples)
        while True:
            count = 0
            for sample in islice(iter(self.source(epoch, first)), self.samples - first):
                count += 1
                yield sample
            if count < self.samples - first:
                raise ValueError(
                    f"the stream ended after {first + count} samples of epoch {epoch}, but samples={self.samples} was given: "
                    "pass the real number"
                )
            epoch, first = epoch + 1, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for i, sample in enumerate(islice(self._stream(), self.rank, self.rounds * self.ranks, self.ranks)):
            if i // self.batch % workers == worker:
                yield sample


class ElasticIterable:
    """Batches from a stream; iterate over it as over a loader, one pass per epoch.

    All ranks read the stream and keep their share: sample ``p`` of a round of W belongs to rank ``p
    mod W``. Passes follow each other without a gap: what the last whole round leaves comes first in
    the next one.

    Args:
        source: ``source(epoch, first)`` yields the samples of ``epoch`` from position ``first`` on,
            in the same order every time; or an ``IterableDataset`` (its beginning is skipped by
            reading).
        samples: in one epoch of the stream.
        batch_size: samples per batch and rank.
        fingerprint: distinguishes this stream from another of the same length.
        **options: for ``torch.utils.data.DataLoader`` (``num_workers``, ``prefetch_factor``,
            ``collate_fn``, …).
    """

    def __init__(
        self,
        source: Source | Iterable[Any],
        *,
        samples: int,
        batch_size: int,
        fingerprint: str = "",
        num_replicas: int | None = None,
        rank: int | None = None,
        **options: Any,
    ) -> None:
        w = world()
        self._rank = w.rank if rank is None else rank
        self._ranks = w.world_size if num_replicas is None else num_replicas
        self._source = (
            source if callable(source) and len(inspect.signature(source).parameters) == 2 else _Skipping(source)
        )
        self._batch, self._options = batch_size, options
        self._cursor = Cursor(samples, seed=0, shuffle=False, fingerprint=fingerprint)
        self._start, self._handed, self._rounds = 0, 0, 0

    @property
    def epoch(self) -> int:
        """The epoch of the next committed sample."""
        self._commit()
        return self._cursor.epoch

    @property
    def finished(self) -> dict[int, str]:
        """Hash of each finished epoch, over positions in the stream."""
        self._commit()
        return dict(self._cursor.finished)

    def __iter__(self) -> Iterator[Any]:
        self._commit()
        self._start, self._handed = self._cursor.at, 0
        # At least one round: an epoch shorter than that ends in the middle of it.
        end = (self._cursor.epoch + 1) * self._cursor.samples
        while (end - self._start) // self._ranks == 0:
            end += self._cursor.samples
        self._rounds = (end - self._start) // self._ranks
        part = _Part(
            self._source, self._start, self._rounds, self._cursor.samples, self._ranks, self._rank, self._batch
        )
        for batch in DataLoader(part, batch_size=self._batch, **self._options):
            self._handed = min(self._handed + self._batch, self._rounds)
            yield batch

    def _commit(self) -> None:
        self._cursor.advance(max(self._start + self._handed * self._ranks, self._cursor.at))

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batches handed out so far: the same on all ranks."""
        self._commit()
        return self._cursor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from there with this world's ranks.

        Raises:
            CheckpointError: the state is of another stream.
        """
        self._cursor.load_state_dict(state_dict)
        self._start, self._handed = self._cursor.at, 0


class _Skipping:
    """A stream that can only be read from its beginning."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __call__(self, epoch: int, first: int) -> Iterator[Any]:
        stream = self._stream() if callable(self._stream) else self._stream
        return islice(iter(stream), first, None)
