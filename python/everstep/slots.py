"""A step's tensors on their way into a slot of memory."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, field

from . import device
from ._internal import Arena, Board, CheckpointError, SlotLayout, Source, TornError, bytes_per_slot, thread_trouble
from .blob_format import BLOB
from .outcome import Arrivals
from .state import Item

#: Host state up to this size is copied before ``step()`` returns: the copy is shorter than what
#: overlapping it would cost, and a kill then never loses a finished step.
OVERLAP_BYTES = 64 << 20
#: From this size on, another thread begins to copy while the values beside the tensors are
#: collected.
EARLY_BYTES = 256 << 10
#: Threads that copy; more than two gain nothing while the training threads compute.
COPY_THREADS = 2


@dataclass(frozen=True)
class Sizes:
    """Bytes that items need in a slot: their tensors, those of them that are blobs, and the
    index."""

    region: int
    blobs: int
    index: int

    @classmethod
    def of(cls, items: list[Item]) -> Sizes:
        """Sums up the sizes of items."""
        region = sum(i.tensor.numel() * i.tensor.element_size() for i in items)
        blobs = sum(i.tensor.numel() for i in items if i.name.startswith(BLOB))
        # JSON needs up to six bytes for a character that is not plain; twice that much is reserved.
        index = sum((1 if i.name.isprintable() and i.name.isascii() else 3) * len(i.name) + 160 for i in items)
        return cls(region, blobs, index)


@dataclass
class Snapshot:
    """A step's tensors, kept alive until the copy is done."""

    step: int
    items: list[Item]
    #: Why it goes to durable storage; ``None`` if it does not.
    persist: int | None
    #: The next iteration computes during the copy.
    background: bool = False
    #: ``items`` on the host, described before (see :mod:`everstep.structure`), and the values after
    #: them.
    layout: SlotLayout | None = None
    blobs: list[tuple[str, bytes]] = field(default_factory=list)
    #: Sizes of ``items``, where they are known.
    sizes: Sizes | None = None
    #: Another thread copies ``items`` already (:meth:`Slots.start`).
    started: bool = False

    def host(self) -> list[Item]:
        """Returns the items with every tensor contiguous and on the host."""
        items = []
        for item in self.items:
            t = item.tensor.detach()
            if t.device.type != "cpu" or not t.is_contiguous():
                items.append(Item(item.name, t.cpu().contiguous(), item.eager))
            else:
                items.append(Item(item.name, t, item.eager))
        return items

    def on_device(self) -> bool:
        """Returns whether some of the state is on a GPU."""
        return self.layout is None and device.on_device(self.items)

    def bytes(self) -> int:
        """Returns the bytes of all tensors."""
        return (
            self.sizes.region
            if self.sizes is not None
            else sum(i.tensor.numel() * i.tensor.element_size() for i in self.items)
        )

    def alike(self) -> int:
        """Returns the bytes that ranks with the same state have in common: those before the first
        item that changes outside the optimizer."""
        common = itertools.takewhile(lambda i: not i.eager, self.items)
        return sum(i.tensor.numel() * i.tensor.element_size() for i in common)

    def slot_bytes(self) -> int:
        """Returns the bytes of a slot with slack: blobs (random state, data position) change their
        length."""
        sizes = self.sizes or Sizes.of(self.items)
        region, blobs, index = sizes.region, sizes.blobs, sizes.index
        if self.blobs:
            more = sum(len(b) for _, b in self.blobs)
            region, blobs, index = region + more, blobs + more, index + 200 * len(self.blobs)
        return bytes_per_slot(region + 2 * blobs + (256 << 10), 2 * (index + region // (1 << 20) * 21) + (64 << 10))


def described(items: list[Item]) -> SlotLayout:
    """Describes tensors on the host for the native half."""
    entries = [i.entry() for i in items]
    sources = [Source(i.tensor.data_ptr(), e.bytes, i.eager) for i, e in zip(items, entries, strict=True)]
    return SlotLayout(entries, sources)


class Slots:
    """An arena and the snapshot that is being copied into it."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arena: Arena | None = None
        self.capacity = 0
        #: A late copy is compared with the state at the end of the step.
        self.compares = True
        #: The script has written to its state during a copy.
        self.torn = False
        self._arrivals = arrivals
        self._alive: list[Item] | None = None
        self._in_flight: int | None = None
        self._device = device.DeviceCopies()

    def populate(self, *, pinned: bool) -> None:
        """Maps all pages of the slots, so that no capture has to; with ``pinned``, also pins them
        for devices."""
        places = self.arena.populate() if self.arena is not None else []
        if pinned:
            self._device.pin(places)

    def unpin(self) -> None:
        """Unpins the slots before others replace them."""
        self._device.unpin()

    def start(self, step: int, layout: SlotLayout, persist: int | None) -> bool:
        """Starts to copy on another thread, while the rest is collected; ends with :meth:`capture`
        or :meth:`cancel`. Returns False when every slot is in use."""
        return self.arena is not None and self.arena.start(step, layout, persist)

    def cancel(self) -> None:
        """Cancels what :meth:`start` has begun, if anything."""
        if self.arena is not None:
            self.arena.cancel()

    def capture(self, snapshot: Snapshot, board: Board | None) -> bool:
        """Starts to copy, or completes what :meth:`start` has begun. Returns False when every slot
        is in use, or has no room for it."""
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
        """Waits before a weight update."""
        if not self._device.seals:
            self.wait()

    def wait(self) -> None:
        """Waits until the slot is sealed."""
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
