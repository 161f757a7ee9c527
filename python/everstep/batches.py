"""Makes a batch function resumable, also in loops that prefetch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from . import rng

F = TypeVar("F", bound=Callable[..., Any])


class Resumable:
    """A batch function with a state.

    A loop that prefetches has, at the end of a step, one batch in hand that no forward pass has
    used. After a restart that very batch must come first, and the random generators must then stand
    where they stood. So the state before each call is kept until a forward pass has used its batch
    (:meth:`consumed`, called by the manager's forward hook), and calls that are outstanding when a
    checkpoint is taken are replayed first.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        functools.update_wrapper(self, fn)
        self._outstanding: list[tuple[str, dict[str, Any]]] = []
        self._replay: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = repr((args, sorted(kwargs.items())))
        for i, (wanted, before) in enumerate(self._replay):
            if wanted == key:
                del self._replay[i]
                return self._call_again(key, before, args, kwargs)
        before = rng.get()
        result = self.fn(*args, **kwargs)
        # Only the latest call of a kind can still be waiting to be used.
        self._outstanding = [(k, s) for k, s in self._outstanding if k != key]
        self._outstanding.append((key, before))
        return result

    def _call_again(self, key: str, before: dict[str, Any], args: Any, kwargs: Any) -> Any:
        now = rng.get()
        rng.put(before)
        try:
            result = self.fn(*args, **kwargs)
        finally:
            rng.put(now)
        self._outstanding.append((key, before))
        return result

    def consumed(self) -> None:
        """A forward pass began: it uses the batch that came last."""
        if self._outstanding:
            self._outstanding.pop()

    def state_dict(self) -> dict[str, Any]:
        """Calls whose batches are in hand, each with the random state before it."""
        return {"outstanding": [[key, state] for key, state in self._outstanding]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Calls to replay, in their order."""
        self._replay = [(key, before) for key, before in state["outstanding"]]
        self._outstanding = []


def resumable(fn: F) -> F:
    """Makes a batch function ``Stateful``: pass it as ``data=`` to :class:`CheckpointManager`.

    Its batches must depend on the random generators of torch, numpy or Python and on its arguments
    only.
    """
    return Resumable(fn)  # type: ignore[return-value]


def watch_forward(state: dict[str, Any]) -> None:
    """A forward pass of any module among ``state`` uses the batch that came last."""
    batches = [o for o in state.values() if isinstance(o, Resumable)]
    if not batches:
        return

    def used(*_: Any) -> None:
        for batch in batches:
            batch.consumed()

    for obj in state.values():
        if hasattr(obj, "register_forward_pre_hook"):
            obj.register_forward_pre_hook(used)
