"""One step's tensors on their way into a slot of memory."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, field

from . import device
from ._internal import Arena, Board, CheckpointError, SlotLayout, TornError, bytes_per_slot, thread_trouble
from .blob_format import BLOB
from .outcome import Arrivals
from .state import Item

#: Host state up to this size is copied before ``step()`` returns: the copy is shorter than what
#: overlapping it would cost, and a kill then never loses a finished step.
OVERLAP_BYTES = 64 << 20
#: From this size on another thread begins to copy while the values beside the tensors are collected.
EARLY_BYTES = 256 << 10
#: Threads that copy; more than two gain nothing while the training threads compute.
COPY_THREADS = 2


@dataclass(frozen=True)
class Sizes:
    """Bytes that items need in a slot: their tensors, those of them that are blobs, and the index."""

    region: int
    blobs: int
    index: int

    @classmethod
    def of(cls, items: list[Item]) -> Sizes:
        """Of these items."""
        region = sum(i.tensor.numel() * i.tensor.element_size() for i in items)
        blobs = sum(i.tensor.numel() for i in items if i.name.startswith(BLOB))
        # JSON needs up to six bytes for a character that is not plain; twice that much is reserved.
        index = sum((1 if i.name.isprintable() and i.name.isascii() else 3) * len(i.name) + 160 for i in items)
        return cls(region, blobs, index)


@dataclass
class Snapshot:
    """One step's tensors, kept alive until the copy is done."""

    step: int
    items: list[Item]
    #: Why it goes to durable storage; ``None``: it does not.
    persist: int | None
    #: The next iteration computes meanwhile.
    background: bool = False
    #: ``items`` on the host, described before (see :mod:`everstep.structure`), and what comes behind them.
    layout: SlotLayout | None = None
    blobs: list[tuple[str, bytes]] = field(default_factory=list)
    #: Of ``items``, where it is known.
    sizes: Sizes | None = None
    #: Another thread copies ``items`` already (:meth:`Slots.start`).
    started: bool = False

    def host(self) -> list[Item]:
        """The items with every tensor contiguous and on the host."""
        items = []
        for item in self.items:
            t = item.tensor.detach()
            if t.device.type != "cpu" or not t.is_contiguous():
                items.append(Item(item.name, t.cpu().contiguous(), True))
            else:
                items.append(Item(item.name, t, item.eager))
        return items

    def on_device(self) -> bool:
        """Some of it is on a GPU."""
        return self.layout is None and device.on_device(self.items)

    def bytes(self) -> int:
        """Bytes of its tensors."""
        return (
            self.sizes.region
            if self.sizes is not None
            else sum(i.tensor.numel() * i.tensor.element_size() for i in self.items)
        )

    def alike(self) -> int:
        """Bytes that ranks with the same state have in common: what comes before the first item that changes outside the
        optimizer."""
        common = itertools.takewhile(lambda i: not i.eager, self.items)
        return sum(i.tensor.numel() * i.tensor.element_size() for i in common)

    def slot_bytes(self) -> int:
        """Room with slack: blobs (random state, data position) change their length."""
        sizes = self.sizes or Sizes.of(self.items)
        region, blobs, index = sizes.region, sizes.blobs, sizes.index
        if self.blobs:
            more = sum(len(b) for _, b in self.blobs)
            region, blobs, index = region + more, blobs + more, index + 200 * len(self.blobs)
        return bytes_per_slot(region + 2 * blobs + (256 << 10), 2 * (index + region // (1 << 20) * 21) + (64 << 10))


def described(items: list[Item]) -> SlotLayout:
    """Tensors on the host as the native half takes them."""
    entries = [i.entry() for i in items]
    return SlotLayout(entries, [(i.tensor.data_ptr(), e[3], i.eager) for i, e in zip(items, entries, strict=True)])


class Slots:
    """An arena and the snapshot that is being copied into it."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arena: Arena | None = None
        self.capacity = 0
        #: What is copied late is compared with what it was when the step ended.
        self.compares = True
        #: The script was seen to write to its state meanwhile.
        self.torn = False
        self._arrivals = arrivals
        self._alive: list[Item] | None = None
        self._in_flight: int | None = None
        self._device = device.DeviceCopies()

    def start(self, step: int, layout: SlotLayout, persist: int | None) -> bool:
        """Lets another thread begin to copy what is known, while the rest is collected; False when every slot is in use.
        Ends with :meth:`capture` or :meth:`cancel`."""
        return self.arena is not None and self.arena.start(step, layout, persist)

    def cancel(self) -> None:
        """Gives up what :meth:`start` has begun, if anything."""
        if self.arena is not None:
            self.arena.cancel()

    def capture(self, snapshot: Snapshot, board: Board | None) -> bool:
        """Starts to copy, or completes what :meth:`start` has begun. False when every slot is in use, or has no room for it."""
        assert self.arena is not None
        if snapshot.started:
            if begun := self.arena.finish(snapshot.blobs, board):
                self._arrivals.sealed(snapshot.step)
        elif snapshot.on_device():
            begun = self._device.capture(self.arena, snapshot, COPY_THREADS, board)
        else:
            items = snapshot.items if snapshot.layout is not None else snapshot.host()
            layout = snapshot.layout or described(items)
            self._alive = items
            begun = self.arena.capture(
                snapshot.step,
                layout,
                snapshot.blobs,
                snapshot.persist,
                COPY_THREADS,
                board,
                snapshot.background,
                self.compares,
            )
        self._in_flight = snapshot.step if begun and not snapshot.started else None
        if trouble := thread_trouble():
            warnings.warn(f"everstep: {trouble}", stacklevel=5)
        return begun

    def fence(self) -> None:
        """Before a weight update."""
        if not self._device.seals:
            self.wait()

    def wait(self) -> None:
        """Until the slot is sealed."""
        step, self._in_flight = self._in_flight, None
        if step is None or self.arena is None:
            return
        try:
            self._device.wait()
            self.arena.wait()
        except TornError as e:
            self.torn = True
            self._arrivals.failed(
                f"the snapshot of step {step} was discarded: the script wrote to its state before the snapshot was complete ({e}); "
                "from now on snapshots are complete when step() returns",
                step,
            )
        except CheckpointError as e:
            self._arrivals.failed(f"the snapshot of step {step} failed: {e}", step)
        else:
            self._arrivals.sealed(step)
        finally:
            self._alive = None
