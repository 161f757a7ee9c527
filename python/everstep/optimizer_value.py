"""Checks the saved state of an optimizer before any of it is used."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._internal import CheckpointError, DamagedError
from .damage import reading
from .sharded import Part
from .value_limits import check_hashed

#: What a value by names of parameters may have.
_KEYS = {"state", "groups", "other", "shapes", "names", "values", "sharded", "kind"}


def checked(value: Any) -> Any:
    """Checks a decoded value: state by names of parameters, and groups; or an unchanged
    ``state_dict()``, as ``whole``.

    Raises:
        CheckpointError: when it has more than this version restores.
        DamagedError: when it is neither.
    """
    with reading("the state of an optimizer"):
        if isinstance(value, dict) and "groups" in value and (unknown := value.keys() - _KEYS):
            raise CheckpointError(
                f"the state of an optimizer in the checkpoint has {min(map(str, unknown))!r}, which this everstep does not know; "
                "install the version that wrote it"
            )
        if not isinstance(value, dict) or not (value.keys() == {"whole"} or _is_by_names(value)):
            raise DamagedError("the state of an optimizer is not what everstep writes", [])
    return value


def require_restorable(name: str, value: dict[str, Any]) -> None:
    """Refuses the state of an optimizer that :func:`checked` would not accept when it is restored.

    Args:
        name: the optimizer.
        value: its state by names of parameters, and its groups.

    Raises:
        CheckpointError: naming what cannot be restored.
    """
    at = None
    if wrong := next((n for n, s in value["state"].items() if not isinstance(s, dict)), None):
        at = f"the state of {wrong} is a {type(value['state'][wrong]).__name__}, not a dict by name"
    for number, group in enumerate(value["groups"]):
        if (key := next((k for k in group if not isinstance(k, str)), None)) is not None:
            at = f"an option of parameter group {number} has the key {key!r}, which is not a string"
        elif not _is_group(group):
            at = f"param_names of parameter group {number} does not have a name for each of its parameters"
    if at is not None:
        raise CheckpointError(f"{name}=: {at}; everstep could not restore this optimizer")


def _is_by_names(value: dict[str, Any]) -> bool:
    state, groups, other, shapes = (
        value.get(key, empty) for key, empty in (("state", None), ("groups", None), ("other", []), ("shapes", {}))
    )
    if not (
        isinstance(state, dict) and isinstance(groups, list) and isinstance(other, list) and isinstance(shapes, dict)
    ):
        return False
    for key, _ in other:
        # These raise if it cannot be a key. A tensor would be one by identity.
        check_hashed(key)
        hash(key)
        if isinstance(key, Tensor):
            return False
    good = all(isinstance(n, str) and isinstance(s, dict) for n, s in state.items()) and all(map(_is_group, groups))
    good = good and all(isinstance(n, str) and _is_shape(s) for n, s in shapes.items())
    good = good and type(value.get("names")) in (int, bool, str, type(None))
    # A tensor that is not wanted is not read.
    values = value.get("values", {})
    good = (
        good
        and isinstance(values, dict)
        and all(
            isinstance(n, str) and n.startswith("param_") and isinstance(v, (Tensor, Part, type(None)))
            for n, v in values.items()
        )
    )
    sharded = value.get("sharded", [])
    good = good and isinstance(sharded, list) and all(isinstance(n, str) for n in sharded)
    return good and isinstance(value.get("kind"), (str, type(None)))


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)


def _is_group(group: Any) -> bool:
    """Returns whether this is a group: its parameters by name, and options by name."""
    if (
        not isinstance(group, dict)
        or not all(isinstance(k, str) for k in group)
        or not isinstance(params := group.get("params"), list)
    ):
        return False
    labels = group.get("param_names")
    return all(isinstance(n, str) for n in params) and (not isinstance(labels, list) or len(labels) == len(params))
