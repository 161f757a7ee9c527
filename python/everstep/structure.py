"""A state's structure, worked out once: which tensors there are, what they are called, where they lie.

Walking through modules and optimizers costs more than copying a small model. So the walk is done once, and each step only compares: the
same modules with the same members, the same optimizer state, each tensor where it was. Anything that differs, or that only a walk can
find out (hooks, sharded tensors, state that is made anew each time), leads to :meth:`State.collect`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import encoding, optimizer_state
from ._internal import SlotLayout
from .optimizer_state import ParameterNames
from .slots import Snapshot, described
from .state import Item, State

#: What has its memory where it says, and nothing else behind it.
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
#: Values in an optimizer's state that can be compared.
_VALUES = (int, float, bool, str, type(None))
#: Snapshots between two attempts to keep a structure that keeps changing.
_PATIENCE_MAX = 64


class _Differs(Exception):
    """The structure cannot be kept, or is another one."""


def _ids(values: Any) -> list[int]:
    return [*map(id, values)]


@dataclass
class _Module:
    """Members of one module, by identity."""

    module: nn.Module
    names: list[str]
    members: list[int]
    transient: set[str]

    @classmethod
    def of(cls, module: nn.Module) -> _Module:
        kind = type(module)
        own = (kind.state_dict, kind._save_to_state_dict, kind.get_extra_state)
        if own != (nn.Module.state_dict, nn.Module._save_to_state_dict, nn.Module.get_extra_state) or "state_dict" in vars(module):
            raise _Differs
        return cls(module, cls._names(module), cls._members(module), set(module._non_persistent_buffers_set))

    @staticmethod
    def _names(m: nn.Module) -> list[str]:
        return [*m._parameters, *m._buffers, *m._modules]

    @staticmethod
    def _members(m: nn.Module) -> list[int]:
        return _ids([*m._parameters.values(), *m._buffers.values(), *m._modules.values()])

    def same(self) -> bool:
        m = self.module
        if m._state_dict_hooks or m._state_dict_pre_hooks or m._non_persistent_buffers_set != self.transient:
            return False
        return self._members(m) == self.members and self._names(m) == self.names

    def tensors(self) -> list[Tensor]:
        m = self.module
        buffers = [b for n, b in m._buffers.items() if n not in self.transient]
        return [t for t in [*m._parameters.values(), *buffers] if t is not None]


class _Optimizer:
    """An optimizer's state by identity, its values by equality, and its encoded form."""

    def __init__(self, state: State, name: str, optimizer: Optimizer) -> None:
        if type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in vars(optimizer):
            raise _Differs
        self._optimizer, self._state = optimizer, optimizer.state
        self._parameters = [[*g["params"]] for g in optimizer.param_groups]
        self._members = [_ids(g) for g in self._parameters]
        self._entries = [(p, s, [*s], self._tensor_ids(s)) for p, s in optimizer.state.items()]
        self._values = [(s, k, v, type(v)) for _, s, _, _ in self._entries for k, v in s.items() if not isinstance(v, Tensor)]
        if any(kind not in _VALUES for *_, kind in self._values):
            raise _Differs
        names = ParameterNames(state.objects)
        value = optimizer_state.by_names(optimizer, optimizer.state_dict(), names.of(optimizer))
        self._names = [g["params"] for g in value.pop("groups")]
        self._head = state.encoded(value, name, [], eager=False, sharded=True)
        self._path: encoding.Path = ((None, name, False), "groups", False)
        self._groups = ""
        self._blob = b""
        if self.blob() != state.encoded_optimizer(name, optimizer, names, []):
            # Encoded in another way than this one knows.
            raise _Differs

    @staticmethod
    def _tensor_ids(entry: dict[str, Any]) -> list[int]:
        return [id(v) for v in entry.values() if isinstance(v, Tensor)]

    def same(self) -> bool:
        optimizer = self._optimizer
        if optimizer.state is not self._state or len(self._state) != len(self._entries):
            return False
        if optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks:
            return False
        if [_ids(g["params"]) for g in optimizer.param_groups] != self._members:
            return False
        for parameter, entry, names, tensors in self._entries:
            if self._state.get(parameter) is not entry or [*entry] != names or self._tensor_ids(entry) != tensors:
                return False
        return all(type(v := s[k]) is kind and v == was for s, k, was, kind in self._values)

    def tensors(self) -> list[Tensor]:
        return [v for _, s, _, _ in self._entries for v in s.values() if isinstance(v, Tensor)]

    def blob(self) -> bytes:
        """As :meth:`State.collect` encodes it; groups may change at each step (schedulers)."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        if any(isinstance(v, Tensor) for g in groups for v in g.values()):
            raise _Differs
        written = repr(groups)
        if written != self._groups:
            whole = [{**g, "params": names} for g, names in zip(groups, self._names, strict=True)]
            self._blob = encoding.join(self._head, "groups", encoding.encode(whole, self._path))
            self._groups = written
        return self._blob


class Structure:
    """The state of a manager, collected at each step."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._known: _Known | None = None
        #: Snapshots to let pass before the structure is worked out again, and how many that will be next time.
        self._wait, self._patience = 0, 1

    def snapshot(self, step: int, extra: dict[str, Any], persist: int | None) -> Snapshot:
        """All of the state, ready to be copied."""
        if self._known is not None:
            try:
                snapshot = self._known.snapshot(step, extra, persist)
                self._patience = 1
                return snapshot
            except _Differs:
                self._known = None
        items = self._state.collect(extra)
        self._wait -= 1
        if self._wait <= 0:
            self._known = _Known.of(self._state, items)
            self._wait = self._patience
            self._patience = min(2 * self._patience, _PATIENCE_MAX)
        return Snapshot(step, items, persist)


