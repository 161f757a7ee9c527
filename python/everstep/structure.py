"""A state's structure, worked out once: the tensors, their names, and where they are in memory.

Walking through modules and optimizers costs more than copying a small model. So the walk is done
once, and each step only checks that the modules have the same members, that the optimizer state is
the same, and that each tensor is where it was. Anything that differs, or that only a walk can find
(hooks, sharded tensors, state that is created at each step), leads to :meth:`State.collect`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat
from operator import attrgetter, contains, is_, itemgetter
from types import FunctionType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from . import encoding, optimizer_state
from ._internal import Members, Places, SlotLayout, encode_groups
from .blob_format import BLOB, MARK
from .optimizer_state import ParameterNames
from .slots import Sizes, Snapshot, described
from .state import Item, State

#: Tensors of these types have their memory where they report it, and no other tensors behind them.
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
#: torch's schedulers that contain no others, and their ``state_dict`` as torch defines it.
_SCHEDULERS = {
    scheduler: scheduler.state_dict
    for scheduler in (
        lr_scheduler.StepLR,
        lr_scheduler.MultiStepLR,
        lr_scheduler.ConstantLR,
        lr_scheduler.LinearLR,
        lr_scheduler.ExponentialLR,
        lr_scheduler.PolynomialLR,
        lr_scheduler.CosineAnnealingLR,
        lr_scheduler.CosineAnnealingWarmRestarts,
        lr_scheduler.OneCycleLR,
        lr_scheduler.LambdaLR,
    )
    if scheduler.state_dict.__module__ == lr_scheduler.__name__
}
#: Values in an optimizer's state that can be compared.
_VALUES = (int, float, bool, str, type(None))
_SHAPE_AND_DTYPE = attrgetter("shape", "dtype")
_REQUIRES_GRAD = attrgetter("requires_grad")
#: Most snapshots between two attempts to keep a structure that keeps changing.
_PATIENCE_MAX = 64


class _Differs(Exception):
    """The structure cannot be kept, or has changed."""


#: Raised for a structure that has changed, or that this module does not handle.
_CANNOT = (_Differs, RuntimeError, AttributeError, KeyError, TypeError)


#: Where a module keeps its members, the hooks that take part in saving them, and the names of
#: buffers that are not saved.
_MEMBERS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_TRANSIENT = "_non_persistent_buffers_set"
_transient_of = itemgetter(_TRANSIENT)


def _saves_as_torch_does(kind: type[nn.Module]) -> bool:
    own = (kind.state_dict, kind._save_to_state_dict, kind.get_extra_state)
    return own == (nn.Module.state_dict, nn.Module._save_to_state_dict, nn.Module.get_extra_state)


class _Modules:
    """All modules by identity: their members, in order and by name."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [*modules]
        self._types = [*map(type, self._modules)]
        self._vars = [vars(m) for m in self._modules]
        if not all(map(_saves_as_torch_does, set(self._types))):
            raise _Differs
        self._transient = [set(t) for t in map(_transient_of, self._vars)]
        # Most models have no buffer that is not saved.
        self._any_transient = any(self._transient)
        empty = [] if self._any_transient else [_TRANSIENT]
        self._members = Members([], self._vars, [*_MEMBERS], [*_HOOKS, *empty])
        if not self.same():
            # A module has hooks that take part in saving, or a way of its own to save.
            raise _Differs

    def same(self) -> bool:
        return (
            self._members.same()
            and (not self._any_transient or [*map(_transient_of, self._vars)] == self._transient)
            and not any(map(contains, self._vars, repeat("state_dict")))
            and [*map(type, self._modules)] == self._types
        )

    def tensors(self) -> list[Tensor]:
        found: list[Tensor | None] = []
        for module, transient in zip(self._modules, self._transient, strict=True):
            found += [*module._parameters.values(), *(b for n, b in module._buffers.items() if n not in transient)]
        return [t for t in found if t is not None]


