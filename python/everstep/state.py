"""Objects with ``state_dict``/``load_state_dict`` as named tensors and typed blobs, and back.

Names: ``OBJECT.KEY`` for a module's tensors, ``OBJECT/PATH`` for tensors inside other objects,
``__everstep__/OBJECT`` for everything else of an object (see :mod:`everstep.encoding`).
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import (
    common_state,
    encoding,
    fsdp1,
    in_place,
    module_state,
    node_reader,
    object_state,
    optimizer_restore,
    optimizer_state,
    optimizer_value,
    rng,
)
from ._internal import CheckpointError, Entry, Shard
from .batches import Resumable
from .blob_format import BLOB
from .compare import difference
from .damage import reading
from .layout import EXTRA, LAYOUT, MODULE, OPTIMIZER, OTHER, RESERVED, RNG, Layout, other_kind
from .local_state import LocalState, places_of
from .module_state import Entries
from .optimizer_state import ParameterNames, TrainedParameters
from .replicated import Statistics
from .resharded import Resharded
from .tensor_places import PARTS, Parts, Place, in_module
from .tensors import DTYPES, is_lazy, local, storable, stored_as
from .values import Values

if TYPE_CHECKING:
    from .healing import HealingShard

__all__ = ["DTYPES", "Item", "Layout", "State"]

#: The largest element: tensors of other tools begin on a multiple of theirs.
ALIGN = 8


@dataclass
class Item:
    """One tensor of a snapshot. ``eager``: it changes outside the optimizer. ``whole``: the sharded
    tensor that it is a part of, or where it belongs."""

    name: str
    tensor: Tensor
    eager: bool
    whole: Tensor | Place | None = None

    def entry(self) -> Entry:
        """Describes the tensor for the index of a shard."""
        dtype, shape = stored_as(self.tensor, self.name)
        return Entry(self.name, dtype, shape, self.tensor.numel() * self.tensor.element_size())


def _root(name: str) -> encoding.Path:
    return (None, name, False)


#: The values of a step besides objects.
_SURROUNDINGS = tuple(BLOB + name for name in (RNG, EXTRA, LAYOUT))
#: The extra values of a step that has none.
_NO_EXTRA = encoding.encode({}, _root(EXTRA))


def _uniquely_named(items: Iterable[Item]) -> list[Item]:
    """Refuses names that a shard cannot have, or has twice: it could not be read.

    Raises:
        CheckpointError: naming such a tensor.
    """
    seen: set[str] = set()
    items = list(items)
    for item in items:
        if item.name in seen:
            raise CheckpointError(
                f"two tensors of the state would both be named {item.name} in the checkpoint (for example, because of the keys "
                "1 and '1'); rename one of the keys"
            )
        seen.add(item.name)
    return items


class State:
    """The objects of a checkpoint, by the names the user gave them."""

    def __init__(self, objects: Mapping[str, Any], layout: Layout) -> None:
        self.layout = layout
        self._parts = Parts()
        #: The weights have been updated since the last complete step.
        self.updated = False
        #: The state last read from the random generators, and its encoding.
        self._drawn: tuple[dict[str, Any], bytes] | None = None
        for name, obj in objects.items():
            if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
                hint = "wrap a batch function with everstep.resumable" if callable(obj) else "it is not Stateful"
                raise TypeError(f"{name}= has no state_dict and load_state_dict: {hint}")
            if name in RESERVED or not name or name.startswith("__") or "." in name or "/" in name:
                raise CheckpointError(
                    f"{name!r} cannot be the name of an object: it is empty, is reserved, or contains a dot or a slash; use another name"
                )
        self.objects = {
            n: module_state.unwrap(o) if isinstance(o, nn.Module) else optimizer_state.unwrapped(o)
            for n, o in objects.items()
        }
        self.optimizers_by_name = {n: o for n, o in self.objects.items() if optimizer_state.is_complete(o)}
        self.optimizers = list(self.optimizers_by_name.values())
        self._modules = {n: o for n, o in self.objects.items() if isinstance(o, nn.Module)}
        self._trained: TrainedParameters | None = None
        #: How many parameters with state, and groups, each optimizer had when it was checked.
        self._checked: dict[str, tuple[int, int]] = {}
        self._statistics = Statistics(objects)
        self._kinds = {
            n: MODULE if n in self._modules else OPTIMIZER if n in self.optimizers_by_name else OTHER
            for n in self.objects
        }
        self._layout_blob = encoding.encode({**vars(layout), "kinds": self._kinds})
        # Hooks and overrides are searched for once: a snapshot needs to know only which versions to
        # save.
        self._takes_part: dict[str, bool] = {}

    def role(self) -> int:
        """Returns a number that is the same on ranks that hold the same parameters, by name,
        however these are sharded: the ranks of one pipeline stage."""
        return zlib.crc32("\n".join(sorted(set(ParameterNames(self.objects).first.values()))).encode()) or 1

    def _optimized(self) -> set[int]:
        parameters = (p for o in self.optimizers for p in optimizer_state.parameters_of(o) if not is_lazy(p))
        return {q.data_ptr() for p in parameters if not (q := local(p)).is_meta and q.data_ptr()}

    def _entries(self) -> dict[str, Entries]:
        """Reads all modules, with one ``state_dict()`` call each."""
        return {name: module_state.entries_of(name, module) for name, module in self._modules.items()}

    def module_items(self, entries: Mapping[str, Entries] | None = None) -> list[Item]:
        """Returns the tensors of all modules; those that no optimizer updates are eager."""
        optimized = self._optimized()
        items = []
        for name, found in (self._entries() if entries is None else entries).items():
            for key, (own, whole) in found.tensors.items():
                full = f"{name}.{key}"
                if not full.isascii() and full != full.encode("utf-8", "replace").decode():
                    raise CheckpointError(f"{full!a} is a tensor whose name is not valid Unicode; rename it")
                # If it has to be a copy, no optimizer updates it.
                tensor = storable(own, partial(str, full))
                items.append(Item(full, tensor, tensor is not own or own.data_ptr() not in optimized, whole))
        return items

    def collect(self, extra: Mapping[str, Any]) -> list[Item]:
        """Returns everything, as tensors in the order in which they are stored: first what the
        optimizer updates, then what changes otherwise; large elements first, so that each is
        aligned.

        From one step to the next anything may change: values, and which tensors hold them (a
        parameter that was replaced, the entries of a ``state_dict()`` that are copies, a tensor
        that has become a conjugated view).

        Raises:
            CheckpointError: naming the place of what could not be restored exactly.
        """
        entries = self._entries()
        items = self.module_items(entries)
        blobs: dict[str, bytes] = {}
        # After state_dict(): FSDP2 puts its shards back there.
        names = ParameterNames(self.objects) if self.optimizers else None
        if self._trained is None and names is not None:
            self._trained = TrainedParameters(names.first, self.optimizers_by_name)
        for name, obj in self.objects.items():
            if isinstance(obj, nn.Module):
                value = self._beside(name, obj, entries[name])
                if value is not None:
                    blobs[name] = self.encoded(value, name, items, eager=True)
            elif name not in self.optimizers_by_name:
                blobs[name] = self.encoded(self.state_of(name, obj), name, items, eager=True)
        if names is not None:
            # Last: of a parameter that no module has, it matters whether another object saves it.
            for name, optimizer in self.optimizers_by_name.items():
                blobs[name] = self.encoded_optimizer(name, optimizer, names, items)
        items = _uniquely_named(items)
        items.sort(key=lambda i: (i.eager, -i.tensor.element_size()))
        self._align(items)
        parts = self._parts.of(items)
        if parts:
            items.append(Item(PARTS, torch.frombuffer(bytearray(parts), dtype=torch.uint8), True))
        for name, blob in [*((BLOB + n, b) for n, b in blobs.items()), *self.surroundings(extra)]:
            items.append(Item(name, torch.frombuffer(bytearray(blob), dtype=torch.uint8), True))
        return items

    def surroundings(self, extra: Mapping[str, Any]) -> list[tuple[str, bytes]]:
        """Encodes what belongs to a step and to no object. Tensors among the extra values are each
        rank's own, and part of the blob."""
        encoded = encoding.encode(dict(extra), _root(EXTRA)) if extra else _NO_EXTRA
        return [*zip(_SURROUNDINGS, (self._random(), encoded, self._layout_blob), strict=True)]

    def _random(self) -> bytes:
        """Encodes the state of the random generators, again only if one of them may have
        changed."""
        state = rng.get()
        if self._drawn is None or not rng.same(state, self._drawn[0]):
            self._drawn = state, encoding.encode(state, _root(RNG))
        return self._drawn[1]

    def _beside(self, name: str, module: nn.Module, found: Entries) -> dict[str, Any] | None:
        if found.lazy:
            raise CheckpointError(
                f"{name}.{min(found.lazy)} is not initialized yet (lazy module): run one forward pass before the first step"
            )
        if name not in self._takes_part:
            self._takes_part[name] = not fsdp1.is_flat(module) and module_state.takes_part(module)
            module_state.refuse_expanded(name, module, found)
        return module_state.saved_beside(module, found, parts=self._takes_part[name])

    @staticmethod
    def state_of(name: str, obj: Any) -> Any:
        """Returns an object's state."""
        try:
            return obj.state_dict()
        except Exception as e:
            raise CheckpointError(
                f"{name}=: state_dict() of {type(obj).__module__}.{type(obj).__qualname__} failed: {type(e).__name__}: {e}"
            ) from e

    def encoded(self, value: Any, name: str, items: list[Item], *, eager: bool, sharded: bool = False) -> bytes:
        """Encodes ``value`` without its tensors, which are appended to ``items``."""

        def take(own: Tensor, whole: Tensor | None, path: encoding.Path) -> str:
            full = encoding.name_of(path)
            items.append(Item(full, own, eager, whole))
            return full

        return encoding.encode(value, _root(name), take, sharded=sharded)

    @staticmethod
    def _align(items: list[Item]) -> None:
        """Inserts padding between the two kinds of items."""
        first = next((n for n, i in enumerate(items) if i.eager), len(items))
        gap = -sum(i.tensor.numel() * i.tensor.element_size() for i in items[:first]) % ALIGN
        if gap and first < len(items):
            items.insert(first, Item(BLOB + "align", torch.zeros(gap, dtype=torch.uint8, device="cpu"), True))

    def _ranges(self) -> dict[str, Place]:
        """Returns where this rank's pieces of FSDP1's flat parameters belong, by the names of
        parameters."""
        flats = ((n, m) for n, m in self._modules.items() if fsdp1.is_flat(m))
        return {f"{n}.{key}": place for n, m in flats for key, place in fsdp1.places(m).items()}

    def encoded_optimizer(self, name: str, optimizer: Optimizer, names: ParameterNames, items: list[Item]) -> bytes:
        """Encodes optimizer state by the names of its parameters, so that it does not depend on
        their order. ``items``: what other objects save; its own tensors are appended."""
        state = self.state_of(name, optimizer)
        if not optimizer_state.is_standard(state):
            # It has a format of its own, and loads it itself.
            return self.encoded({"whole": state}, name, items, eager=True)
        first = len(items)
        order = names.of(optimizer)
        values = optimizer_state.in_no_module(optimizer, order, (i.tensor for i in items))
        value = optimizer_state.by_names(optimizer, state, order, values)
        if value["shapes"] and self._trained is not None and (lost := self._trained.lost(optimizer, names)) is not None:
            raise CheckpointError(
                f"{lost} is no longer the parameter of its module, but {name}= still holds it: a restarted process could not match "
                "its state; modify the parameter in place, pass the new one to the optimizer, or remove the old one from it"
            )
        if self._checked.get(name) != (size := (len(value["state"]), len(value["groups"]))):
            optimizer_value.require_restorable(name, value)
            self._checked[name] = size
        blob = self.encoded(value, name, items, eager=False, sharded=True)
        optimizer_state.describe(name, items[first:], value.get("sharded", ()), self._ranges())
        return blob

    # -- back ------------------------------------------------------------------------------------

    def is_more_than(self, objects: set[str]) -> bool:
        """Returns whether some object here is not among these objects of a checkpoint; False if the
        checkpoint does not name any."""
        return bool(objects) and not self.objects.keys() <= objects

    def check(self, shard: Shard | HealingShard | Resharded) -> None:
        """Checks that a checkpoint is of this model.

        Raises:
            CheckpointError: with the differences.
        """
        stored = {e.name: e for e in shard.entries()}
        lines: list[str] = []
        # Only a module's own hooks know what they do with other names, so torch's load_state_dict
        # decides.
        open_ = {n for n, m in self._modules.items() if not fsdp1.is_flat(m) and module_state.takes_part(m)}
        known: set[str] = set()
        for name, found in self._entries().items():
            known.update(f"{name}.{key}" for key in [*found.tensors, *found.lazy, *found.values])
            for key, (tensor, _) in found.tensors.items() if name not in open_ else ():
                full = f"{name}.{key}"
                if key.rpartition(".")[2] == "_extra_state" and module_state.loads_itself(self._modules[name], found):
                    # Extra state may be a tensor in one of the two only, or have another shape.
                    continue
                wrong = (
                    f"{full}: not in the checkpoint"
                    if full not in stored
                    else module_state.mismatch(
                        (stored[full].dtype, stored[full].shape), storable(tensor, partial(str, full)), full
                    )
                )
                lines += [wrong] if wrong is not None else []
        unknown = {
            n
            for n in stored
            if in_module(n)
            and n not in known
            and (owner := n.partition(".")[0]) in self._modules
            and owner not in open_
        }
        if isinstance(shard, Resharded):
            # Another rank may have tensors that this one does not (pipeline stages).
            unknown = node_reader.lacked_by_all(unknown)
            lines += shard.differences()
        lines += [f"{n}: only in the checkpoint" for n in sorted(unknown)]
        objects = {n.removeprefix(BLOB) for n in stored if n.startswith(BLOB)}
        others = self.objects.keys() - self._modules.keys()
        lines += [f"{n}=: not in the checkpoint" for n in sorted(others - objects)]
        if lines:
            shown = "\n  ".join(lines[:10]) + (f"\n  and {len(lines) - 10} more" if len(lines) > 10 else "")
            raise CheckpointError(
                "the checkpoint is of a different model; use the model that it was saved from, or another directory:\n  "
                + shown
            )

    def restore(self, shard: Shard | HealingShard | Resharded) -> dict[str, Any]:
        """Loads everything; returns the extra values saved with the step."""
        self.check(shard)
        if isinstance(shard, Resharded):
            common_state.require(shard)
        # First memory for all tensors, then one pass that fills it, then the objects load it.
        stored = Values(shard)
        own = self._check_layout(shard, stored)
        names = ParameterNames(self.objects)
        values: dict[str, Any] = {}
        extra_state: set[str] = set()
        for name, obj in self.objects.items():
            blob = BLOB + name
            # Random batches that were fetched but not used yet are each rank's own.
            if blob not in stored.entries or not (own or not isinstance(obj, Resumable)):
                continue
            if name in self.optimizers_by_name and isinstance(shard, Resharded):
                values[name] = shard.optimizer(blob, names.of(self.optimizers_by_name[name]), stored.room)
            else:
                value = stored.of_object(name, self._kinds[name])
                if name in self._modules and module_state.read_beside(value)["values"]:
                    extra_state.add(name)
        # Damage is found before anything is loaded.
        stored.of_step()
        places = None if isinstance(shard, Resharded) else stored.places((stored.layout() or self.layout).world_size)
        self._require_same_parts(places)
        loaded = self._fill_modules(shard, stored, extra_state)
        values.update(stored.finished())
        for name in self._modules:
            if name in loaded:
                module_state.load(name, self._modules[name], loaded[name], module_state.read_beside(values.get(name)))
        self._check_parameters(names)
        for name, obj in self.objects.items():
            if name not in values or name in self._modules:
                continue
            value = values[name]
            if name in self.optimizers_by_name and "groups" in value:
                optimizer_restore.restore(name, self.optimizers_by_name[name], value, names, places)
            else:
                whole = name in self.optimizers_by_name
                object_state.load(name, obj, value["whole"] if whole else value)
                if not isinstance(obj, Resumable) and stored.has_numbers(name):
                    # Decoded again: the object may have modified what it was given.
                    again = stored.value(name)
                    self._compare(name, obj, again["whole"] if whole else again)
        with reading("the state of the random generators"):
            rng.put(values[RNG])
        if not own:
            rng.diverge(self.layout.rank)
            self._statistics.report(self.layout, stored.layout())
        extra: dict[str, Any] = values[EXTRA]
        return extra

    @staticmethod
    def _compare(name: str, obj: Any, value: Any) -> None:
        """Warns if an object has changed what it was given: torch casts the state of an optimizer
        to the dtype of its parameters, also if another object loads it."""
        at = difference(value, State.state_of(name, obj), name)
        if at is not None:
            warnings.warn(
                f"everstep: {at} differs from the checkpoint after load_state_dict() of "
                f"{optimizer_state.kind_of(obj)}, which changes what it loads; "
                "pass modules and optimizers to CheckpointManager directly",
                stacklevel=6,
            )

    def _fill_modules(
        self,
        shard: Shard | HealingShard | Resharded,
        stored: Values,
        extra_state: set[str],
    ) -> dict[str, dict[str, Tensor]]:
        """Reads ``stored.targets`` and all modules. Returns the tensors of those that have to load
        them themselves, by their own keys; those with ``extra_state`` in the checkpoint do."""
        found = self._entries()
        loading = {n for n, m in self._modules.items() if n in extra_state or module_state.loads_itself(m, found[n])}
        loaded: dict[str, dict[str, Tensor]] = {n: {} for n in loading}
        for name in stored.entries:
            owner, _, key = name.partition(".")
            if owner in loading and in_module(name):
                loaded[owner][key] = stored.room(name)
        into = {f"{n}.{k}": own for n, e in found.items() if n not in loading for k, (own, _) in e.tensors.items()}
        in_place.fill(shard, into, stored)
        return loaded

    def _check_parameters(self, names: ParameterNames) -> None:
        """Refuses a module that has replaced its parameters during loading: optimizers would keep
        the unused ones."""
        now = ParameterNames(self.objects)
        before = TrainedParameters(names.first, self.optimizers_by_name)
        for optimizer in self.optimizers:
            if (lost := before.lost(optimizer, now)) is not None:
                raise CheckpointError(
                    f"{lost} was replaced when its module loaded its state (assign=True), and the optimizer still has the old parameter; "
                    "load in place, or create the optimizer after restore()"
                )

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds parts of larger tensors."""
        return bool(places_of(self.module_items()))

    def resharded(self, directory: str) -> Resharded:
        """Opens a checkpoint of other ranks, as this rank would have written it."""
        return Resharded(directory, LocalState.of(self.layout, self._kinds, self.objects, self.module_items()))

    def is_placed_otherwise(self, shard: Shard | HealingShard) -> bool:
        """Returns whether the rank of this number had other parts of the same tensors."""
        items, stored = self.module_items(), Values(shard)
        found, own = stored.places(), places_of(items)
        names = {n for n in stored.entries if in_module(n) and n.partition(".")[0] in self._modules}
        if names != {i.name for i in items}:
            # Stages may have been divided otherwise, unless nothing is divided.
            saved, here = stored.layout(), self.layout
            alike = here.world_size == 1 or (saved is not None and saved.replicated and here.replicated)
            return not alike or (saved or here).world_size != here.world_size or bool(found or own)
        return any(found.get(name) != own.get(name) for name in found.keys() | own.keys() if in_module(name))

    def _require_same_parts(self, saved: Mapping[str, Place] | None) -> None:
        """Refuses a shard with other parts of sharded tensors, which may have the same size.
        Earlier checkpoints do not record parts."""
        items = self.module_items() if saved else []
        own = places_of(items)
        wrong = next((i.name for i in items if saved and own.get(i.name) != saved.get(i.name)), None)
        if wrong is not None:
            raise CheckpointError(
                f"{wrong} is another part of its tensor in the checkpoint, or of a tensor of another shape; "
                "use the model, the ranks and the sharding that it was saved with"
            )

    def _check_layout(self, shard: Shard | HealingShard | Resharded, stored: Values) -> bool:
        """Returns True if the shard is that of this very rank.

        Raises:
            CheckpointError: when it is that of another rank and cannot replace it.
        """
        if isinstance(shard, Resharded):
            return shard.exact
        saved = stored.layout()
        if saved is None:
            return True
        others = sorted(n for n in self.objects if saved.kinds and saved.kinds.get(n) != self._kinds[n])
        if others:
            raise other_kind(others[0], saved.kinds.get(others[0]), self._kinds[others[0]])
        if (saved.rank, saved.world_size) == (self.layout.rank, self.layout.world_size):
            return True
        # One process has the state that all ranks would have.
        if (saved.replicated or saved.world_size == 1) and self.layout.replicated:
            return saved.rank == self.layout.rank
        raise CheckpointError(
            f"this shard is of rank {saved.rank} of {saved.world_size}, this is rank {self.layout.rank} of {self.layout.world_size}: "
            "run with the same number of ranks, or, if all ranks have the same state, pass the DDP module or replicated=True"
        )
