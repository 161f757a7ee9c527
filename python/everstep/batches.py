"""Makes a batch function resumable, also in loops that prefetch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch

from . import rng
from .damage import reading
from .tensors import raw

F = TypeVar("F", bound=Callable[..., Any])

#: Matches the text of an object that is different in each process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
#: Limit on the outstanding calls of a kind; of more, the oldest are forgotten.
_IN_HAND_MAX = 64
#: Number of used batches that are remembered, because they may be used again (a second model, a
#: recomputation).
_USED_MAX = 64


#: The memory of a tensor: its storage, and the range of bytes in it.
Place = tuple[Any, int, int]


def _place(tensor: Tensor) -> Place:
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    reach = sum((n - 1) * abs(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.untyped_storage(), first, first + (reach * size if tensor.numel() else 0)


def _places(value: Any) -> list[Place]:
    """Returns where the tensors in ``value`` are, without those that have no plain memory (sparse,
    nested)."""
    places = []
    for tensor in _tensors(value):
        # torch.func passes wrappers around the tensors of a batch.
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        if tensor.layout is torch.strided and not tensor.is_nested:
            with contextlib.suppress(RuntimeError):
                places.append(_place(tensor))
    return places


class _Call:
    """A call of the batch function, and the memory of the batch that it returned."""

    def __init__(self, key: str, before: dict[str, Any], batch: Any) -> None:
        self.key = key
        #: State of the random generators.
        self.before = before
        self._memory = [(weakref.ref(storage), first, end) for storage, first, end in _places(batch)]

    def is_alive(self) -> bool:
        """Returns whether the script still has some of the batch."""
        return any(memory() is not None for memory, _, _ in self._memory)

    def is_among(self, places: list[Place], *, exactly: bool = False) -> bool:
        """Returns whether some of the batch is among these, however it is viewed. Batches may be
        slices of one storage."""
        for memory, first, end in self._memory:
            mine = memory()
            for storage, start, stop in places if mine is not None else ():
                if mine is storage and ((first, end) == (start, stop) if exactly else first < stop and start < end):
                    return True
        return False


def _those_on(places: list[Place], calls: list[_Call]) -> list[_Call]:
    """Returns the calls whose batches are there; overlapping batches may be distinguished by where
    they begin and end."""
    exact = [call for call in calls if call.is_among(places, exactly=True)]
    return exact or [call for call in calls if call.is_among(places)]


def _tensors(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yields tensors in a batch, or in the arguments of a forward pass."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each, depth - 1)


def _digest(values: bytes) -> str:
    return hashlib.blake2b(values, digest_size=16).hexdigest()


class _Keys:
    """Names calls by their arguments, in the same way in each process that runs the script."""

    def __init__(self) -> None:
        #: Objects without a text of their own, by identity: how to reach them, and their names.
        self._seen: dict[int, tuple[Callable[[], Any], str]] = {}
        #: How many of each type there were.
        self._counts: dict[str, int] = {}

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return repr(([*map(self._text, args)], sorted((name, self._text(value)) for name, value in kwargs.items())))

    def _text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.is_nested:
                return self._numbered(value)
            dense = value.detach().cpu().resolve_conj().resolve_neg()
            try:
                value = dense.numpy()
            except TypeError:
                # numpy has no such dtype (bfloat16).
                return f"{value.dtype}{[*value.shape]} {_digest(raw(dense).numpy().tobytes())}"
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            # Their text leaves out most of the numbers.
            return f"{value.dtype}{value.shape} {_digest(value.tobytes())}"
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}({', '.join(map(self._text, value))})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self._text(k)}: {self._text(v)}' for k, v in value.items())}}}"
        text = repr(value)
        return text if not _ADDRESS.search(text) else self._numbered(value)

    def _numbered(self, value: Any) -> str:
        """Its type, and a number in the order in which objects of the type were first seen."""
        known = self._seen.get(id(value))
        # An identity may be used again.
        if known is None or known[0]() is not value:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            number = self._counts.get(kind, 0)
            self._counts[kind] = number + 1
            try:
                reach: Callable[[], Any] = weakref.ref(value)
            except TypeError:
                reach = lambda: value  # noqa: E731
            known = self._seen[id(value)] = (reach, f"<{kind} {number}>")
        return known[1]


def _in_backward() -> bool:
    """Returns whether this is within a backward pass, where a forward pass recomputes an earlier
    one."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    return current is not None and current() != -1


