"""The contents of a module's ``state_dict()``, and how it is restored.

Most entries of a ``state_dict()`` are the memory of parameters and buffers, and bytes are copied
straight there. If they are not (cast hooks, clones, extra state), or if other code takes part in
loading (hooks, a ``_load_from_state_dict`` of its own), the module's ``load_state_dict`` is called,
as torch would.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import fsdp1
from ._internal import CheckpointError, DamagedError, Entry
from .compare import difference
from .damage import reading
from .tensor_places import Place
from .tensors import BY_NAME, as_real_dtype, is_lazy, local, real_dtype, same_bits, stored_as

#: Marks what is saved of a module beside its tensors. Earlier checkpoints have the values alone.
FORMAT = "__everstep_module__"


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the user's own module inside ``torch.compile`` and DDP wrappers."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = module.module
        if inner is None:
            return module
        module = inner


@dataclass
class Entries:
    """The contents of a ``state_dict()``."""

    #: This rank's part of each tensor, and what it is a part of.
    tensors: dict[str, tuple[Tensor, Tensor | Place | None]] = field(default_factory=dict)
    #: Entries that are not tensors (extra state).
    values: dict[str, Any] = field(default_factory=dict)
    #: Entries of lazy modules that have no shape yet.
    lazy: set[str] = field(default_factory=set)
    #: Versions of modules, for those that have changed what they save.
    versions: Any = None


def entries_of(name: str, module: nn.Module) -> Entries:
    """Reads a module."""
    found = Entries()
    if fsdp1.is_flat(module):
        for inner, sub in module.named_modules():
            if _has_extra_state(sub):
                raise CheckpointError(
                    f"{name}.{inner} has extra state (get_extra_state), which cannot be saved inside "
                    "FullyShardedDataParallel; use fully_shard (FSDP2)"
                )
        found.tensors = {key: (own, whole) for key, own, whole in fsdp1.tensors(module)}
        return found
    state = module.state_dict()
    found.versions = getattr(state, "_metadata", None)
    for key, value in state.items():
        if is_lazy(value):
            found.lazy.add(key)
        elif isinstance(value, Tensor):
            own = local(value)
            found.tensors[key] = own, None if own is value else value
        else:
            found.values[key] = value
    return found


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _hooks(module: nn.Module) -> Iterator[Any]:
    for hooks in (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks):
        for hook in hooks.values():
            yield getattr(hook, "hook", hook)


def takes_part(module: nn.Module) -> bool:
    """Returns whether code of the user, or of a module itself, takes part in loading: hooks, or
    methods that replace torch's."""
    if type(module).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(module):
        return True
    for inner in module.modules():
        # torch's sharding resets itself by a hook, and state_dict() has done so already.
        if any(not str(getattr(hook, "__module__", "")).startswith("torch.distributed.") for hook in _hooks(inner)):
            return True
        load = getattr(inner._load_from_state_dict, "__func__", inner._load_from_state_dict)
        if not str(getattr(load, "__module__", "")).startswith("torch.nn.modules."):
            return True
    return False


