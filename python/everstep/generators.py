"""Reads the states of the global random generators of Python, numpy and torch, but only when they
have changed.

States are read number by number, which takes longer than copying a small model, and most steps use
no generator. CPython's ``_random.Random``, numpy's ``RandomState`` with an ``MT19937`` and torch's
generator for the CPU keep their state in place, so unchanged memory means an unchanged state.
Whether this interpreter, this numpy and this torch do that is tested once, on generators made for
the test; if one does not, its state is read each time.
"""

from __future__ import annotations

import _random
import random
import sys
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from ._internal import WatchedMemory, memory_at

#: The count of numbers in an MT19937, and the bytes of numpy's ``mt19937_state``, which stores a
#: position after them.
_NUMBERS = 624
_MT19937_BYTES = (_NUMBERS + 1) * 4
#: Where the numbers begin in the state that torch's generator returns. Each takes eight bytes
#: there.
_TORCH_NUMBERS_AT = 24
#: Bytes around the numbers in torch's ``CPUGeneratorImpl``: seed and position before them, two
#: cached normal samples after them.
_TORCH_BEFORE, _TORCH_BEHIND = 20, 28
#: The numbers begin within this many bytes of the ``CPUGeneratorImpl``, which is larger.
_TORCH_SEARCHED = 512


class _Memory:
    """Blocks of memory, as (address, bytes); the caller keeps them alive."""

    def __init__(self, *blocks: tuple[int, int]) -> None:
        self._blocks = [*blocks]

    def bytes(self) -> list[bytes]:
        return [memory_at(address, size) for address, size in self._blocks]

    def watched(self) -> WatchedMemory:
        return WatchedMemory(self._blocks)


def _own(obj: object, kind: type) -> tuple[int, int]:
    """An object's memory behind its header; the header is left out because it changes with the
    reference count."""
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


def _memory_of_torch(generator: torch.Generator, numbers_at: int) -> _Memory:
    address: int = generator._cdata  # type: ignore[attr-defined]
    return _Memory((address + numbers_at - _TORCH_BEFORE, _TORCH_BEFORE + 4 * _NUMBERS + _TORCH_BEHIND))


@cache
def _torch_numbers_at() -> int | None:
    """Returns the offset of the numbers in torch's generators for the CPU, from the address of the
    C++ object; ``None`` if not found."""
    try:
        generator = torch.Generator("cpu")
        generator.manual_seed(20240601)

        def returned() -> bytes:
            return generator.get_state().numpy().tobytes()

        numbers = array("I", array("Q", returned()[_TORCH_NUMBERS_AT : _TORCH_NUMBERS_AT + 8 * _NUMBERS])).tobytes()
        address: int = generator._cdata  # type: ignore[attr-defined]
        at = memory_at(address, _TORCH_SEARCHED).find(numbers[:32])
        if at < _TORCH_BEFORE or at % 4:
            return None
        memory = _memory_of_torch(generator, at)
        if numbers not in memory.bytes()[0]:
            return None
        # One of every two normal samples is cached. Every change of the state must change the
        # memory.
        for _ in range(3):
            for draw in (torch.rand, torch.randn, torch.randperm):
                before, seen = returned(), memory.bytes()
                draw(1 if draw is not torch.randperm else 3, generator=generator, device="cpu")
                if returned() == before or memory.bytes() == seen:
                    return None
    except (AssertionError, AttributeError, OverflowError, RuntimeError, TypeError, ValueError):
        return None
    return at


class _Seen(NamedTuple):
    """The value last read from a generator, the version of its memory before the read, and what lay
    beside it. ``sure`` means that the same was read twice at this version."""

    version: int
    value: Any
    beside: object
    sure: bool


class _Read:
    """The state that was last read from a generator, and the memory that shows whether it has
    changed."""

    def __init__(self, generator: object, memory: _Memory) -> None:
        self.generator = generator
        self._memory = memory.watched()
        #: One object, so that a thread that reads meanwhile, or an interrupt, leaves either all of
        #: it or nothing.
        self._seen: _Seen | None = None

    def value(self, read: Callable[[], Any], beside: object = None) -> Any:
        """Returns the last value, or that of ``read`` if anything may have changed. ``beside``
        belongs to the state but lies elsewhere."""
        version, seen = self._memory.version(), self._seen
        if seen is not None and (seen.version != version or seen.beside is not beside):
            seen = None
        if seen is not None and seen.sure:
            return seen.value
        value = read()
        # Around a single read, another thread may draw and put the state back. Two equal reads in a
        # row are trusted. The version is from before the read, so that a later change is noticed
        # next time.
        if seen is not None and value == seen.value:
            self._seen = _Seen(version, seen.value, beside, sure=True)
            return seen.value
        self._seen = _Seen(version, value, beside, sure=False)
        return value


_python: _Read | None = None
_numpy: _Read | None = None
_torch: _Read | None = None


def _read_python() -> list[Any]:
    version, internal, gauss = random.getstate()
    # As bytes: otherwise hundreds of numbers would be encoded one by one.
    return [version, array("I", internal).tobytes(), gauss]


def python() -> list[Any]:
    """The state of :mod:`random`: its version, its numbers and position as bytes, and the next
    number of ``gauss``."""
    global _python
    generator: Any = getattr(random, "_inst", None)
    if (
        type(generator) is not random.Random
        or getattr(random.getstate, "__self__", None) is not generator
        or not _python_is_in_place()
    ):
        return _read_python()
    if _python is None or _python.generator is not generator:
        _python = _Read(generator, _memory_of_python(generator))  # type: ignore[arg-type]
    read: list[Any] = _python.value(_read_python, generator.gauss_next)
    return read


def _read_numpy() -> Any:
    numpy = sys.modules["numpy"]
    found = numpy.random.get_state(legacy=False)
    if found["bit_generator"] == "MT19937":
        # The form that earlier versions wrote.
        return [
            "MT19937",
            found["state"]["key"].tobytes(),
            int(found["state"]["pos"]),
            int(found["has_gauss"]),
            float(found["gauss"]),
        ]
    return found


def numpy() -> Any:
    """The state of ``numpy.random``'s global generator; ``None`` if numpy was not imported."""
    global _numpy
    module = sys.modules.get("numpy")
    if module is None:
        return None
    generator = getattr(module.random.get_state, "__self__", None)
    bits = getattr(generator, "_bit_generator", None)
    if (
        type(generator) is not module.random.RandomState
        or type(bits) is not module.random.MT19937
        or not _numpy_is_in_place()
    ):
        return _read_numpy()
    if _numpy is None or _numpy.generator != (generator, bits):
        _numpy = _Read((generator, bits), _memory_of_numpy(generator))
    return _numpy.value(_read_numpy)


def _read_torch() -> bytes:
    # torch.get_rng_state() does the same, and takes longer. So does going through numpy.
    state = torch.default_generator.get_state()
    return memory_at(state.data_ptr(), state.numel())


def torch_cpu() -> bytes:
    """The state of torch's global generator for the CPU."""
    global _torch
    generator, numbers_at = torch.default_generator, _torch_numbers_at()
    if numbers_at is None:
        return _read_torch()
    if _torch is None or _torch.generator is not generator:
        _torch = _Read(generator, _memory_of_torch(generator, numbers_at))
    read: bytes = _torch.value(_read_torch)
    return read
