"""The values in a shard that are not tensors, decoded and checked. ``restore()`` and ``everstep
ckpt verify`` both read them here, so that they accept the same checkpoints."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import decoding, module_state, optimizer_value, rng
from ._internal import CheckpointError, DamagedError, Shard
from .blob_format import BLOB
from .damage import is_out_of_memory, out_of_memory
from .layout import EXTRA, LAYOUT, MODULE, OPTIMIZER, RESERVED, RNG, Layout, guessed_kind, other_kind
from .resharded import Resharded
from .sharded import Part
from .tensor_places import PARTS, Place, in_module, parts_from_bytes, read_parts
from .tensors import BY_NAME

if TYPE_CHECKING:
    from ._internal import Entry
    from .healing import HealingShard


def objects(entries: Mapping[str, Entry]) -> set[str]:
    """Returns the names of the objects that have a value in a shard."""
    names = {n.removeprefix(BLOB) for n in entries if n.startswith(BLOB)}
    return {n for n in names - RESERVED if "/" not in n}


def check_step(names: Container[str]) -> None:
    """Checks that the values are present that every snapshot of a manager has.

    Raises:
        DamagedError: when one is missing.
    """
    if BLOB + "dcp" in names:
        raise DamagedError("the checkpoint has a table of torch.distributed.checkpoint beside other values", [])
    if missing := [n for n in (EXTRA, RNG) if BLOB + n not in names]:
        raise DamagedError(
            f"there is no {' and no '.join(missing)} in the checkpoint, which everstep always writes", []
        )


class Values:
    """The values of one shard. Tensors in them get memory (``targets``), which the caller fills."""

    def __init__(self, shard: Shard | HealingShard | Resharded) -> None:
        self._shard = shard
        self.entries: dict[str, Entry] = {e.name: e for e in shard.entries()}
        self.targets: dict[str, Tensor] = {}
        self._blobs: dict[str, bytes] = {}
        self._layout: Layout | None = None

    def room(self, name: str) -> Tensor:
        """Returns memory for a tensor of the shard.

        Raises:
            DamagedError: when the checkpoint has only a part of a tensor that is too large.
            OutOfMemory: when there is not enough memory.
        """
        if name not in self.targets:
            entry = self.entries[name]
            if entry.dtype not in BY_NAME:
                raise CheckpointError(
                    f"{name} is {entry.dtype} in the checkpoint, which this torch does not have; install a newer one"
                )
            try:
                self.targets[name] = torch.empty(entry.shape, dtype=BY_NAME[entry.dtype], device="cpu")
            except (MemoryError, RuntimeError) as e:
                if not is_out_of_memory(e):
                    raise
                if isinstance(self._shard, Resharded):
                    # The shape of a whole tensor is only claimed; its parts have been compared with
                    # the files.
                    self._shard.plan([name])
                raise out_of_memory(e) from e
        return self.targets[name]

    def _room_of(self, owner: str, name: str) -> Tensor:
        """Returns memory for a tensor that a value names.

        Raises:
            ValueError: when it is not the value's own. A module's is read into the module itself.
        """
        # A state may be one tensor.
        if name != owner and not name.startswith(f"{owner}/"):
            raise ValueError(f"{owner} has the tensor {name}")
        return self.room(name)

    def _has_module(self, name: str) -> bool:
        return any(n.startswith(f"{name}.") and in_module(n) for n in self.entries)

    def has_numbers(self, name: str) -> bool:
        """Returns whether there are floating-point tensors among the values of an object: weights,
        moments, averages."""
        return any(
            n.startswith(f"{name}/") and entry.dtype.startswith(("F", "BF", "C")) for n, entry in self.entries.items()
        )

    def layout(self) -> Layout | None:
        """Returns the rank that the shard belongs to; ``None`` if it is not recorded.

        Raises:
            DamagedError: when it is invalid.
        """
        if self._layout is not None or BLOB + LAYOUT not in self.entries:
            return self._layout
        layout = Layout.decoded(self._shard.bytes(BLOB + LAYOUT))
        # A module may have nothing beside its tensors.
        if lost := [n for n, kind in layout.kinds.items() if kind != MODULE and BLOB + n not in self.entries]:
            raise DamagedError(f"the checkpoint has no value of {lost[0]}", [])
        self._layout = layout
        return layout

    def places(self, world_size: int | None = None) -> dict[str, Place]:
        """Returns where the shard's tensors belong, by name.

        Args:
            world_size: the number of ranks that wrote the checkpoint. If it is 1, the shard must
                have the whole of each tensor.

        Raises:
            DamagedError: when it is invalid.
        """
        words = None if isinstance(self._shard, Resharded) else self._shard.places()
        if words is None:
            # A slot has them in a tensor only.
            words = parts_from_bytes(self._shard.bytes(PARTS)) if PARTS in self.entries else []
        found = read_parts(words, list(self.entries.values()))
        for name, place in found.items():
            # No other rank has the rest.
            if world_size == 1 and math.prod(place.sizes) != math.prod(place.shape):
                raise DamagedError(
                    f"the only rank's shard has {list(place.sizes)} of {name}, which is {list(place.shape)}", []
                )
        return found

    def of_object(self, name: str, own: str | None = None) -> Any:
        """Returns the value of an object.

        Args:
            name: the object.
            own: its kind here, if there is one.

        Raises:
            CheckpointError: when it was of another kind when it was saved.
            DamagedError: when it is invalid.
        """
        value = self._decoded(name)
        layout = self.layout()
        recorded = None if layout is None else layout.kinds.get(name)
        kind = recorded or guessed_kind(value, in_module=self._has_module(name))
        if own is not None and kind != own:
            # A module may have nothing but such a value, and that of another object may be any.
            if recorded is not None or own == OPTIMIZER or (own == MODULE and not isinstance(value, dict)):
                raise other_kind(name, kind, own)
            kind = own
        if kind == OPTIMIZER:
            optimizer_value.checked(value)
        elif kind == MODULE:
            module_state.checked_beside(value)
            module_state.check_dtypes(name, value, self.entries)
        return value

    def of_step(self) -> None:
        """Checks what belongs to the step and to no object.

        Raises:
            DamagedError: when it is invalid.
        """
        check_step(self.entries)
        if not isinstance(extra := self._decoded(EXTRA), dict):
            raise DamagedError(
                f"the extra values in the checkpoint are a {type(extra).__name__}, not values by name", []
            )
        rng.check(self._decoded(RNG))

    def _decoded(self, name: str) -> Any:
        self._blobs[name] = self._shard.bytes(BLOB + name)
        return decoding.decode(self._blobs[name], partial(self._room_of, name), finish=False)

    def finished(self) -> dict[str, Any]:
        """Returns all values that were decoded, now that ``targets`` are filled."""
        return {name: self.value(name) for name in self._blobs}

    def value(self, name: str) -> Any:
        """Decodes one of them again; each call returns a new object."""
        return decoding.decode(self._blobs[name], self.targets.__getitem__, sharded=Part)
