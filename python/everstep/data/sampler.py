"""A sampler for any number of ranks: one global cursor, moved by committed steps."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..batch_shares import BatchPlan
from ..world import world
from .augment import SampleId
from .cursor import Cursor

#: Positions computed at a time.
CHUNK = 4096


class ElasticDistributedSampler(Sampler[int]):
    """Yields every sample of an epoch exactly once, even if the number of ranks changes.

    Use it in place of ``DistributedSampler``, give it to :class:`everstep.CheckpointManager`
    (``data=sampler``), and loop ``for epoch in range(n): sampler.set_epoch(epoch); for batch in
    loader``: finished epochs yield nothing, the one in progress continues. Step ``k`` of a world of
    W ranks with B samples each takes the next W·B positions; the end of an epoch is neither padded
    nor dropped; the remainder is carried over into the next epoch.

    Args:
        dataset: anything with a length.
        shuffle: False keeps the dataset's order.
        seed: the same on all ranks.
        drop_last: a last round that not every rank can take part in is left to the next epoch; else
            it is filled up from there.
        num_replicas, rank: default to this worker's world.
        fingerprint: distinguishes this dataset from another of the same length.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        fingerprint: str = "",
    ) -> None:
        _count_batches()
        w = world()
        self.rank = w.rank if rank is None else rank
        self.num_replicas = w.world_size if num_replicas is None else num_replicas
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(
                f"rank {self.rank} is not one of {self.num_replicas} ranks: give rank from 0 to {self.num_replicas - 1}"
            )
        self.seed, self.drop_last = seed, drop_last
        #: Yield :class:`SampleId` instead of int (see :class:`Reproducible`).
        self.tagged = False
        self._cursor = Cursor(len(dataset), seed=seed, shuffle=shuffle, fingerprint=fingerprint)
        self._loop_epoch: int | None = None
        #: The loop that was last given a batch. Its ``life`` is that of the sampler: loops that
        #: began before another epoch or a state was set count no more.
        self.current: _Pass | None = None
        self.life = 0
        #: Samples that a step of all ranks takes; 0 before the first one.
        self._round = 0
        #: A state was loaded, and no loop has begun since then that has samples left.
        self._resumed = False
        #: That state was saved in the middle of a loop.
        self._inside = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The loaders of a process that unpickles the sampler have to count, too.
        _count_batches()
        self.__dict__.update(state)

    # -- epochs -----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next committed sample."""
        self._begin()
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next loop over the loader. A finished epoch will yield nothing."""
        self._begin()
        self._forget()
        behind = epoch * self._cursor.samples - self._cursor.at
        # A remainder of up to one round flows into the next epoch; more means that the loop was
        # left early.
        if behind > self._round:
            self._cursor.jump(epoch * self._cursor.samples)
            self._inside = False
        self._loop_epoch = epoch

    def _end(self) -> int:
        """Returns where the loop's epoch ends, counted through all epochs."""
        epoch = self._cursor.epoch if self._loop_epoch is None else self._loop_epoch
        return (epoch + 1) * self._cursor.samples

    def __len__(self) -> int:
        """Returns the number of samples that this rank will yield in the next loop."""
        self._begin()
        left = max(self._end() - self._cursor.at, 0)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    # -- iteration --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        self._begin()
        if self._plan is not None:
            self._forget()
            return self._planned(self._plan, self._cursor.at)
        self.current = _Pass(self, self._cursor.at, len(self))
        self.current.find_loader(sys._getframe(1), self)
        # A loop without samples leaves no remainder: one of an earlier loop is still to be used.
        if self.current.length:
            self._round = self.num_replicas * max(self.current.batch, 1)
        return self._strided(self.current)

    def _strided(self, this: _Pass) -> Iterator[int]:
        first = this.start + self.rank
        for chunk in range(0, this.length, CHUNK):
            count = min(CHUNK, this.length - chunk)
            for sample in self._samples(first + chunk * self.num_replicas, count, self.num_replicas):
                this.drawn += 1
                yield sample

    def _samples(self, at: int, count: int, stride: int) -> Iterator[int]:
        """Yields samples at global positions, across the ends of epochs."""
        n = self._cursor.samples
        while count > 0:
            epoch, first = divmod(at, n)
            here = min(count, -(-(n - first) // stride))
            samples = self._cursor.order(epoch).samples(first, here, stride)
            yield from (SampleId.of(s, epoch, self.seed) for s in samples) if self.tagged else samples
            at += here * stride
            count -= here

    def loop_had_begun(self, persistent: bool) -> bool:
        """Returns whether the loop that a data loader begins now had begun before the state was
        saved from which this sampler continues. Called once per loop.

        Args:
            persistent: the loader has persistent workers, and begins only once for all loops.
        """
        if not self._resumed or self._plan is not None:
            return False
        if not len(self):
            return True  # of an epoch that is finished
        self._resumed = False
        return self._inside or (persistent and self._cursor.at > 0)

    # -- by plan (CheckpointManager.micro_batches) ------------------------------------------------

    _plan: BatchPlan | None = None

    def follow(self, plan: BatchPlan) -> None:
        """Yields this rank's part of each global batch from the next loop on, endlessly."""
        self._commit()
        self._forget()
        self._plan, self._round = plan, plan.global_batch_size

    def _planned(self, plan: BatchPlan, at: int) -> Iterator[int]:
        own = plan.micro_steps * plan.micro_batch_size
        while True:
            yield from self._samples(at + plan.first_sample, own, 1)
            at += plan.global_batch_size

    def advance(self, samples: int) -> None:
        """Records that a step has used the next ``samples`` of all ranks together."""
        self._cursor.advance(self._cursor.at + samples)

    # -- state ------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Counts batches that loops have been given as used; those that were only fetched do not
        count."""
        if self.current is not None:
            self.current.committed = self.current.handed
            self._cursor.advance(self.current.position())

    def _forget(self) -> None:
        self.current, self.life = None, self.life + 1

    def _begin(self) -> None:
        """Counts what earlier loops have used, before the next one. A single batch that was only
        looked at (``next(iter(loader))``) stays in the epoch, as with torch's own sampler, unless a
        state was asked for meanwhile."""
        if self.current is not None and not self.current.is_look():
            self._commit()

    @property
    def finished(self) -> dict[int, str]:
        """Hash of each finished epoch; equals :func:`epoch_hash` when every sample was used exactly
        once."""
        self._begin()
        return dict(self._cursor.finished)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batches handed out so far: the same on all ranks."""
        self._commit()
        inside = self.current is not None and self.current.has_more()
        # With the round, set_epoch decides after a restart as it would have without one.
        return {**self._cursor.state_dict(), "round": self._round, "inside": inside}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from there with this world's ranks.

        Raises:
            CheckpointError: the state is of another dataset, seed or order.
        """
        self._forget()
        self._cursor.load_state_dict(state_dict)
        # A state without the round is of an earlier version: up to a whole epoch is used then, not
        # skipped.
        self._round = state_dict.get("round", self._cursor.samples)
        self._resumed, self._inside = True, state_dict.get("inside", False)


def _cannot_count(kind: str) -> None:
    warnings.warn(
        f"everstep: {kind} chooses the samples of a batch itself, so ElasticDistributedSampler cannot tell which ones "
        "the loop received: after a restart, some may be skipped or repeated; use torch's BatchSampler (batch_size=), "
        "or omit the sampler and save your own position",
        stacklevel=6,
    )


def _batch_of(index: Any, sampler: Sampler[int]) -> int:
    """Returns the samples that a data loader without a batch sampler of torch's hands out at a
    time."""
    if index is sampler:
        return 1
    _cannot_count(type(index).__name__)
    size = getattr(index, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else 1


@functools.cache
def _count_batches() -> None:
    """Counts the batches that torch's data loaders return, for passes that are registered. Also
    keeps loops that are resumed from drawing random numbers a second time.

    A loader draws ahead, and only its iterator knows which batches the loop was given. Its own
    count (``_num_yielded``) is lost too early: with the iterator when a loop ends, or with
    ``persistent_workers`` when the next loop begins. ``__next__`` is replaced in the class because
    a pass may begin inside the first call.
    """
    base: Any = _BaseDataLoaderIter
    begin, inner = base.__init__, base.__next__

    @functools.wraps(begin)
    def begin_loop(iterator: Any, loader: Any) -> None:
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        ours = isinstance(sampler, ElasticDistributedSampler)
        # The loader draws a seed for its workers from the generator that the model uses, too. A
        # state that was saved inside the loop was saved after that.
        with torch.random.fork_rng(devices=[], enabled=ours and sampler.loop_had_begun(loader.persistent_workers)):
            begin(iterator, loader)

    def next_batch(iterator: Any) -> Any:
        try:
            batch = inner(iterator)
        except StopIteration:
            for one in vars(iterator).get(_PASSES, ()):
                one.ended = True
            raise
        for one in vars(iterator).get(_PASSES, ()):
            one.hand_out()
        return batch

    base.__init__, base.__next__ = begin_loop, next_batch


#: The attribute of a loader's iterator with the passes that feed it.
_PASSES = "_everstep_passes"


class _Pass:
    """One loop: where it began, and how much of it was handed out."""

    def __init__(self, sampler: ElasticDistributedSampler, start: int, length: int) -> None:
        self._sampler, self.life = weakref.ref(sampler), sampler.life
        self.start, self.length, self._ranks = start, length, sampler.num_replicas
        #: Samples per batch, and batches handed out; samples drawn, if no loader makes batches.
        self.batch, self.handed, self.drawn = 0, 0, 0
        self._loader = False
        #: The loop had everything. Batches that are part of a state that was asked for.
        self.ended, self.committed = False, 0

    def find_loader(self, frame: Any, sampler: Sampler[int]) -> None:
        """Finds the data loader that iterates, if any, and counts the batches that it hands out
        from now on."""
        for _ in range(12):
            if frame is None:
                return
            owner = frame.f_locals.get("self")
            if isinstance(owner, BatchSampler):
                self.batch = owner.batch_size
                if type(owner).__iter__ is not BatchSampler.__iter__:
                    _cannot_count(type(owner).__name__)
            elif isinstance(owner, _BaseDataLoaderIter):
                if not self.batch:
                    self.batch = _batch_of(getattr(owner, "_index_sampler", None), sampler)
                self._loader = True
                # With persistent workers, the iterator is that of an earlier pass, too.
                others = [p for p in vars(owner).get(_PASSES, ()) if p._sampler() is not sampler]
                vars(owner)[_PASSES] = weakref.WeakSet([*others, self])
                return
            frame = frame.f_back

    def hand_out(self) -> None:
        """Counts a batch. A loop goes on after another one over the same sampler has begun."""
        self.handed += 1
        sampler = self._sampler()
        if sampler is not None and sampler.life == self.life:
            sampler.current = self

    def is_look(self) -> bool:
        """Returns whether this may have been a look at the first batch only."""
        more = self.ended or self.committed or self.batch >= self.length
        return self._loader and self.handed == 1 and not more

    def _used(self) -> int:
        return min(self.handed * self.batch, self.length) if self._loader else self.drawn

    def has_more(self) -> bool:
        """Returns whether the loop has begun and not yet been given all samples."""
        return 0 < self._used() < self.length

    def position(self) -> int:
        """Returns the number of global samples committed."""
        return self.start + self._used() * self._ranks