def _same_memory(one: Tensor, other: Tensor) -> bool:
    if is_lazy(other) or one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
        return False
    return one.numel() == 0 or (
        one.data_ptr() == other.data_ptr()
        and one.stride() == other.stride()
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def loads_itself(module: nn.Module, entries: Entries) -> bool:
    """Returns whether the module has to be restored by its ``load_state_dict``."""
    if fsdp1.is_flat(module):
        return False
    if entries.values or entries.lazy or takes_part(module):
        return True
    own = {fsdp1.clean(k): local(t) for k, t in module.named_parameters(remove_duplicate=False)}
    own.update((fsdp1.clean(k), local(t)) for k, t in module.named_buffers(remove_duplicate=False))
    return any(
        (at := own.get(fsdp1.clean(key))) is None or not _same_memory(tensor, at)
        for key, (tensor, _) in entries.tensors.items()
    )


def refuse_expanded(name: str, module: nn.Module, entries: Entries) -> None:
    """Refuses elements that share memory where torch's ``load_state_dict`` has to load them, which
    it cannot.

    Raises:
        CheckpointError: naming such a tensor of a module that loads its state itself.
    """
    for key, (tensor, _) in entries.tensors.items():
        shares = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        if shares and loads_itself(module, entries):
            raise CheckpointError(
                f"{name}.{key} is an expanded view: its elements share memory, and load_state_dict(), which this module "
                "needs (hooks, extra state or a method of its own), cannot write to it; keep a copy in the module "
                "(.contiguous())"
            )


def saved_beside(module: nn.Module, entries: Entries, *, parts: bool) -> dict[str, Any] | None:
    """Returns what is saved of a module beside its tensors; ``None`` if there is nothing.
    ``parts``: :func:`takes_part` of it."""
    dtypes = {key: dtype for key, (tensor, _) in entries.tensors.items() if (dtype := real_dtype(tensor)) is not None}
    if not (entries.values or dtypes or parts):
        return None
    return {
        FORMAT: 1,
        "values": entries.values,
        "versions": entries.versions if parts or entries.values else None,
        "dtypes": dtypes,
    }


def read_beside(value: Any) -> dict[str, Any]:
    """Returns what :func:`saved_beside` has saved, also by earlier versions."""
    if isinstance(value, dict) and FORMAT in value:
        return value
    return {"values": value or {}, "versions": None, "dtypes": {}}


def checked_beside(value: Any) -> Any:
    """Checks a decoded value of a module and returns it.

    Raises:
        DamagedError: when it is not what :func:`saved_beside` saves.
    """
    found = read_beside(value)
    values, versions, dtypes = (found.get(key) for key in ("values", "versions", "dtypes"))
    good = "versions" in found and isinstance(values, dict) and all(isinstance(k, str) for k in values)
    good = good and (
        versions is None or (isinstance(versions, dict) and all(isinstance(v, dict) for v in versions.values()))
    )
    good = (
        good and isinstance(dtypes, dict) and all(isinstance(k, str) and isinstance(d, str) for k, d in dtypes.items())
    )
    if not good:
        raise DamagedError("what a module has beside its tensors is not what everstep writes", [])
    return value


def check_dtypes(name: str, value: Any, entries: Mapping[str, Entry]) -> None:
    """Checks that the tensors of a module can have the dtypes that are recorded beside them.

    Raises:
        DamagedError: when one cannot.
    """
    for key, dtype in read_beside(value)["dtypes"].items():
        entry = entries.get(f"{name}.{key}")
        if entry is not None and entry.dtype in BY_NAME:
            with reading(f"the dtype of {name}.{key}"):
                as_real_dtype(torch.empty(entry.shape, dtype=BY_NAME[entry.dtype], device="meta"), dtype)


def _whole(tensor: Tensor, live: Any) -> Tensor:
    """Returns a part as the sharded tensor that the module has."""
    if getattr(live, "_local_tensor", None) is None or not hasattr(live, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor.to(live.device),
        live.device_mesh,
        live.placements,
        run_check=False,
        shape=live.shape,
        stride=live.stride(),
    )


def load(name: str, module: nn.Module, tensors: Mapping[str, Tensor], beside: dict[str, Any]) -> None:
    """Restores a module by its ``load_state_dict``, once, and compares the result.

    Raises:
        CheckpointError: when the module rejects the state, and when an entry was not restored.
    """
    before = entries_of(name, module)
    state: OrderedDict[str, Any] = OrderedDict()
    for key, stored in tensors.items():
        live = before.tensors.get(key)
        dtype = beside["dtypes"].get(key)
        tensor = stored if dtype is None else as_real_dtype(stored, dtype)
        state[key] = tensor if live is None else _whole(tensor, live[1])
    state.update(beside["values"])
    # In torch's order.
    order = {key: n for n, key in enumerate([*before.tensors, *before.lazy, *before.values])}
    state = OrderedDict(sorted(state.items(), key=lambda item: order.get(item[0], len(order))))
    saved = OrderedDict((k, local(v) if isinstance(v, Tensor) else v) for k, v in state.items())
    versions = before.versions if beside["versions"] is None else beside["versions"]
    if versions is not None:
        state._metadata = OrderedDict((k, dict(v)) for k, v in versions.items())  # type: ignore[attr-defined]
    try:
        with torch.no_grad():
            module.load_state_dict(state)
    except Exception as e:
        raise CheckpointError(f"{name}: load_state_dict() rejected the state in the checkpoint: {e}") from e
    now = entries_of(name, module)
    # A module may have migrated entries of an earlier version.
    migrated = {m for m, v in (versions or {}).items() if (now.versions or {}).get(m) != v}
    for key, value in saved.items():
        if key.rpartition(".")[0] in migrated:
            continue
        if key in now.tensors:
            arrived = isinstance(value, Tensor) and same_bits(value, now.tensors[key][0])
        elif key in now.values:
            arrived = difference(value, now.values[key]) is None
        else:
            # A hook has renamed it, or torch would have refused it.
            arrived = True
        if not arrived:
            raise CheckpointError(
                f"{name}.{key} was not restored: after load_state_dict() the module has a different value "
                "(check its hooks and overrides)"
            )


def mismatch(stored: tuple[str, list[int]], tensor: Tensor, name: str) -> str | None:
    """Returns why an entry of a checkpoint does not fit that of a module, if it does not."""
    dtype, shape = stored_as(tensor, name)
    if stored[1] != shape:
        return f"{name}: shape {stored[1]} in the checkpoint, {shape} in the model"
    if stored[0] != dtype:
        return f"{name}: {stored[0]} in the checkpoint, {dtype} in the model"
    return None
