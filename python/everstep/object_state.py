"""Gives objects their state back."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from .damage import loading


def load(name: str, obj: Any, value: Any) -> None:
    """Calls the object's ``load_state_dict`` with a value of a checkpoint.

    Raises:
        CheckpointError: naming the object, if it rejects the value.
    """
    with loading(name, obj):
        if _is_torchs_scheduler(obj):
            _require_form(obj, value)
        obj.load_state_dict(value)


def _is_torchs_scheduler(obj: Any) -> bool:
    """Returns whether torch's own code reads the state of an object."""
    return isinstance(obj, LRScheduler) and type(obj).load_state_dict.__module__ == LRScheduler.__module__


def _require_form(scheduler: Any, value: Any) -> None:
    """Raises TypeError unless a value has the form of a scheduler's state.

    torch's schedulers take it as it is: containers that hold each other a hundred times, or a range
    of 2^60, would keep them busy for ever.
    """
    if not isinstance(value, dict):
        raise TypeError(f"it is a {type(value).__name__}, not a dict")
    for name in ("lr_lambdas", "_schedulers"):
        if not isinstance(value.get(name, []), list):
            raise TypeError(f"its {name} is a {type(value[name]).__name__}, not a list")
    for attributes in (*value.get("lr_lambdas", []), value.get("_scale_fn_custom")):
        if not isinstance(attributes, dict | None):
            raise TypeError(f"the attributes of a function are a {type(attributes).__name__}, not a dict")
    # Where the numbers differ, torch decides.
    for one, state in zip(getattr(scheduler, "_schedulers", []), value.get("_schedulers", []), strict=False):
        if _is_torchs_scheduler(one):
            _require_form(one, state)
