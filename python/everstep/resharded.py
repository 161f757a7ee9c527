"""Checkpoints of another number of ranks, or of other parts, read as this rank would have written
them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from . import decoding, node_reader, optimizer_value
from ._internal import CheckpointError, DamagedError, Entry, Target, WholeCheckpoint, open_shard
from .blob_format import BLOB
from .layout import LAYOUT, OPTIMIZER, Layout, guessed_kind, other_kind
from .local_state import LocalState
from .sharded import Note, Part, is_partial
from .tensor_places import Place, in_module, parameter_in

#: Limit on the bytes of a tensor in an index.
BYTES_MAX = (1 << 64) - 1


class _Unread:
    """Stands for a tensor that was not read."""

    def __init__(self, name: str) -> None:
        self.name = name


def _unread(value: Any) -> set[str]:
    """Returns the names of the tensors in a value that were not read."""
    found: set[str] = set()
    # Some values occur many times.
    left, seen = [value], {id(value)}
    while left:
        value = left.pop()
        if isinstance(value, _Unread):
            found.add(value.name)
        elif isinstance(value, (Mapping, list, tuple, deque)):
            for inner in value.values() if isinstance(value, Mapping) else value:
                if id(inner) not in seen:
                    seen.add(id(inner))
                    left.append(inner)
    return found


class Resharded:
    """A checkpoint of another number of ranks, read as if this rank had written its part of it.

    Values that are each rank's own come from the rank of the same number, or of one that stands for
    it.

    Args:
        directory: of one published checkpoint.
        here: what this rank has.

    Raises:
        CheckpointError: when it cannot be read, or has no sharded state.
    """

    def __init__(self, directory: str, here: LocalState) -> None:
        self.path = directory
        self.here = here
        self.whole = WholeCheckpoint(directory)
        self.tensors = {t.name: t for t in self.whole.tensors()}
        self._layouts: dict[int, Layout | None] = {}
        size = self.whole.world_size
        # Tensors that are sharded, or that only some ranks have (pipeline stages), or that all
        # ranks have in common.
        modules = [t for t in self.tensors.values() if in_module(t.name)]
        one = any(t.in_parts for t in self.tensors.values()) or self.is_alike()
        one = one or any(t.holders < size for t in modules)
        # One process has saved the whole, of which this rank wants parts or a stage.
        one = one or (size == 1 and (bool(here.places) or here.names < {t.name for t in modules}))
        if not one:
            raise CheckpointError(
                f"{directory} was written by {size} ranks, each with its own state: run with the same number of ranks, or, "
                "if all ranks have the same state, pass replicated=True"
            )
        self._own, self._parameters = here.places, here.parameters
        #: Places of parameters of no module, by optimizer.
        self._loose: dict[str, dict[str, Place]] = {}
        for name, place in here.places.items():
            optimizer, slash, key = name.partition("/values/")
            if slash and not in_module(name):
                self._loose.setdefault(optimizer, {})[key] = place
        self.rank = here.layout.rank % size
        #: Values that are each rank's own (random numbers) are those of this rank.
        self.exact = self.rank == here.layout.rank
        divided = {name for name, place in here.places.items() if not place.is_whole}
        #: Tensors that are each rank's own, as the rank has them whose values this one gets.
        self._personal = {
            e.name: e
            for e in open_shard(directory, self.rank).entries()
            if not (e.name.startswith(BLOB) or self.tensors[e.name].in_parts or e.name in divided)
            and here.is_personal(e.name)
        }

    def _layout(self, rank: int) -> Layout | None:
        """Returns the layout of a rank's shard; ``None`` in earlier checkpoints."""
        if rank not in self._layouts:
            self._layouts[rank] = Layout.of_rank(self.whole, rank)
        return self._layouts[rank]

    def is_alike(self) -> bool:
        """Returns whether all ranks had the same state."""
        layout = self._layout(0)
        return layout is not None and layout.replicated

    def differences(self) -> list[str]:
        """Returns which of this rank's sharded tensors have another shape in the checkpoint. Its
        parts would fit into a larger one, too."""
        return [
            f"{name}: shape {list(saved.shape)} in the checkpoint, {list(place.shape)} in the model"
            for name, place in self._own.items()
            if (saved := self.tensors.get(name)) is not None and tuple(saved.shape) != place.shape
        ]

    def _place(self, name: str) -> Place:
        if name in self._own:
            return self._own[name]
        return self._as_parameter(name) or Place.whole(self.tensors[name].shape)

    def _as_parameter(self, name: str) -> Place | None:
        """Returns the place of its parameter, if a tensor of an optimizer is sharded as that is
        here."""
        optimizer = name.partition("/")[0]
        loose = self._loose.get(optimizer, {})
        owner = parameter_in(name, self._parameters) or parameter_in(name, loose)
        if owner is None:
            return None
        place = self._parameters.get(owner) or loose[owner]
        saved = self.tensors.get(owner) or self.tensors.get(f"{optimizer}/values/{owner}")
        tensor = self.tensors[name]
        # A plain tensor in the state of a sharded parameter was not sharded, whatever its shape is.
        plain = not tensor.in_parts and saved is not None and saved.in_parts
        return place if place.shape == tuple(tensor.shape) and not plain else None

    def entries(self) -> list[Entry]:
        """Describes the tensors as this rank would have them."""
        found: list[Entry] = []
        for t in self.tensors.values():
            if t.name == BLOB + LAYOUT and self._layout(self.rank) is None:
                continue
            if t.name in self._personal:
                found.append(self._personal[t.name])
                continue
            sizes = self._place(t.name).sizes
            # A shape in a damaged checkpoint may have more bytes than 64 bits can count: reading it
            # is refused.
            found.append(Entry(t.name, t.dtype, list(sizes), min(math.prod(sizes) * t.element, BYTES_MAX)))
        return found

    def bytes(self, name: str) -> bytes:
        """Returns a value that is each rank's own."""
        return self.whole.bytes(self.rank, name)

    def optimizer(self, blob: str, parameters: list[str], room: Callable[[str], Any]) -> Any:
        """Returns state and groups of an optimizer with these parameters, whichever ranks have
        saved them."""
        mark = blob.removeprefix(BLOB) + "/"
        saved = self._of_optimizer(
            self.rank, blob, decoding.decode(self.whole.bytes(self.rank, blob), lambda name: None, finish=False)
        )
        if "groups" not in saved:
            raise CheckpointError(
                f"{mark[:-1]}=: the state of this optimizer has a format of its own, which only the same number of ranks with the same "
                "sharding can restore"
            )
        if "names" not in saved:
            # In earlier checkpoints, names are without their objects.
            parameters = [n if n.startswith("param_") else n.partition(".")[2] for n in parameters]
            if len(set(parameters)) < len(parameters):
                raise CheckpointError(
                    f"{mark[:-1]}=: several modules have parameters of the same name, which this earlier checkpoint does not distinguish"
                )
        left = dict.fromkeys(parameters)

        wanted: set[str] = set()

        def mine(name: str) -> Any:
            if not name.startswith(mark):
                raise ValueError(f"the state of {mark[:-1]} has {name}")
            whole = name.startswith((mark + "groups/", mark + "other/", mark + "values/"))
            if not whole and name not in wanted and parameter_in(name, left) is None:
                return _Unread(name)
            place = None if whole else self._as_parameter(name)
            return room(name) if place is None or place.flat else Part(room(name))

        def sharded(tensor: Any, note: Note) -> Any:
            if is_partial(note):
                raise CheckpointError(
                    f"{mark[:-1]}=: a tensor in its state is a partial sum (Partial) that must be reduced over the ranks that "
                    "wrote it: run with the same number of ranks and the same sharding"
                )
            # Of another shape than its parameter: each rank has it whole.
            return Part(tensor, ([], note[1])) if isinstance(tensor, Tensor) else tensor

        def read(rank: int) -> tuple[Any, dict[str, Any]]:
            """Returns what a rank has saved, and the state of parameters that are still wanted."""
            data = self.whole.bytes(rank, blob)
            found = self._of_optimizer(rank, blob, decoding.decode(data, mine, finish=False, sharded=sharded))
            if "whole" in found:
                raise DamagedError(f"{blob} is not by names of parameters", [])
            return found, {n: s for n, s in found["state"].items() if n in left}

        value: Any = None
        groups: list[set[str]] = []
        # First the ranks with state of these parameters, beginning with this one; then all others.
        near = {parameter_in(n, left) for n in self.whole.names(self.rank) if n.startswith(mark)}
        first = {parameter_in(n, left): t.first for n, t in self.tensors.items() if n.startswith(mark)}
        known = dict.fromkeys(self.rank if n in near else first[n] for n in parameters if n in first)
        for rank in known | dict.fromkeys(range(self.whole.world_size)):
            found, state = read(rank)
            if lacking := _unread((state, found.get("other"), found["groups"])):
                # They are in an object that is shared with the state of another parameter.
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
        # Which tensors are sharded here is decided. Earlier checkpoints lack the values of sharded
        # parameters of no module.
        value["sharded"] = [n for n in parameters if "sharded" in value or not n.startswith("param_")]
        return value

    def _of_optimizer(self, rank: int, blob: str, value: Any) -> Any:
        """Checks what a rank has saved of an optimizer, and returns it.

        Raises:
            CheckpointError: when it has saved another kind of object by this name.
            DamagedError: when it is invalid.
        """
        name = blob.removeprefix(BLOB)
        layout = self._layout(rank)
        recorded = None if layout is None else layout.kinds.get(name)
        kind = recorded or guessed_kind(value, in_module=False)
        if kind != OPTIMIZER:
            raise other_kind(name, kind, OPTIMIZER)
        return optimizer_value.checked(value)

    def plan(self, names: Iterable[str]) -> tuple[int, int]:
        """Returns what reading this rank's parts of these tensors would read: (number of runs,
        bytes)."""
        return self.whole.plan([self._place(name).wanted(name) for name in names if name not in self._personal])

    def copy_to(self, targets: list[Target]) -> None:
        """Reads this rank's part of each tensor."""
        wanted = [
            self._place(t.name).wanted(t.name, t.address, t.bytes)
            for t in targets
            if t.bytes and t.name not in self._personal
        ]
        self.whole.copy_of(self.rank, [t for t in targets if t.name in self._personal])
        node_reader.read(self.whole, wanted, max((t.bytes for t in targets), default=0))
