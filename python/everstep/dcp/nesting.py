"""Nests the values of a checkpoint by their paths, as ``torch.distributed.checkpoint`` does:
numbers in a path are indices of a list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._internal import CheckpointError

Path = tuple[str | int, ...]
#: Limit on the levels of a state dict.
DEPTH_MAX = 64
#: Empty dicts in lists that a state may have beside as many as it has values: nothing is saved of
#: them, and they may not take any amount of memory (40 MB).
_EMPTY_FREE = 1 << 19


def check(paths: Iterable[Path]) -> None:
    """Checks that paths are those of one rank's state: what other ranks have at the same place may
    be something else.

    Raises:
        ValueError: when no state has all of them.
    """
    # The kind of key that each level has; a value has none.
    levels: dict[Path, type | None] = {}
    for path in paths:
        for n, key in enumerate(path):
            if levels.setdefault(path[:n], type(key)) is not type(key):
                raise ValueError(f"{_text(path)} contradicts another path")
        if path in levels:
            raise ValueError(f"{_text(path)} contradicts another path")
        levels[path] = None


class _Level(dict[Any, Any]):
    """A dict or list on the way to values."""


def nested(values: Mapping[str, Any], mappings: Mapping[str, Path]) -> dict[str, Any]:
    """Returns the state dict.

    Args:
        values: what was saved, by fully qualified name.
        mappings: the path of each value of the state, also of those that were not saved.

    Raises:
        CheckpointError: when the paths contradict each other, or an item of a list was not saved.
    """
    state = _Level()
    for name, value in values.items():
        _put(state, mappings.get(name, (name,)), value)
    known = {path[: n + 1] for path in mappings.values() for n in range(len(path))}
    whole: dict[str, Any] = _Nesting(known, len(values) + _EMPTY_FREE).made(state, ())
    return whole


def _put(state: dict[Any, Any], path: Path, value: Any) -> None:
    *above, last = path
    for key in above:
        state = state.setdefault(key, _Level())
        if not isinstance(state, _Level):
            raise CheckpointError(f"{_text(path)} has a path that leads through another value of the checkpoint")
    if last in state:
        raise CheckpointError(f"{_text(path)} has the path of another value of the checkpoint")
    state[last] = value


class _Nesting:
    def __init__(self, known: set[Path], empty: int) -> None:
        self._known, self._empty = known, empty

    def made(self, value: Any, path: Path) -> Any:
        """Returns a value with its levels made dicts and lists."""
        if not isinstance(value, _Level):
            return value
        numbers = [key for key in value if type(key) is int]
        if not numbers or not path:
            return {key: self.made(inner, (*path, key)) for key, inner in value.items()}
        if len(numbers) < len(value) or min(numbers) < 0:
            raise CheckpointError(f"{_text(path)} has items by number and by name in the checkpoint")
        return [
            self.made(value[n], (*path, n)) if n in value else self._missing((*path, n))
            for n in range(max(numbers) + 1)
        ]

    def _missing(self, path: Path) -> dict[str, Any]:
        """Returns an empty dict, which torch does not save, for an item of a list."""
        self._empty -= 1
        if path in self._known or self._empty < 0:
            raise CheckpointError(
                f"{_text(path)} is not in the checkpoint, which has other items of its list; load what there is with "
                "torch.distributed.checkpoint.load() into a state dict of your own"
            )
        return {}


def _text(path: Path) -> str:
    return ".".join(map(str, path))
