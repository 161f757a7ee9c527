"""Where a rank's part of a tensor belongs in the whole, and a checkpoint of other ranks seen as this rank would have made it."""

from __future__ import annotations

import math
import sys
from array import array
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import decoding, optimizer_value, together
from ._internal import CheckpointError, DamagedError, WholeCheckpoint
from .blob_format import BLOB
from .damage import reading
from .sharded import Note, Part, is_partial

if TYPE_CHECKING:
    from ._internal import Entry
    from .state import Item

#: The tensor of a shard that says where its tensors belong (read by ``python/src/resharded.rs``).
PARTS = BLOB + "parts"


@dataclass(frozen=True)
class Place:
    """A part of a tensor: a block, or (``flat``) a range of the flattened tensor.

    ``shape`` is that of the whole, ``offsets`` where the part begins (one number for a range), ``sizes`` the shape of the part.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: bool = False

    def fits(self) -> bool:
        """The part lies within the whole."""
        if self.flat:
            return self.offsets[0] + math.prod(self.sizes) <= math.prod(self.shape)
        ends = (o + n for o, n in zip(self.offsets, self.sizes, strict=True))
        return len(self.sizes) == len(self.shape) and all(
            end <= all_ for end, all_ in zip(ends, self.shape, strict=True)
        )


def parameter_in(name: str, known: Container[str]) -> str | None:
    """Which of the ``known`` parameters an optimizer's tensor belongs to: ``OPTIMIZER/state/PARAMETER/KEY``, with a key of several
    parts inside of containers (earlier: ``OPTIMIZER/PARAMETER/KEY``). Names of parameters may have slashes, too."""
    owner = name.partition("/")[2].removeprefix("state/")
    while owner := owner.rpartition("/")[0]:
        if owner in known:
            return owner
    return None


class _Unread:
    """Stands for a tensor that was not read."""

    def __init__(self, name: str) -> None:
        self.name = name


def _unread(value: Any) -> Iterator[str]:
    """Names of the tensors in a value that were not read."""
    if isinstance(value, _Unread):
        yield value.name
    elif isinstance(value, (Mapping, list, tuple, deque)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _unread(inner)


def in_module(name: str) -> bool:
    """The name is of a module's tensor, ``OBJECT.KEY``. Keys may have slashes, objects have neither those nor dots."""
    at = name.find(".")
    return at > 0 and "/" not in name[:at]


def place_of(tensor: Tensor | Place) -> Place | None:
    """Where the local part of a sharded tensor belongs (torch.distributed.tensor); ``None`` for any other."""
    if isinstance(tensor, Place):
        return tensor
    if getattr(tensor, "_local_tensor", None) is None:
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    return Place(tuple(tensor.shape), tuple(offsets), tuple(sizes))


class Parts:
    """Says where the tensors of a snapshot belong; worked out again only when they are others."""

    def __init__(self) -> None:
        self._of: list[tuple[str, int]] = []
        self._table = b""

    def of(self, items: list[Item]) -> bytes:
        """The table for these items, which are in the order of the shard. Empty without sharded tensors.

        Little-endian 64-bit numbers: for each sharded one its number, 1 for a range and 0 for a block, the number of dimensions of
        the whole, its shape, offsets.
        """
        own = [(i.name, i.tensor.numel()) for i in items]
        if own != self._of:
            words = array("Q")
            for n, item in enumerate(_in_file(items)):
                place = None if item.whole is None else place_of(item.whole)
                if place is not None:
                    words.extend((n, place.flat, len(place.shape), *place.shape, *place.offsets))
            if sys.byteorder == "big":
                words.byteswap()
            self._table, self._of = words.tobytes(), own
        return self._table


def _in_file(items: list[Item]) -> list[Item]:
    """In the order in which a shard's header is read: by place, and where empty ones lie at one place, by name."""
    at, placed = 0, []
    for item in items:
        end = at + item.tensor.numel() * item.tensor.element_size()
        placed.append((at, end, item.name, item))
        at = end
    return [item for *_, item in sorted(placed, key=lambda p: p[:3])]


def parts_from_bytes(table: bytes) -> list[int]:
    """The numbers that :meth:`Parts.of` has written."""
    with reading("the table of where tensors belong"):
        words = array("Q", table)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tolist()


