"""Limits on state that is not a tensor, for its encoder and its decoder: what is saved can be
read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: Limit on containers in containers when they are read; the encoder's own is less than
#: half of it. Code that
#: compares or copies a state takes several frames of Python's stack for each.
LEVELS_MAX = 250
#: Limit on what is hashed for one key or one element of a set.
HASHED_ELEMENTS_MAX = 1 << 20


def hashed_elements(value: Any) -> int:
    """Returns how many values ``hash()`` looks at. One that occurs twice counts twice."""
    if not isinstance(value, (tuple, frozenset)):
        return 1
    known: dict[int, int] = {}
    stack = [value]
    while stack:
        found = stack[-1]
        inner = [v for v in found if isinstance(v, (tuple, frozenset))]
        if waiting := [v for v in inner if id(v) not in known]:
            stack += waiting
            continue
        known[id(found)] = 1 + len(found) - len(inner) + sum(known[id(v)] for v in inner)
        stack.pop()
    return known[id(value)]


def check_hashed(value: Any) -> None:
    """Checks a value that was read, before it is hashed.

    Raises:
        ValueError: when that could take any amount of time.
    """
    if hashed_elements(value) > HASHED_ELEMENTS_MAX:
        raise ValueError("a key or an element of a set is too large")


def check_levels(value: Any) -> None:
    """Checks a value in which nothing occurs twice.

    Raises:
        ValueError: when it is nested more deeply than the limit.
    """
    level = [value]
    for _ in range(LEVELS_MAX + 1):
        containers = [v for v in level if isinstance(v, (list, tuple, dict))]
        if not containers:
            return
        level = [inner for v in containers for inner in (v.values() if isinstance(v, dict) else v)]
    raise ValueError("it is nested too deeply")


def hidden_method(kind: type, names: Iterable[Any]) -> Any:
    """Returns the first attribute that would hide a method of a container of this type, or is not a
    name; ``None`` if there is none."""
    return next((name for name in names if not isinstance(name, str) or hasattr(kind, name)), None)
