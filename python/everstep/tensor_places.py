"""Where a rank's part of a tensor belongs in the whole: blocks and ranges, and the table of them in a
shard."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ._internal import CheckpointError, Entry, WantedPart
from .blob_format import BLOB
from .damage import reading

if TYPE_CHECKING:
    from .state import Item

#: The tensor of a shard that contains where its tensors belong (read by
#: ``python/src/resharded.rs``).
PARTS = BLOB + "parts"
#: Characters that are copied to look for a parameter in a name, before the names of the parameters
#: are looked through for the longest one. Names of a checkpoint are as long as it says.
_COPIED_MAX = 1 << 20


@dataclass(frozen=True)
class Place:
    """A part of a tensor: a block, or (``flat``) a range of the flattened tensor.

    ``shape`` is that of the whole, ``offsets`` where the part begins (one number for a range),
    ``sizes`` the shape of the part.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: bool = False

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Place:
        """Returns the place of a whole tensor."""
        sizes = tuple(shape)
        return cls(sizes, (0,) * len(sizes), sizes)

    def wanted(self, name: str, address: int = 0, room: int = 0) -> WantedPart:
        """Returns this part of a tensor as a reader of the whole takes it, with the memory for it
        (``room`` bytes at ``address``)."""
        sizes = [math.prod(self.sizes)] if self.flat else list(self.sizes)
        return WantedPart(name, list(self.offsets), sizes, self.flat, address, room)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor, in its own shape."""
        return self.sizes == self.shape and not self.flat

    def fits(self) -> bool:
        """Returns whether the part lies within the whole."""
        if self.flat:
            return self.offsets[0] + math.prod(self.sizes) <= math.prod(self.shape)
        ends = (o + n for o, n in zip(self.offsets, self.sizes, strict=True))
        return len(self.sizes) == len(self.shape) and all(
            end <= all_ for end, all_ in zip(ends, self.shape, strict=True)
        )


def parameter_in(name: str, known: Collection[str]) -> str | None:
    """Returns which of the ``known`` parameters an optimizer's tensor belongs to:
    ``OPTIMIZER/state/PARAMETER/KEY``, with a key of several parts inside of containers (earlier:
    ``OPTIMIZER/PARAMETER/KEY``). Names of parameters may contain slashes, too."""
    owner = name.partition("/")[2].removeprefix("state/")
    if len(owner) * owner.count("/") > _COPIED_MAX:
        owner = owner[: max(map(len, known), default=0) + 1]
    while owner := owner.rpartition("/")[0]:
        if owner in known:
            return owner
    return None


def in_module(name: str) -> bool:
    """Returns whether the name is that of a module's tensor, ``OBJECT.KEY``. Keys may contain
    slashes; objects contain neither slashes nor dots."""
    at = name.find(".")
    return at > 0 and "/" not in name[:at]


def place_of(tensor: Tensor | Place) -> Place | None:
    """Returns where the local part of a sharded tensor belongs (torch.distributed.tensor); ``None``
    for any other."""
    if isinstance(tensor, Place):
        return tensor
    if getattr(tensor, "_local_tensor", None) is None:
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    return Place(tuple(tensor.shape), tuple(offsets), tuple(sizes))


def _described(whole: Tensor | Place | None) -> Any:
    """Returns what differs once a sharded tensor is another part, without computing which one. Of a
    DTensor it is the same object as long as nothing changes."""
    return whole if whole is None or isinstance(whole, Place) else getattr(whole, "_spec", None)


class Parts:
    """Builds the table of where the tensors of a snapshot belong, again only when they have
    changed."""

    def __init__(self) -> None:
        self._of: list[tuple[str, int, Any]] = []
        self._table = b""

    def of(self, items: list[Item]) -> bytes:
        """Returns the table for these items, which are in the order of the shard. Empty without
        sharded tensors.

        It consists of little-endian 64-bit numbers, for each sharded tensor: its index, 1 for a
        range and 0 for a block, the number of dimensions of the whole, its shape, and the offsets.
        """
        own = [(i.name, i.tensor.numel(), _described(i.whole)) for i in items]
        if own != self._of:
            words = array("Q")
            for n, item in enumerate(_in_file(items)):
                place = None if item.whole is None else place_of(item.whole)
                if place is not None and len(item.entry().shape) != len(place.sizes):
                    raise CheckpointError(
                        f"{item.name} is a sharded tensor of {item.tensor.dtype}, of which a checkpoint cannot have parts; "
                        "use complex64, or keep the real and imaginary parts (torch.view_as_real)"
                    )
                if place is not None:
                    words.extend((n, place.flat, len(place.shape), *place.shape, *place.offsets))
            if sys.byteorder == "big":
                words.byteswap()
            self._table, self._of = words.tobytes(), own
        return self._table


def _in_file(items: list[Item]) -> list[Item]:
    """Returns the items in the order in which a shard's header is read: by offset, and empty ones
    at the same offset by name."""
    at, placed = 0, []
    for item in items:
        end = at + item.tensor.numel() * item.tensor.element_size()
        placed.append((at, end, item.name, item))
        at = end
    return [item for *_, item in sorted(placed, key=lambda p: p[:3])]


def parts_from_bytes(table: bytes) -> list[int]:
    """Returns the numbers that :meth:`Parts.of` has written."""
    with reading("the table of where tensors belong"):
        words = array("Q", table)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tolist()


def read_parts(words: list[int], entries: list[Entry]) -> dict[str, Place]:
    """Returns the places in a table of :meth:`Parts.of`, by the names of the shard's tensors."""
    found: dict[str, Place] = {}
    at, last = 0, -1
    with reading("the table of where tensors belong"):
        while at < len(words):
            number, flat, dimensions = words[at : at + 3]
            shape = at + 3 + dimensions
            end = shape + (1 if flat else dimensions)
            if flat > 1 or number <= last or end > len(words):
                raise ValueError("it contradicts itself")
            entry = entries[number]
            place = Place(tuple(words[at + 3 : shape]), tuple(words[shape:end]), tuple(entry.shape), bool(flat))
            if not place.fits():
                raise ValueError(f"{entry.name} lies outside of the whole")
            found[entry.name] = place
            at, last = end, number
    return found