class Resumable:
    """A batch function with a state.

    At the end of a step, a loop that prefetches has batches that no forward pass has used. After a
    restart, these very batches must come first, and the random generators must then have the state
    that they had. So the state before each call is kept until a forward pass has used its batch
    (:meth:`used`, called by the manager's forward hook), and calls that are outstanding when a
    checkpoint is taken are replayed first.

    A batch is identified by its memory. If the loop moves or converts it after the call, only the
    order identifies it: a forward pass on something else uses the batch that came last, unless
    batches have been identified by their memory so far.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        functools.update_wrapper(self, fn)
        self._keys = _Keys()
        self._outstanding: list[_Call] = []
        self._used: list[_Call] = []
        self._replay: list[tuple[str, dict[str, Any]]] = []
        self._warned = False
        #: Arguments of calls whose batches were identified by their memory; and whether another's
        #: was identified by the order.
        self._followed: set[str] = set()
        self._by_order = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = self._keys.of(args, kwargs)
        now = None
        for i, (wanted, before) in enumerate(self._replay):
            if wanted in (key, repr((args, sorted(kwargs.items())))):
                del self._replay[i]
                now = rng.get()
                rng.put(before)
                break
        else:
            before = rng.get()
        try:
            batch = self.fn(*args, **kwargs)
        finally:
            if now is not None:
                rng.put(now)
        # Of calls of a kind whose batches are nowhere, or cannot be followed, only the latest can
        # still be waiting to be used.
        gone = [call for call in self._outstanding if call.key == key and not call.is_alive()]
        if gone:
            self._warn(f"{self._name()} returned a batch before any forward pass had used the previous one")
        self._outstanding = [call for call in self._outstanding if call not in gone][-_IN_HAND_MAX:]
        self._outstanding.append(_Call(key, before, batch))
        return batch

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"everstep: {what}, so a restart may repeat or skip a batch; convert batches and move them to the device inside "
                f"{self._name()}, and pass the models that use them to CheckpointManager",
                stacklevel=4,
            )

    def used(self, places: list[Place]) -> None:
        """Records a forward pass on tensors in this memory."""
        batches = _those_on(places, self._outstanding)
        if batches:
            self._followed.update(call.key for call in batches)
        else:
            if not self._outstanding or _in_backward() or any(call.is_among(places) for call in self._used):
                return
            latest = self._outstanding[-1]
            if latest.is_alive() and (latest.key in self._followed or (self._followed and not self._by_order)):
                # Batches are used unchanged: this pass is on something else (validation, noise).
                return
            self._by_order = True
            batches = [latest]
            same = [call for call in self._outstanding if call.key == latest.key]
            if len(same) > 1:
                self._warn(f"a forward pass used none of the {len(same)} outstanding batches of {self._name()}")
        self._outstanding = [call for call in self._outstanding if call not in batches]
        self._used = [call for call in self._used if call.is_alive()][-_USED_MAX:] + batches

    def _name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def state_dict(self) -> dict[str, Any]:
        """Returns the calls whose batches are unused, each with the random state before it."""
        if self._replay:
            missing = ", ".join(key for key, _ in self._replay)
            warnings.warn(
                f"everstep: {self._name()} was not called with the arguments of a batch that was outstanding at the checkpoint "
                f"({missing}); that batch is skipped",
                stacklevel=4,
            )
            self._replay = []
        return {"outstanding": [[call.key, call.before] for call in self._outstanding]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the calls to replay, in their order."""
        with reading("the state of a batch function"):
            replay = [(key, before) for key, before in state["outstanding"]]
        for _, before in replay:
            rng.check(before)
        self._replay = replay
        self._outstanding, self._used = [], []


def resumable(fn: F) -> F:
    """Makes a batch function ``Stateful``: pass it as ``data=`` to :class:`CheckpointManager`.

    Its batches must depend only on the random generators of torch, numpy or Python and on its
    arguments. It returns tensors in the form in which the model's forward pass takes them.
    """
    return Resumable(fn)  # type: ignore[return-value]


def watch_forward(state: dict[str, Any]) -> None:
    """Makes forward passes of any module among ``state`` use batches."""
    batches = [o for o in state.values() if isinstance(o, Resumable)]
    if not batches:
        return

    def used(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        places = _places((args, kwargs))
        for batch in batches:
            batch.used(places)

    for obj in state.values():
        if hasattr(obj, "register_forward_pre_hook"):
            obj.register_forward_pre_hook(used, with_kwargs=True)