class _Optimizer:
    """An optimizer's state: tensors compared by identity, values by equality, and the encoded
    form."""

    def __init__(self, state: State, name: str, optimizer: Optimizer) -> None:
        if type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in vars(optimizer):
            raise _Differs
        self._optimizer, self._state = optimizer, optimizer.state
        self._parameters = [[*g["params"]] for g in optimizer.param_groups]
        self._entries = [*optimizer.state.values()]
        values = [v for s in self._entries for v in s.values()]
        #: The tensors, for as long as the entries are the same.
        self.tensors = [v for v in values if isinstance(v, Tensor)]
        if any(type(v) not in _VALUES for v in values if not isinstance(v, Tensor)):
            raise _Differs
        hooks = ["_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"]
        self._kept = Members([self._state, *self._entries], [vars(optimizer)], [], hooks)
        names = ParameterNames(state.objects)
        order = names.of(optimizer)
        if optimizer_state.in_no_module(optimizer, order):
            # Only a walk through all objects shows whether another one saves these parameters.
            raise _Differs
        value = optimizer_state.by_names(optimizer, optimizer.state_dict(), order, {})
        self._names = [g["params"] for g in value.pop("groups")]
        self._encoded_names = [encoding.encode(names) for names in self._names]
        head = state.encoded(value, name, [], eager=False, sharded=True)
        self._head = encoding.join(head, "groups", MARK)
        self._path: encoding.Path = ((None, name, False), "groups", False)
        #: Which of the tensors require gradients is part of what is encoded.
        self._require_grad = self._requiring_grad()
        if self.blob() != state.encoded_optimizer(name, optimizer, names, []):
            # It is encoded in a way that this class does not handle.
            raise _Differs

    def same(self) -> bool:
        optimizer = self._optimizer
        if optimizer.state is not self._state or len(optimizer.param_groups) != len(self._parameters):
            return False
        for group, known in zip(optimizer.param_groups, self._parameters, strict=True):
            if len(group["params"]) != len(known) or not all(map(is_, group["params"], known)):
                return False
        return (
            "state_dict" not in vars(optimizer) and self._kept.same() and self._requiring_grad() == self._require_grad
        )

    def _requiring_grad(self) -> list[bool]:
        return [*map(_REQUIRES_GRAD, self.tensors)]

    def blob(self) -> bytes:
        """Encodes the state as :meth:`State.collect` does; groups may change at each step
        (schedulers)."""
        groups = self._optimizer.param_groups
        if (plain := encode_groups(groups, self._encoded_names)) is not None:
            return self._head + plain[1:]
        whole = [
            {k: v for k, v in g.items() if k != "params"} | {"params": names}
            for g, names in zip(groups, self._names, strict=True)
        ]
        if any(isinstance(v, Tensor) for g in whole for v in g.values()):
            raise _Differs
        encoded = encoding.encode_part(whole, self._path)
        if encoded is None:
            raise _Differs
        return self._head + encoded[1:]


def _same_places(tensors: list[Tensor]) -> Callable[[], bool]:
    """Returns a function that reports whether all tensors are still where they are now, with the
    same type, shape and order in memory."""
    may_be_conjugated = [t for t in tensors if t.is_complex()]

    def conjugated() -> list[bool]:
        return [*map(Tensor.is_conj, may_be_conjugated)]

    def walked() -> Any:
        kinds = [*map(_SHAPE_AND_DTYPE, tensors)], [*map(Tensor.is_contiguous, tensors)], [*map(Tensor.is_neg, tensors)]
        return [*map(Tensor.data_ptr, tensors)], kinds

    before, conjugated_before = walked(), conjugated()
    try:
        # One call for all of them; torch 2.10 and later.
        same = Places(tensors).same
    except Exception:  # noqa: BLE001  # an earlier torch, or one whose layout in memory is another

        def same() -> bool:
            unchanged: bool = walked() == before
            return unchanged

    return lambda: same() and conjugated() == conjugated_before


def _is_inert(obj: Any) -> bool:
    """Returns whether ``state_dict()`` of the object is known to run no code of the user: it is one
    of torch's own schedulers, and computes only with functions, which are not saved."""
    kind = type(obj)
    own = kind.state_dict if kind in _SCHEDULERS and "state_dict" not in vars(obj) else None
    return (
        own is not None
        and own is _SCHEDULERS[kind]
        and all(type(f) is FunctionType for f in getattr(obj, "lr_lambdas", ()))
    )


class Early(Protocol):
    """Copies tensors whose places are known while everything else of a step is collected
    (:class:`everstep.agent_tier.AgentTier`)."""

    def start(self, step: int, layout: SlotLayout, sizes: Sizes, persist: int | None) -> bool:
        """Returns True if a copy has begun."""

    def cancel(self) -> None:
        """Cancels what :meth:`start` has begun."""