def read_parts(words: list[int], entries: list[Entry]) -> dict[str, Place]:
    """What :meth:`Parts.of` says, by the names of the shard's tensors."""
    found: dict[str, Place] = {}
    at, last = 0, -1
    with reading("the table of where tensors belong"):
        while at < len(words):
            number, flat, dimensions = words[at : at + 3]
            shape = at + 3 + dimensions
            end = shape + (1 if flat else dimensions)
            if flat > 1 or number <= last or end > len(words):
                raise ValueError("it contradicts itself")
            name, _, sizes, _ = entries[number]
            place = Place(tuple(words[at + 3 : shape]), tuple(words[shape:end]), tuple(sizes), bool(flat))
            if not place.fits():
                raise ValueError(f"{name} lies outside of the whole")
            found[name] = place
            at, last = end, number
    return found


class Resharded:
    """A checkpoint that was written by another number of ranks, as if this rank had written its part of it.

    Args:
        directory: of one published checkpoint.
        rank: this one. Values that are each rank's own come from the rank of the same number, or of one that stands for it.
        own: where this rank's tensors belong, by name.
        parameters: where its parameters belong, by the names that optimizers' state goes by.
        names: those of its modules' tensors.

    Raises:
        CheckpointError: when it cannot be read, or holds no sharded state.
    """

    def __init__(
        self, directory: str, rank: int, own: Mapping[str, Place], parameters: Mapping[str, Place], names: set[str]
    ) -> None:
        self.path = directory
        self._whole = WholeCheckpoint(directory)
        self._tensors = {t[0]: t for t in self._whole.tensors()}
        size = self._whole.world_size
        # Sharded tensors, such as only some ranks have (pipeline stages), or such as all have alike.
        modules = [t for t in self._tensors.values() if in_module(t[0])]
        one = any(in_parts for *_, in_parts, _, _ in self._tensors.values()) or self._alike()
        one = one or any(holders < size for *_, holders, _ in modules)
        # What one process has saved is the whole of which this rank wants parts or a stage.
        one = one or (size == 1 and (bool(own) or names < {t[0] for t in modules}))
        if not one:
            raise CheckpointError(
                f"{directory} was written by {size} ranks, each with a state of its own: run with as many, or, "
                "if all ranks hold the same, pass replicated=True"
            )
        self._own, self._parameters = own, parameters
        #: Places of parameters of no module, by optimizer.
        self._loose: dict[str, dict[str, Place]] = {}
        for name, place in own.items():
            optimizer, slash, key = name.partition("/values/")
            if slash and not in_module(name):
                self._loose.setdefault(optimizer, {})[key] = place
        self.rank = rank % self._whole.world_size
        #: What is each rank's own (random numbers) is this very rank's.
        self.exact = self.rank == rank

    def _alike(self) -> bool:
        layout = BLOB + "layout"
        if layout not in self._tensors:
            return False
        with reading("the layout of the checkpoint"):
            return bool(decoding.decode(self._whole.bytes(0, layout), lambda name: None).get("replicated"))

    def _place(self, name: str) -> Place:
        shape = self._tensors[name][2]
        whole = Place(tuple(shape), (0,) * len(shape), tuple(shape))
        if name in self._own:
            return self._own[name]
        return self._as_parameter(name) or whole

    def _as_parameter(self, name: str) -> Place | None:
        """The place of its parameter, where a tensor of an optimizer is sharded as that is here."""
        optimizer = name.partition("/")[0]
        loose = self._loose.get(optimizer, {})
        owner = parameter_in(name, self._parameters) or parameter_in(name, loose)
        if owner is None:
            return None
        place = self._parameters.get(owner) or loose[owner]
        saved = self._tensors.get(owner) or self._tensors.get(f"{optimizer}/values/{owner}")
        _, _, shape, _, in_parts, *_ = self._tensors[name]
        # A plain tensor in the state of a sharded parameter was not sharded, whatever its shape is.
        plain = not in_parts and saved is not None and saved[4]
        return place if place.shape == tuple(shape) and not plain else None

    def entries(self) -> list[Entry]:
        """Names, dtypes, shapes and lengths as this rank would have them."""
        found: list[Entry] = []
        for name, dtype, _, element, *_ in self._tensors.values():
            sizes = self._place(name).sizes
            elements = 1
            for n in sizes:
                elements *= n
            found.append((name, dtype, list(sizes), elements * element))
        return found

    def bytes(self, name: str) -> bytes:
        """A value that is each rank's own."""
        return self._whole.bytes(self.rank, name)

    def optimizer(self, blob: str, parameters: list[str], room: Callable[[str], Any]) -> Any:
        """State and groups of an optimizer with these parameters, whichever ranks have saved them."""
        mark = blob.removeprefix(BLOB) + "/"
        saved = optimizer_value.checked(
            decoding.decode(self._whole.bytes(self.rank, blob), lambda name: None, finish=False)
        )
        if "groups" not in saved:
            raise CheckpointError(
                f"{mark[:-1]}=: the state of this optimizer is of a format of its own, which only as many ranks as wrote it can restore"
            )
        if "names" not in saved:
            # Earlier checkpoints: names without their objects.
            parameters = [n if n.startswith("param_") else n.partition(".")[2] for n in parameters]
            if len(set(parameters)) < len(parameters):
                raise CheckpointError(
                    f"{mark[:-1]}=: several modules have parameters of one name, which this earlier checkpoint does not tell apart"
                )
        left = dict.fromkeys(parameters)

        wanted: set[str] = set()

        def mine(name: str) -> Any:
            whole = name.startswith((mark + "groups/", mark + "other/", mark + "values/"))
            if not whole and name not in wanted and parameter_in(name, left) is None:
                return _Unread(name)
            place = None if whole else self._as_parameter(name)
            return room(name) if place is None or place.flat else Part(room(name))

        def sharded(tensor: Any, note: Note) -> Any:
            if is_partial(note):
                raise CheckpointError(
                    f"{mark[:-1]}=: a tensor of its state has to be summed over the ranks that wrote it (Partial): run with as many, "
                    "sharded as they were"
                )
            # Of another shape than its parameter: each rank has it whole.
            return Part(tensor, ([], note[1])) if isinstance(tensor, Tensor) else tensor

        def read(rank: int) -> tuple[Any, dict[str, Any]]:
            """What a rank has saved, and the state of parameters that are still wanted."""
            data = self._whole.bytes(rank, blob)
            found = optimizer_value.checked(decoding.decode(data, mine, finish=False, sharded=sharded))
            if "whole" in found:
                raise DamagedError(f"{blob} is not by names of parameters", [])
            return found, {n: s for n, s in found["state"].items() if n in left}

        value: Any = None
        groups: list[set[str]] = []
        # Ranks whose shards have state of these parameters, this one first; then all others.
        near = {parameter_in(n, left) for n in self._whole.names(self.rank) if n.startswith(mark)}
        first = {parameter_in(n, left): rank for n, *_, rank in self._tensors.values() if n.startswith(mark)}
        known = dict.fromkeys(self.rank if n in near else first[n] for n in parameters if n in first)
        for rank in known | dict.fromkeys(range(self._whole.world_size)):
            found, state = read(rank)
            if lacking := {*_unread((state, found.get("other"), found["groups"]))}:
                # In an object that they share with the state of another parameter.
                wanted |= lacking
                found, state = read(rank)
            if value is None:
                value = {**found, "state": {}}
                groups = [set() for _ in found["groups"]]
            value["state"].update(state)
            for names, group in zip(groups, found["groups"], strict=False):
                names.update(n for n in group["params"] if n in parameters)
            for name in state:
                del left[name]
            if not left:
                break
        for names, group in zip(groups, value["groups"], strict=True):
            # Labels are in the order of the ranks that wrote them.
            group.pop("param_names", None)
            group["params"] = sorted(names)
        value["shapes"] = {}
        # Which tensors are sharded here is decided. Earlier checkpoints lack the values of sharded parameters of no module.
        value["sharded"] = [n for n in parameters if "sharded" in value or not n.startswith("param_")]
        return value

    def plan(self, names: Iterable[str]) -> tuple[int, int]:
        """What reading this rank's parts of these tensors would read: (number of runs, bytes)."""
        places = ((name, self._place(name)) for name in names)
        return self._whole.plan([(n, list(p.offsets), list(p.sizes), p.flat, 0, 0) for n, p in places])

    def copy_to(self, targets: list[tuple[str, int, int]]) -> None:
        """Reads what this rank holds of each tensor, to (name, address, bytes)."""
        wanted = [
            (n, list(p.offsets), list(p.sizes), p.flat, at, size)
            for n, at, size in targets
            if size
            for p in [self._place(n)]
        ]
        together.read(self._whole, wanted, max((size for *_, size in targets), default=0))