class _Known:
    """A structure that can be compared."""

    def __init__(self, state: State, items: list[Item]) -> None:
        self._state = state
        self._modules: list[_Module] = []
        self._optimizers: dict[str, _Optimizer] = {}
        for name, obj in state.objects.items():
            if isinstance(obj, nn.Module):
                self._modules += [_Module.of(m) for m in obj.modules()]
                if any(i.name == encoding.BLOB + name for i in items):
                    # Something is saved beside its tensors: extra state, versions for hooks of loading.
                    raise _Differs
            elif name in state.optimizers_by_name:
                self._optimizers[name] = _Optimizer(state, name, obj)
        self._items = [i for i in items if not i.name.startswith(encoding.BLOB) or i.name == encoding.BLOB + "align"]
        if any(i.whole is not None for i in self._items):
            raise _Differs
        self._tensors = [t for m in self._modules for t in m.tensors()] + [t for o in self._optimizers.values() for t in o.tensors()]
        if any(type(t) not in _PLAIN or t.device.type != "cpu" or not t.is_contiguous() for t in self._tensors):
            raise _Differs
        self._places = self._look()
        known = {t.data_ptr() for t in self._tensors}
        if any(i.tensor.data_ptr() not in known for i in self._items if not i.name.startswith(encoding.BLOB)):
            raise _Differs
        self._host = [Item(i.name, i.tensor.detach(), i.eager) for i in self._items]
        self._layout: SlotLayout = described(self._host)

    @classmethod
    def of(cls, state: State, items: list[Item]) -> _Known | None:
        """``None``: it has to be walked through at each step."""
        try:
            return cls(state, items)
        except (_Differs, RuntimeError, AttributeError, TypeError):
            return None

    def _look(self) -> list[Any]:
        tensors = self._tensors
        return [
            [t.data_ptr() for t in tensors],
            [t.shape for t in tensors],
            [t.dtype for t in tensors],
            [t.is_contiguous() for t in tensors],
        ]

    def snapshot(self, step: int, extra: dict[str, Any], persist: int | None) -> Snapshot:
        same = all(m.same() for m in self._modules) and all(o.same() for o in self._optimizers.values())
        if not same or self._look() != self._places:
            raise _Differs
        blobs = []
        for name, obj in self._state.objects.items():
            if name in self._optimizers:
                blobs.append((encoding.BLOB + name, self._optimizers[name].blob()))
            elif not isinstance(obj, nn.Module):
                tensors: list[Item] = []
                blob = self._state.encoded(self._state.state_of(name, obj), name, tensors, eager=True)
                if tensors:
                    raise _Differs
                blobs.append((encoding.BLOB + name, blob))
        blobs += self._state.surroundings(extra)
        return Snapshot(step, self._host, persist, layout=self._layout, blobs=blobs)
