"""Reads the states of Python's and numpy's global random generators, but only when they have changed.

Both are read number by number, which takes longer than copying a small model, and most steps use neither. CPython's ``_random.Random``
and numpy's ``RandomState`` with an ``MT19937`` keep their state in place, so unchanged memory means an unchanged state. Whether this
interpreter and this numpy do that is tested once, on generators made for the test; if one does not, its state is read each time.
"""

from __future__ import annotations

import _random
import random
import sys
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any

from ._internal import WatchedMemory, memory_at

#: Bytes of numpy's ``mt19937_state``: 624 numbers and a position.
_MT19937_BYTES = 625 * 4


class _Memory:
    """Blocks of memory, as (address, bytes); the caller keeps them alive."""

    def __init__(self, *blocks: tuple[int, int]) -> None:
        self._blocks = [*blocks]

    def bytes(self) -> list[bytes]:
        return [memory_at(address, size) for address, size in self._blocks]

    def watched(self) -> WatchedMemory:
        return WatchedMemory(self._blocks)


def _own(obj: object, kind: type) -> tuple[int, int]:
    """An object's memory behind its header; the header is left out because it changes with the reference count."""
    header = object.__basicsize__
    return id(obj) + header, kind.__basicsize__ - header


def _memory_of_python(generator: random.Random) -> _Memory:
    return _Memory(_own(generator, _random.Random))


def _memory_of_numpy(generator: Any) -> _Memory:
    address = generator._bit_generator.ctypes.state_address
    return _Memory(_own(generator, type(generator)), (address, _MT19937_BYTES))


@cache
def _python_is_in_place() -> bool:
    """Whether Python's generators keep their state where this module looks for it."""
    if sys.implementation.name != "cpython":
        return False
    generator = random.Random(20240601)
    memory = _memory_of_python(generator)
    before, numbers = memory.bytes(), array("I", generator.getstate()[1][:-1]).tobytes()
    generator.random()
    # The position in the numbers has changed, or all numbers have.
    return numbers in before[0] and memory.bytes() != before


@cache
def _numpy_is_in_place() -> bool:
    """Whether numpy's generators keep their state where this module looks for it."""
    try:
        import numpy

        generator = numpy.random.RandomState(numpy.random.MT19937(20240601))
        memory = _memory_of_numpy(generator)
        seen = [memory.bytes()]
        numbers = generator.get_state(legacy=False)["state"]["key"].tobytes()
        # The first call leaves a second number behind, so the second call draws nothing.
        for _ in range(2):
            generator.standard_normal()
            seen.append(memory.bytes())
    except (AttributeError, KeyError, TypeError, ValueError, NotImplementedError):
        return False
    return numbers in seen[0][1] and seen[0] != seen[1] and seen[1][1] == seen[2][1] and seen[1][0] != seen[2][0]


class _Read:
    """The state that was last read from a generator, and the memory that shows whether it has changed."""

    def __init__(self, generator: object, memory: _Memory) -> None:
        self.generator = generator
        self._memory = memory.watched()
        #: The memory's version when the value was read, the value, and what lay beside it. One object, so that a thread that reads
        #: meanwhile, or an interrupt, leaves either all of it or nothing.
        self._seen: tuple[int, Any, Any] | None = None

    def value(self, read: Callable[[], Any], beside: object = None) -> Any:
        """Returns the last value, or that of ``read`` if anything has changed. ``beside`` belongs to the state but lies elsewhere."""
        version, seen = self._memory.version(), self._seen
        if seen is None or seen[0] != version or seen[2] is not beside:
            # The version is from before the read, so what another thread draws meanwhile is noticed next time.
            self._seen = seen = (version, read(), beside)
        return seen[1]


_python: _Read | None = None
_numpy: _Read | None = None


def _read_python() -> list[Any]:
    version, internal, gauss = random.getstate()
    # As bytes: otherwise hundreds of numbers would be encoded one by one.
    return [version, array("I", internal).tobytes(), gauss]


def python() -> list[Any]:
    """The state of :mod:`random`: its version, its numbers and position as bytes, and the next number of ``gauss``."""
    global _python
    generator = getattr(random, "_inst", None)
    if type(generator) is not random.Random or getattr(random.getstate, "__self__", None) is not generator or not _python_is_in_place():
        return _read_python()
    if _python is None or _python.generator is not generator:
        _python = _Read(generator, _memory_of_python(generator))
    read: list[Any] = _python.value(_read_python, generator.gauss_next)
    return read


def _read_numpy() -> Any:
    numpy = sys.modules["numpy"]
    found = numpy.random.get_state(legacy=False)
    if found["bit_generator"] == "MT19937":
        # The form that earlier versions wrote.
        return ["MT19937", found["state"]["key"].tobytes(), int(found["state"]["pos"]), int(found["has_gauss"]), float(found["gauss"])]
    return found


def numpy() -> Any:
    """The state of ``numpy.random``'s global generator; ``None`` if numpy was not imported."""
    global _numpy
    module = sys.modules.get("numpy")
    if module is None:
        return None
    generator = getattr(module.random.get_state, "__self__", None)
    bits = getattr(generator, "_bit_generator", None)
    if type(generator) is not module.random.RandomState or type(bits) is not module.random.MT19937 or not _numpy_is_in_place():
        return _read_numpy()
    if _numpy is None or _numpy.generator != (generator, bits):
        _numpy = _Read((generator, bits), _memory_of_numpy(generator))
    return _numpy.value(_read_numpy)
