"""Nests the values of a checkpoint by their paths, as ``torch.distributed.checkpoint`` does:
numbers in a path are indices of a list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._internal import CheckpointError

Path = tuple[str | int, ...]
#: Limit on the levels of a state dict.
DEPTH_MAX = 64


class _Level(dict[Any, Any]):
    """A dict or list on the way to values."""


def put(state: dict[Any, Any], path: Path, value: Any) -> None:
    """Puts a value into the state, whose lists are not lists yet.

    Raises:
        ValueError: when the path contradicts that of another value.
    """
    *above, last = path
    for key in above:
        state = state.setdefault(key, _Level())
        if not isinstance(state, _Level):
            raise ValueError("its path leads through a value")
    if last in state:
        raise ValueError("its path is that of another value")
    state[last] = value


def with_lists(value: Any, path: str = "") -> Any:
    """Converts levels of numbers to lists.

    Raises:
        CheckpointError: when one is neither a list nor a dict.
    """
    if not isinstance(value, _Level) and type(value) is not dict:
        return value
    numbers = [k for k in value if type(k) is int]
    if isinstance(value, _Level) and numbers:
        if len(numbers) < len(value):
            raise CheckpointError(f"{path[1:]} has items by number and by name in the checkpoint")
        if (gap := next((n for n, k in enumerate(sorted(numbers)) if n != k), None)) is not None:
            raise CheckpointError(
                f"item {gap} of the list {path[1:]} is not in the checkpoint, which cannot be made whole without it; "
                "load what there is with torch.distributed.checkpoint.load() into a state dict of your own"
            )
        return [with_lists(value[k], f"{path}.{k}") for k in range(len(value))]
    return {k: with_lists(v, f"{path}.{k}") if isinstance(v, _Level) else v for k, v in value.items()}


def require_whole(paths: Iterable[Path]) -> None:
    """Checks that values with these paths make whole dicts and lists.

    Raises:
        CheckpointError: naming one that is not whole.
    """
    state: dict[Any, Any] = {}
    for path in paths:
        try:
            put(state, path, None)
        except ValueError as e:
            raise CheckpointError(f"{'.'.join(map(str, path))} cannot be put into one state dict: {e}") from e
    with_lists(state)