class Structure:
    """The state of a manager, collected at each step."""

    def __init__(self, state: State, early: Early | None = None) -> None:
        self._state = state
        self._early = early
        self._known: _Known | None = None
        #: Snapshots to let pass before the structure is worked out again, and how many to let pass
        #: next time.
        self._wait, self._patience = 0, 1

    def snapshot(self, step: int, extra: dict[str, Any], persist: int | None) -> Snapshot:
        """Collects all of the state, ready to be copied."""
        if self._known is not None:
            try:
                snapshot = self._known.snapshot(step, extra, persist, self._early)
                self._patience = 1
                return snapshot
            except _CANNOT:
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
        modules: list[nn.Module] = []
        self._optimizers: dict[str, _Optimizer] = {}
        for name, obj in state.objects.items():
            if isinstance(obj, nn.Module):
                modules += obj.modules()
                if any(i.name == BLOB + name for i in items):
                    # Something is saved beside its tensors: extra state, or versions for load
                    # hooks.
                    raise _Differs
            elif name in state.optimizers_by_name:
                self._optimizers[name] = _Optimizer(state, name, obj)
        self._modules = _Modules(modules)
        self._items = [i for i in items if not i.name.startswith(BLOB) or i.name == BLOB + "align"]
        if any(i.whole is not None for i in self._items):
            raise _Differs
        tensors = self._modules.tensors() + [t for o in self._optimizers.values() for t in o.tensors]
        # Tied tensors count once.
        self._tensors = [*{id(t): t for t in tensors}.values()]
        if any(type(t) not in _PLAIN or t.device.type != "cpu" or not t.is_contiguous() for t in self._tensors):
            raise _Differs
        self._same_places = _same_places(self._tensors)
        known = {t.data_ptr() for t in self._tensors}
        if any(i.tensor.data_ptr() not in known for i in self._items if not i.name.startswith(BLOB)):
            raise _Differs
        self._host = [Item(i.name, i.tensor.detach(), i.eager) for i in self._items]
        self._layout: SlotLayout = described(self._host)
        self._sizes = Sizes.of(self._host)
        others = {n: o for n, o in state.objects.items() if n not in self._optimizers and not isinstance(o, nn.Module)}
        #: Objects whose state is read before a copy begins, and those whose state is read during
        #: the copy.
        self._before = [n for n, o in others.items() if not _is_inert(o)]
        self._meanwhile = [n for n, o in others.items() if _is_inert(o)]
        self._inert = [others[n] for n in self._meanwhile]
        self._blobs = [(n, BLOB + n) for n in state.objects if n in others or n in self._optimizers]

    @classmethod
    def of(cls, state: State, items: list[Item]) -> _Known | None:
        """Returns ``None`` for a state that has to be walked through."""
        try:
            return cls(state, items)
        except _CANNOT:
            return None

    def _blob_of(self, name: str) -> bytes:
        tensors: list[Item] = []
        blob = self._state.encoded(self._state.state_of(name, self._state.objects[name]), name, tensors, eager=True)
        if tensors:
            raise _Differs
        return blob

    def snapshot(self, step: int, extra: dict[str, Any], persist: int | None, early: Early | None) -> Snapshot:
        """Collects the tensors, once they are known to be where they were, and everything else.
        Raises :class:`_Differs` otherwise."""
        if not all(map(_is_inert, self._inert)):
            raise _Differs
        blobs = {name: self._blob_of(name) for name in self._before}
        # No user code runs from here on: it might change a tensor for a moment.
        if not self._same_places():
            raise _Differs
        started = early is not None and early.start(step, self._layout, self._sizes, persist)
        try:
            if not self._modules.same():
                raise _Differs
            for name, optimizer in self._optimizers.items():
                if not optimizer.same():
                    raise _Differs
                blobs[name] = optimizer.blob()
            for name in self._meanwhile:
                blobs[name] = self._blob_of(name)
            values = [(full, blobs[name]) for name, full in self._blobs]
            values += self._state.surroundings(extra)
        except BaseException:
            if early is not None and started:
                early.cancel()
            raise
        return Snapshot(
            step, self._host, persist, layout=self._layout, blobs=values, sizes=self._sizes, started=started
        )
