"""Warns about optimizers that train what is saved and are not saved themselves: created again in
the loop, or never given to the manager."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from .optimizer_state import kind_of, parameters_of
from .state import State


class UnsavedOptimizers:
    """Warns once about each. ``torch.save`` at the end of a step would have looked up the name; a
    manager keeps the object that it was given."""

    def __init__(self, state: State) -> None:
        self._state = weakref.ref(state)
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet(state.optimizers)
        self._training: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        #: The given optimizer that is making a step, with those inside it.
        self._outer: Optimizer | None = None
        for optimizer in state.optimizers:
            optimizer.register_step_pre_hook(self._begins)
            optimizer.register_step_post_hook(self._ends)
        _register()
        _watched[state] = self

    def _begins(self, optimizer: Optimizer, *_: Any) -> None:
        self._outer = optimizer

    def _ends(self, *_: Any) -> None:
        self._outer = None

    def _stepped(self, optimizer: Optimizer) -> None:
        state = self._state()
        if state is None or (self._outer is not None and _saves(self._outer, optimizer)):
            return
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            self._look_at(optimizer, state)
        if optimizer in self._training:
            state.updated = True

    def _look_at(self, optimizer: Optimizer, state: State) -> None:
        modules = [o for o in state.objects.values() if isinstance(o, nn.Module)]
        trained = {id(p) for m in modules for p in m.parameters()} | {
            id(p) for o in state.optimizers for p in parameters_of(o)
        }
        if not any(id(p) in trained for p in parameters_of(optimizer)):
            return
        self._training.add(optimizer)
        if not any(optimizer.state.values()):
            return
        others = (o for n, o in state.objects.items() if o not in modules and n not in state.optimizers_by_name)
        if any(_holds(o, optimizer) for o in others if not isinstance(o, LRScheduler)):
            return
        warnings.warn(
            f"everstep: an optimizer ({kind_of(optimizer)}) trains parameters that are saved, but is not saved "
            "itself, so its state is lost after a restart; "
            "pass it to CheckpointManager; if the loop replaces an optimizer, change the parameter groups "
            "of the first one instead (add_param_group)",
            stacklevel=5,
        )


#: By the state of each manager that is still alive.
_watched: weakref.WeakKeyDictionary[State, UnsavedOptimizers] = weakref.WeakKeyDictionary()


@functools.cache
def _register() -> None:
    """Installs one hook for good: torch iterates over its hooks without a copy, so a manager that
    ends meanwhile must not remove one."""

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        for watcher in [*_watched.values()]:
            watcher._stepped(optimizer)

    register_optimizer_step_post_hook(stepped)


def _saves(outer: Optimizer, inner: Optimizer) -> bool:
    """Returns whether an optimizer has a way to save the one inside it with its own state."""
    own = type(outer).state_dict is Optimizer.state_dict and not outer._optimizer_state_dict_post_hooks
    return outer is inner or not own or inner.state is outer.state


def _holds(obj: Any, optimizer: Optimizer, depth: int = 3) -> bool:
    """Returns whether an object of the user refers to the optimizer, and may save it."""
    if obj is optimizer:
        return True
    inner = (
        obj.values()
        if isinstance(obj, dict)
        else obj
        if isinstance(obj, (list, tuple))
        else vars(obj).values()
        if hasattr(obj, "__dict__")
        else ()
    )
    return depth > 0 and any(_holds(i, optimizer, depth - 1) for i in list(inner))
