"""Checks the saved state of an optimizer before any of it is used."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._internal import DamagedError
from .damage import reading
from .sharded import Part


def checked(value: Any) -> Any:
    """Checks a decoded value: state by names of parameters, and groups; or an unchanged
    ``state_dict()``, as ``whole``.

    Raises:
        DamagedError: when it is neither.
    """
    with reading("the state of an optimizer"):
        if not isinstance(value, dict) or not (value.keys() == {"whole"} or _is_by_names(value)):
            raise DamagedError("the state of an optimizer is not what everstep writes", [])
    return value


def _is_by_names(value: dict[str, Any]) -> bool:
    state, groups, other, shapes = (
        value.get(key, empty) for key, empty in (("state", None), ("groups", None), ("other", []), ("shapes", {}))
    )
    if not (
        isinstance(state, dict) and isinstance(groups, list) and isinstance(other, list) and isinstance(shapes, dict)
    ):
        return False
    for key, _ in other:
        # Raises if it cannot be a key. A tensor would be one by identity.
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
