"""Checks the options of :class:`everstep.CheckpointManager`.

An option of the wrong type must not be taken for another one: ``persist=2.0`` would otherwise mean
"auto".
"""

from __future__ import annotations

import math
import operator
from datetime import timedelta
from typing import Any, Literal


def _refused(name: str, value: object, wanted: str, kind: type[Exception] = TypeError) -> Exception:
    return kind(f"{name}={value!r}: give {wanted}")


def count(name: str, value: Any, least: int, wanted: str) -> int:
    """Checks an integer, numpy's included, of at least ``least``.

    Raises:
        TypeError: when it is not an integer.
        ValueError: when it is less.
    """
    if isinstance(value, bool):
        raise _refused(name, value, wanted)
    try:
        number = operator.index(value)
    except TypeError:
        raise _refused(name, value, wanted) from None
    if number < least:
        raise _refused(name, value, wanted, ValueError)
    return number


def snapshot_interval(value: Any) -> int | None:
    """Checks ``every``: steps, or ``None`` for "auto"."""
    if isinstance(value, timedelta):
        raise TypeError("every= is a number of steps, or 'auto': time passes differently on each rank")
    return None if _is_auto(value) else count("every", value, 1, "a number of steps, at least 1, or 'auto'")


def durable_interval(value: Any) -> int | timedelta | Literal["auto"]:
    """Checks ``persist``: steps, time, or "auto"."""
    wanted = "a number of steps (0: no durable checkpoints), a timedelta, or 'auto'"
    if isinstance(value, timedelta):
        return _above_zero("persist", value, wanted)
    return "auto" if _is_auto(value) else count("persist", value, 0, wanted)


def budget(value: Any) -> float | None:
    """Checks ``stall_budget``: a part of the training time."""
    if value is None:
        return None
    wanted = "the part of the training time that checkpoints may cost, from 0 to 1, such as 0.01"
    if isinstance(value, (bool, str, bytes)):
        raise _refused("stall_budget", value, wanted)
    try:
        part = float(value)
    except (TypeError, ValueError):
        raise _refused("stall_budget", value, wanted) from None
    if not (math.isfinite(part) and 0 <= part <= 1):
        raise _refused("stall_budget", value, wanted, ValueError)
    return part


def span(name: str, value: Any) -> timedelta | None:
    """Checks a length of time above zero, or ``None``."""
    wanted = "a timedelta above zero, or None"
    if value is None:
        return None
    if not isinstance(value, timedelta):
        raise _refused(name, value, wanted)
    return _above_zero(name, value, wanted)


def _above_zero(name: str, value: timedelta, wanted: str) -> timedelta:
    if value <= timedelta(0):
        raise _refused(name, value, wanted, ValueError)
    return value


def flag(name: str, value: Any) -> bool:
    """Checks True or False."""
    if not isinstance(value, bool):
        raise _refused(name, value, "True or False")
    return value


def flag_or_auto(name: str, value: Any) -> bool | Literal["auto"]:
    """Checks True, False or "auto"."""
    if _is_auto(value):
        return "auto"
    if not isinstance(value, bool):
        raise _refused(name, value, "True, False or 'auto'")
    return value


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"
