"""Snapshots of state on a GPU: a copy on the device if memory allows, else straight to the slot, on
a stream of its own.

The training loop's thread never waits for the device: what must be ordered is ordered between
streams. (CheckFreq §4.1 for the two ways, C2.)
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ._internal import Arena, Board, CheckpointError
from .tensors import bytes_of

if TYPE_CHECKING:
    from .slots import Snapshot
    from .state import Item

#: Memory is registered in pieces: some drivers fail on half a terabyte at once.
_REGISTER_BYTES = 64 << 30
#: Bytes that are copied on the device before their copy to the host begins.
_PART_BYTES = 64 << 20
#: Device memory that stays free beside a copy of the state.
_HEADROOM_BYTES = 1 << 30


#: Bytes of the slot, and the tensor that goes there, whatever its strides.
Pair = tuple[torch.Tensor, torch.Tensor]


def on_device(items: list[Item]) -> bool:
    """Returns whether some of the state is on a GPU."""
    return any(i.tensor.device.type == "cuda" for i in items)


def _dense_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values in the order of their indices, as a shard stores them: a copy of a
    transposed or channels-last tensor."""
    return bytes_of(tensor.contiguous())


def _parts(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Yields the pairs in lists of at least ``_PART_BYTES``, except for the last."""
    part: list[Pair] = []
    size = 0
    for pair in pairs:
        part.append(pair)
        size += pair[0].numel()
        if size >= _PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]


class DeviceCopies:
    """Copies from the devices of one worker into its slots."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        #: Addresses of pinned memory, and of the parts in which it was registered.
        self._registered: dict[int, list[int]] = {}
        self._sealing: threading.Thread | None = None
        self._failure: BaseException | None = None

    def capture(self, arena: Arena, snapshot: Snapshot, threads: int, board: Board | None) -> bool:
        """Starts to copy. Returns False when every slot is in use."""
        place = arena.begin(snapshot.step, [i.entry() for i in snapshot.items], snapshot.persist, snapshot.alike())
        if place is None:
            return False
        address, size = place
        # Slots of an earlier process are not pinned yet.
        self.pin([(address, size)] if size else [])
        slot = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
        pairs: list[Pair] = []
        at = 0
        for item in snapshot.items:
            source = item.tensor.detach()
            length = source.numel() * source.element_size()
            if length:
                pairs.append((slot[at : at + length], source))
            at += length
        by_device: dict[torch.device, list[Pair]] = {}
        for to, source in pairs:
            if source.device.type == "cuda":
                by_device.setdefault(source.device, []).append((to, source))
            else:
                to.copy_(_dense_bytes(source))
        try:
            done = [self._copy(device, own) for device, own in by_device.items()]
        except torch.OutOfMemoryError as e:
            # The slot is written again by the next snapshot, which copies of this one must not
            # disturb.
            for stream in self._streams.values():
                stream.synchronize()
            raise CheckpointError(
                f"the GPU has no memory left for a copy of a tensor that is not contiguous ({_first_line(e)}); "
                "leave more of it free, for example with a smaller batch"
            ) from e
        sealing = threading.Thread(
            target=self._seal, args=(arena, done, threads, board, pairs), name="everstep-seal", daemon=True
        )
        try:
            sealing.start()
            self._sealing = sealing
        except RuntimeError:
            # No thread can be started (pids cgroup): the loop waits.
            self._seal(arena, done, threads, board, pairs)
        return True

    @property
    def seals(self) -> bool:
        """Whether :meth:`wait` must be called for a snapshot in progress."""
        return self._sealing is not None and self._sealing.is_alive()

    def _copy(self, where: torch.device, pairs: list[Pair]) -> torch.cuda.Event:
        """Starts to copy what is on one device; streams and events of one device order nothing on
        another."""
        stream = self._streams.setdefault(where, torch.cuda.Stream(where))
        training = torch.cuda.current_stream(where)
        need = sum(s.numel() * s.element_size() for _, s in pairs)
        room = torch.cuda.mem_get_info(where)[0] > need + _HEADROOM_BYTES
        for part in _parts(pairs) if room else [pairs]:
            if room:
                try:
                    # On the training stream: later operations on it may change the state at once.
                    part = [(to, source.clone(memory_format=torch.contiguous_format)) for to, source in part]
                except torch.OutOfMemoryError:
                    # This process may not use all that is free (a limit), or another process has
                    # taken it. What is left is copied as if there were no room.
                    room = False
            # The first parts are copied to the host while the next ones are still copied on the
            # device.
            stream.wait_stream(training)
            with torch.cuda.stream(stream):
                for to, source in part:
                    to.copy_(_dense_bytes(source), non_blocking=True)
                    source.record_stream(stream)
        if not room:
            # Whatever writes to the state next, the optimizer or anything else, is ordered after
            # the copy on the device; this thread does not wait.
            training.wait_stream(stream)
        event: torch.cuda.Event = stream.record_event()
        return event

    def _seal(self, arena: Arena, done: list[torch.cuda.Event], threads: int, board: Board | None, _alive: Any) -> None:
        try:
            for event in done:
                event.synchronize()
            arena.seal(threads, board)
        except BaseException as e:  # noqa: BLE001  # raised in the training loop, at its next call
            self._failure = e

    def wait(self) -> None:
        """Waits until the slot is sealed."""
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def pin(self, places: list[tuple[int, int]]) -> None:
        """Pins memory (address, bytes) for devices: copies into it are several times faster and
        need no thread."""
        for address, size in places:
            if address in self._registered:
                continue
            self._registered[address] = []
            for start in range(address, address + size, _REGISTER_BYTES):
                error = torch.cuda.cudart().cudaHostRegister(start, min(_REGISTER_BYTES, address + size - start), 0)
                if int(error) != 0:
                    warnings.warn(
                        f"everstep: the driver does not pin checkpoint memory (error {int(error)}); snapshots will be slower",
                        stacklevel=5,
                    )
                    return
                self._registered[address].append(start)

    def unpin(self) -> None:
        """Unpins all memory, before other memory replaces it."""
        for start in (start for starts in self._registered.values() for start in starts):
            torch.cuda.cudart().cudaHostUnregister(start)
        self._registered = {}
