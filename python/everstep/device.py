"""Snapshots of state on a GPU: a copy on the device where memory allows, else straight to the slot, on a stream of its own.

The training loop's thread never waits for the device: what must be ordered is ordered between streams. (CheckFreq §4.1 for
the two ways, C2.)
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ._internal import Arena, Board
from .tensors import bytes_of

if TYPE_CHECKING:
    from .slots import Snapshot
    from .state import Item

#: A registration is made in pieces: some drivers fail on one of half a terabyte.
_REGISTER_BYTES = 64 << 30
#: How much is copied on the device before its way to the host begins.
_PART_BYTES = 64 << 20
#: Device memory that stays free beside a copy of the state.
_HEADROOM_BYTES = 1 << 30


#: Bytes of the slot, and the tensor that goes there, whatever its strides.
Pair = tuple[torch.Tensor, torch.Tensor]


def on_device(items: list[Item]) -> bool:
    """Some of the state is on a GPU."""
    return any(i.tensor.device.type == "cuda" for i in items)


def _dense_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values in the order of their indices, as a shard stores them: of a transposed or channels-last tensor a copy."""
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


class DeviceCopies:
    """Copies from the devices of one worker into its slots."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._registered: set[int] = set()
        self._sealing: threading.Thread | None = None
        self._failure: BaseException | None = None

    def capture(self, arena: Arena, snapshot: Snapshot, threads: int, board: Board | None) -> bool:
        """Starts to copy; False when every slot is in use."""
        place = arena.begin(snapshot.step, [i.entry() for i in snapshot.items], snapshot.persist, snapshot.alike())
        if place is None:
            return False
        address, size = place
        self._register(address, size)
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
        done = [self._copy(device, own) for device, own in by_device.items()]
        sealing = threading.Thread(
            target=self._seal, args=(arena, done, threads, board, pairs), name="everstep-seal", daemon=True
        )
        try:
            sealing.start()
            self._sealing = sealing
        except RuntimeError:
            # No thread can be had (pids cgroup): the loop waits.
            self._seal(arena, done, threads, board, pairs)
        return True

    @property
    def seals(self) -> bool:
        """A snapshot is on its way that :meth:`wait` must be called for."""
        return self._sealing is not None and self._sealing.is_alive()

    def _copy(self, where: torch.device, pairs: list[Pair]) -> torch.cuda.Event:
        """Starts to copy what is on one device; streams and events order nothing on another one."""
        stream = self._streams.setdefault(where, torch.cuda.Stream(where))
        training = torch.cuda.current_stream(where)
        need = sum(s.numel() * s.element_size() for _, s in pairs)
        room = torch.cuda.mem_get_info(where)[0] > need + _HEADROOM_BYTES
        for part in _parts(pairs) if room else [pairs]:
            if room:
                # On the training stream: whatever comes after it may change the state at once.
                part = [(to, source.clone(memory_format=torch.contiguous_format)) for to, source in part]
            # The first parts travel to the host while the next ones are still copied on the device.
            stream.wait_stream(training)
            with torch.cuda.stream(stream):
                for to, source in part:
                    to.copy_(_dense_bytes(source), non_blocking=True)
                    source.record_stream(stream)
        if not room:
            # Whatever writes to the state next, the optimizer or anything else, comes after the copy: on the device, nobody
            # waits here.
            training.wait_stream(stream)
        event: torch.cuda.Event = stream.record_event()
        return event

    def _seal(self, arena: Arena, done: list[torch.cuda.Event], threads: int, board: Board | None, _alive: Any) -> None:
        try:
            for event in done:
                event.synchronize()
            arena.seal(threads, board)
        except BaseException as e:  # noqa: BLE001  # told to the training loop, at its next call
            self._failure = e

    def wait(self) -> None:
        """Until the slot is sealed."""
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _register(self, address: int, size: int) -> None:
        """Pins a slot for the device: copies into it are several times faster and need no thread."""
        if address in self._registered or not size:
            return
        self._registered.add(address)
        for start in range(0, size, _REGISTER_BYTES):
            error = torch.cuda.cudart().cudaHostRegister(address + start, min(_REGISTER_BYTES, size - start), 0)
            if int(error) != 0:
                warnings.warn(
                    f"everstep: the driver does not pin checkpoint memory (error {int(error)}); snapshots will be slower",
                    stacklevel=5,
                )
                return
