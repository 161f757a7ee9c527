"""Objects with ``state_dict``/``load_state_dict`` as named tensors and typed blobs, and back.

Names: ``OBJECT.KEY`` for a module's tensors, ``OBJECT/PATH`` for tensors inside other objects,
``__everstep__/OBJECT`` for everything else of an object (see :mod:`everstep.encoding`).
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import encoding, flat, rng, together
from ._internal import CheckpointError, Shard
from .batches import Resumable
from .placed import PARTS, Parts, Place, Resharded, parameter_of, parts_from_bytes, place_of, read_parts

if TYPE_CHECKING:
    from ._internal import Entry
    from .tiers import HealingShard

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
#: The largest element: tensors of other tools begin on a multiple of theirs.
ALIGN = 8
_RNG, _EXTRA, _LAYOUT = "rng", "extra", "layout"


@dataclass
class Item:
    """One tensor of a snapshot. ``eager``: it changes outside the optimizer. ``whole``: the sharded tensor it is a part of, or where
    it belongs."""

    name: str
    tensor: Tensor
    eager: bool
    whole: Tensor | Place | None = None

    def entry(self) -> Entry:
        """(name, dtype, shape, bytes)"""
        t = self.tensor
        if t.dtype not in DTYPES:
            raise CheckpointError(f"{self.name} has dtype {t.dtype}, which safetensors cannot hold; convert it first")
        return self.name, DTYPES[t.dtype], list(t.shape), t.numel() * t.element_size()


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module inside ``torch.compile`` and DDP wrappers."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = module.module
        if inner is None:
            return module
        module = inner


def is_replicated(objects: Mapping[str, Any]) -> bool:
    """True when every rank holds the same: one of the modules is in DDP, and no tensor is a shard of a larger one."""
    modules = [o for o in objects.values() if isinstance(o, nn.Module)]
    if any(hasattr(p, "device_mesh") for m in modules for p in m.parameters()):
        return False
    while modules:
        module = modules.pop()
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return True
        inner = getattr(module, "_orig_mod", None)
        if inner is not None:
            modules.append(inner)
    return False


@dataclass(frozen=True)
class Layout:
    """Whose state a shard is."""

    rank: int
    world_size: int
    replicated: bool


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (FSDP2, tensor parallel), the same memory; any other tensor as it is."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part


def _places(items: list[Item]) -> dict[str, Place]:
    """Where the parts of sharded tensors among them belong."""
    wholes = [(i.name, i.whole) for i in items if i.whole is not None]
    return {name: place for name, whole in wholes if (place := place_of(whole)) is not None}


def _like(value: Any, parameter: Tensor) -> Any:
    """A part of a state that is sharded as its parameter is, as the sharded tensor that the optimizer had."""
    part = getattr(parameter, "_local_tensor", None)
    if part is None or not isinstance(value, Tensor) or value.shape != part.shape:
        return value
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, Tensor | Place | None]]:
    """(name, this rank's part, what it is a part of) of everything that a module saves."""
    if flat.is_flat(module):
        yield from flat.tensors(module)
        return
    for key, value in module.state_dict().items():
        if isinstance(value, Tensor):
            own = local(value)
            yield key, own, None if own is value else value


def _in_place(tensor: Tensor) -> bool:
    """The bytes can be copied straight to where they belong."""
    return tensor.is_contiguous() and tensor.device.type == "cpu"


class State:
    """The objects of a checkpoint, by the names the user gave them."""

    def __init__(self, objects: Mapping[str, Any], layout: Layout) -> None:
        self.layout = layout
        self._layout_blob = encoding.encode(vars(layout))
        self._parts = Parts()
        for name, obj in objects.items():
            if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
                hint = "wrap a batch function with everstep.resumable" if callable(obj) else "it is no Stateful"
                raise TypeError(f"{name}= has no state_dict and load_state_dict: {hint}")
        self.objects = {n: unwrap(o) if isinstance(o, nn.Module) else o for n, o in objects.items()}
        self.optimizers = [o for o in self.objects.values() if isinstance(o, Optimizer)]

    def _parameter_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for obj in self.objects.values():
            if isinstance(obj, nn.Module):
                for name, parameter in obj.named_parameters():
                    names.setdefault(id(parameter), flat.clean(name))
        return names

    def role(self) -> int:
        """A number that ranks have in common which hold the same parameters, by name, however these are sharded: those of one pipeline stage."""
        return zlib.crc32("\n".join(sorted(set(self._parameter_names().values()))).encode()) or 1

    def _optimized(self) -> set[int]:
        groups = (g for o in self.optimizers for g in o.param_groups)
        return {q.data_ptr() for g in groups for p in g["params"] if (q := local(p)).data_ptr()}

    def module_items(self) -> list[Item]:
        """Tensors of all modules; those that no optimizer updates are eager."""
        optimized = self._optimized()
        items = []
        for name, obj in self.objects.items():
            if isinstance(obj, nn.Module):
                for key, own, whole in _named_tensors(obj):
                    items.append(Item(f"{name}.{key}", own, own.data_ptr() not in optimized, whole))
        return items

    def collect(self, extra: Mapping[str, Any]) -> list[Item]:
        """Everything, as tensors in the order in which they are stored: what the optimizer updates, then what changes
        otherwise; large elements first, so that each is aligned."""
        items = self.module_items()
        blobs: dict[str, bytes] = {}
        for name, obj in self.objects.items():
            if isinstance(obj, nn.Module):
                rest = {} if flat.is_flat(obj) else {k: v for k, v in obj.state_dict().items() if not isinstance(v, Tensor)}
                if rest:
                    blobs[name] = encoding.encode(self._refer(rest, name, items, eager=True))
            elif isinstance(obj, Optimizer):
                blobs[name] = encoding.encode(self._optimizer(name, obj, items))
            else:
                blobs[name] = encoding.encode(self._refer(obj.state_dict(), name, items, eager=True))
        items.sort(key=lambda i: (i.eager, -i.tensor.element_size()))
        self._align(items)
        parts = self._parts.of(items)
        if parts:
            items.append(Item(PARTS, torch.frombuffer(bytearray(parts), dtype=torch.uint8), True))
        for name, blob in [*((encoding.BLOB + n, b) for n, b in blobs.items()), *self.surroundings(extra)]:
            items.append(Item(name, torch.frombuffer(bytearray(blob), dtype=torch.uint8), True))
        return items

    def surroundings(self, extra: Mapping[str, Any]) -> list[tuple[str, bytes]]:
        """What belongs to a step and to no object, encoded."""
        values = [(_RNG, encoding.encode(rng.get())), (_EXTRA, encoding.encode(dict(extra))), (_LAYOUT, self._layout_blob)]
        return [(encoding.BLOB + name, blob) for name, blob in values]

    @staticmethod
    def _align(items: list[Item]) -> None:
        """Fills up between the two kinds."""
        first = next((n for n, i in enumerate(items) if i.eager), len(items))
        gap = -sum(i.tensor.numel() * i.tensor.element_size() for i in items[:first]) % ALIGN
        if gap and first < len(items):
            items.insert(first, Item(encoding.BLOB + "align", torch.zeros(gap, dtype=torch.uint8), True))

    def _refer(self, value: Any, path: str, items: list[Item], *, eager: bool) -> Any:
        """``value`` with every tensor replaced by a reference and put into ``items``."""
        if isinstance(value, Tensor):
            own = local(value)
            items.append(Item(path, own, eager, None if own is value else value))
            return encoding.TensorRef(path)
        if isinstance(value, Mapping):
            return {k: self._refer(v, f"{path}/{k}", items, eager=eager) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._refer(v, f"{path}/{i}", items, eager=eager) for i, v in enumerate(value))
        return value

    def _ranges(self) -> dict[str, Place]:
        """Where this rank's pieces of FSDP1's flat parameters belong, by the names of parameters."""
        modules = (o for o in self.objects.values() if isinstance(o, nn.Module))
        return {name: place for m in modules if flat.is_flat(m) for name, place in flat.places(m).items()}

    def _optimizer(self, name: str, optimizer: Optimizer, items: list[Item]) -> Any:
        """Optimizer state by the names of its parameters, so that it does not depend on their order."""
        state = optimizer.state_dict()
        order = self._parameters_of(optimizer)
        by_name = {order[i]: values for i, values in state["state"].items()}
        first = len(items)
        referred = self._refer(by_name, name, items, eager=False)
        ranges = self._ranges()
        for item in items[first:] if ranges else ():
            place = ranges.get(parameter_of(item.name))
            if item.whole is None and place is not None and flat.fits(item.tensor, place):
                item.whole = place
        return {
            "state": referred,
            "groups": [{**g, "params": [order[i] for i in g["params"]]} for g in state["param_groups"]],
        }

    # -- back ------------------------------------------------------------------------------------

    def check(self, shard: Shard | HealingShard | Resharded) -> None:
        """Raises :class:`CheckpointError` with a diff when the checkpoint is of another model."""
        stored = {e[0]: e for e in shard.entries()}
        wanted = [i.entry() for i in self.module_items()]
        lines = []
        modules = [n for n, o in self.objects.items() if isinstance(o, nn.Module)]
        for name, dtype, shape, _ in wanted:
            if name not in stored:
                lines.append(f"{name}: not in the checkpoint")
            elif stored[name][2] != shape:
                lines.append(f"{name}: shape {stored[name][2]} in the checkpoint, {shape} in the model")
            elif stored[name][1] != dtype:
                lines.append(f"{name}: {stored[name][1]} in the checkpoint, {dtype} in the model")
        known = {e[0] for e in wanted}
        unknown = {n for n in stored if n not in known and n.split(".")[0] in modules and "/" not in n}
        if isinstance(shard, Resharded):
            # Another rank may have what this one does not (pipeline stages).
            unknown = together.lacked_by_all(unknown)
        lines += [f"{n}: only in the checkpoint" for n in sorted(unknown)]
        objects = {n.removeprefix(encoding.BLOB) for n in stored if n.startswith(encoding.BLOB)}
        others = {n for n, o in self.objects.items() if not isinstance(o, nn.Module)}
        lines += [f"{n}=: not in the checkpoint" for n in sorted(others - objects)]
        if lines:
            shown = "\n  ".join(lines[:10]) + (f"\n  and {len(lines) - 10} more" if len(lines) > 10 else "")
            raise CheckpointError(
                "the checkpoint is of another model; give the model it was made with, or another directory:\n  " + shown
            )

    def restore(self, shard: Shard | HealingShard | Resharded) -> dict[str, Any]:
        """Loads everything; returns the extra values saved with the step."""
        self.check(shard)
        entries = {e[0]: e for e in shard.entries()}
        # First room for all tensors, then one pass over the shard fills and verifies it, then the objects take them.
        targets: dict[str, Tensor] = {}

        def room(name: str) -> Tensor:
            _, dtype, shape, _ = entries[name]
            return targets.setdefault(name, torch.empty(shape, dtype=_BY_NAME[dtype]))

        own = self._check_layout(shard, entries)
        values = {}
        for name, obj in self.objects.items():
            blob = encoding.BLOB + name
            # What random batches were in hand is each rank's own.
            if blob not in entries or not (own or not isinstance(obj, Resumable)):
                continue
            if isinstance(obj, Optimizer) and isinstance(shard, Resharded):
                values[name] = shard.optimizer(blob, self._parameters_of(obj), room)
            else:
                values[name] = encoding.decode(shard.bytes(blob), room)
        extra = encoding.decode(shard.bytes(encoding.BLOB + _EXTRA), room)
        random = encoding.decode(shard.bytes(encoding.BLOB + _RNG), room)
        with torch.no_grad():
            aside = [(i, room(i.name)) for i in self.module_items() if not _in_place(i.tensor)]
            targets.update({i.name: i.tensor for i in self.module_items() if _in_place(i.tensor)})
            # The length is the target's own, never what the checkpoint says.
            shard.copy_to([(name, t.data_ptr(), t.nbytes) for name, t in targets.items()])
            for item, tensor in aside:
                item.tensor.copy_(tensor)
        for name, value in values.items():
            obj = self.objects[name]
            if isinstance(obj, Optimizer):
                self._restore_optimizer(obj, value)
            elif isinstance(obj, nn.Module):
                obj.load_state_dict({**obj.state_dict(), **value})
            else:
                obj.load_state_dict(value)
        rng.put(random)
        if not own:
            rng.diverge(self.layout.rank)
        return extra

    @property
    def is_sharded(self) -> bool:
        """This rank holds parts of larger tensors."""
        return bool(_places(self.module_items()))

    def resharded(self, directory: str) -> Resharded:
        """A checkpoint of other ranks, as this rank would have written it."""
        items = self.module_items()
        own = _places(items)
        parameters: dict[str, Place] = {}
        for name, place in own.items():
            parameters.setdefault(name.partition(".")[2], place)
        return Resharded(directory, self.layout.rank, own, parameters, {i.name for i in items})

    def _parameters_of(self, optimizer: Optimizer) -> list[str]:
        """Names of an optimizer's parameters, in its order."""
        names = self._parameter_names()
        return [names.get(id(p), f"param_{i}") for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])]

    def is_placed_otherwise(self, shard: Shard | HealingShard) -> bool:
        """The rank of this number had other parts of the same tensors."""
        entries = shard.entries()
        names = {e[0] for e in entries}
        modules = {n for n, o in self.objects.items() if isinstance(o, nn.Module)}
        items = self.module_items()
        if {i.name for i in items} != {n for n in names if n.partition(".")[0] in modules and "/" not in n}:
            return True
        words = shard.places()
        if words is None:
            # A slot says so in a tensor only.
            words = parts_from_bytes(shard.bytes(PARTS)) if PARTS in names else []
        found = read_parts(words, entries)
        own = _places(items)
        return any(found.get(name) != own.get(name) for name in found.keys() | own.keys() if "/" not in name)

    def _check_layout(self, shard: Shard | HealingShard | Resharded, entries: Mapping[str, Entry]) -> bool:
        """True when the shard is this very rank's; raises when it is another's that cannot stand for it."""
        if isinstance(shard, Resharded):
            return shard.exact
        if encoding.BLOB + _LAYOUT not in entries:
            return True
        saved = Layout(**encoding.decode(shard.bytes(encoding.BLOB + _LAYOUT), lambda name: None))
        if (saved.rank, saved.world_size) == (self.layout.rank, self.layout.world_size):
            return True
        # One process has what all would have.
        if (saved.replicated or saved.world_size == 1) and self.layout.replicated:
            return saved.rank == self.layout.rank
        raise CheckpointError(
            f"this shard is of rank {saved.rank} of {saved.world_size}, this is rank {self.layout.rank} of {self.layout.world_size}: "
            "run with as many ranks as wrote it, or, if all ranks hold the same state, pass the DDP module or replicated=True"
        )

    def _restore_optimizer(self, optimizer: Optimizer, value: Any) -> None:
        order = self._parameters_of(optimizer)
        index = {name: i for i, name in enumerate(order)}
        unknown = [n for n in value["state"] if n not in index]
        if unknown:
            raise CheckpointError(f"the checkpoint's optimizer has state for {unknown[0]}, this one has no such parameter")
        # torch goes by positions: those of this optimizer, whatever the order was that the checkpoint was made with.
        groups, at = [], 0
        for saved, own in itertools.zip_longest(value["groups"], optimizer.param_groups):
            if saved is None or own is None:
                raise CheckpointError(f"the checkpoint's optimizer has {len(value['groups'])} parameter groups, this one {len(optimizer.param_groups)}")
            members = range(at, at + len(own["params"]))
            differ = {order[i] for i in members} ^ set(saved["params"])
            if differ:
                raise CheckpointError(f"{min(differ)} is in another parameter group of the optimizer than in the checkpoint's")
            groups.append({**saved, "params": list(members)})
            at = members.stop
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        state = {index[n]: {k: _like(x, parameters[index[n]]) for k, x in v.items()} for n, v in value["state"].items()}
        optimizer.load_state_dict({"state": state, "param_groups": groups})
