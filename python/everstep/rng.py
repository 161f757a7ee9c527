"""Reads and restores the state of every random generator that a training loop uses."""

from __future__ import annotations

import hashlib
import operator
import random
import sys
import warnings
from array import array
from typing import Any

import torch

from . import generators
from .damage import reading

#: The kinds that numpy's global generator can have.
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def get() -> dict[str, Any]:
    """Returns the states of Python's, torch's, numpy's (if it was imported) and all GPUs'
    generators, for :func:`put` and :func:`same`."""
    state: dict[str, Any] = {"python": generators.python(), "torch": generators.torch_cpu()}
    numpy = generators.numpy()
    if numpy is not None:
        state["numpy"] = numpy
    if torch.cuda.is_initialized():
        state["cuda"] = [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()]
    return state


def same(state: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns True only if no generator has changed between the two calls of :func:`get`. May
    return False for equal states that were read twice."""
    return (
        state.keys() == other.keys()
        and state["python"] is other["python"]
        and state.get("numpy") is other.get("numpy")
        and state["torch"] == other["torch"]
        and state.get("cuda") == other.get("cuda")
    )


def diverge(rank: int) -> None:
    """Seeds the generators from another rank's state, which was restored before: differently on
    each rank, and reproducibly."""
    seed = int.from_bytes(
        hashlib.blake2b(torch.get_rng_state().numpy().tobytes() + rank.to_bytes(8, "little"), digest_size=8).digest(),
        "little",
    )
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if numpy.random.get_state(legacy=False)["bit_generator"] == "MT19937":
            numpy.random.seed(seed % (1 << 32))
        else:
            numpy.random.set_bit_generator(type(numpy.random.get_bit_generator())(seed))


def check(state: dict[str, Any]) -> None:
    """Checks a state for :func:`put`.

    Raises:
        DamagedError: when it could not be restored.
    """
    with reading("the state of the random generators"):
        generator, saved = random.Random(), _python(state["python"])
        generator.setstate(saved)
        if generator.getstate() != saved:
            raise ValueError("the numbers of a generator are not those of Python's")
        torch.Generator().set_state(_bytes(state["torch"]))
        if "numpy" in state:
            _check_numpy(state["numpy"])
        devices = state.get("cuda", [])
        if type(devices) is not list:
            raise ValueError(f"expected the generators of GPUs, found {type(devices).__name__}")
        for device in devices:
            _bytes(device)


def _python(state: Any) -> tuple[Any, ...]:
    """Returns a state as :mod:`random` takes it."""
    version, internal, gauss = state
    if type(version) is not int or type(gauss) not in (float, type(None)):
        raise ValueError("a state that is not one of Python's generator")
    if type(internal) is bytes:
        return version, tuple(array("I", internal)), gauss
    # A range may be longer than any memory.
    if type(internal) not in (list, tuple) or not all(type(n) is int for n in internal):
        raise ValueError(f"expected the numbers of a generator, found {type(internal).__name__}")
    return version, tuple(internal), gauss


def _bytes(state: Any) -> torch.Tensor:
    # From a number n, bytearray() makes n bytes.
    if type(state) is not bytes:
        raise ValueError(f"expected the bytes of a generator, found {type(state).__name__}")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _bit_generator(state: Any) -> Any:
    """Returns the class of numpy's bit generator."""
    import numpy

    name = state["bit_generator"] if isinstance(state, dict) else state[0]
    if type(name) is not str or name not in _BIT_GENERATORS:
        raise ValueError("the name of numpy's generator is unknown")
    return getattr(numpy.random, name)


def _check_position(position: Any, end: int) -> None:
    if not 0 <= operator.index(position) <= end:
        raise ValueError(f"a position of numpy's generator is not between 0 and {end}")


def _check_numpy(saved: Any) -> None:
    """Checks a state of numpy's generator.

    Raises:
        ValueError: when numpy would take another one from it.
    """
    import numpy

    generator = numpy.random.RandomState(_bit_generator(saved)())
    state = _numpy(saved)
    generator.set_state(state)
    taken: Any = generator.get_state(legacy=False) if isinstance(state, dict) else generator.get_state()
    if not _equal(state, taken):
        raise ValueError("numpy would take another state from it")


def _equal(saved: Any, taken: Any) -> bool:
    import numpy

    if isinstance(saved, dict):
        return all(key in taken and _equal(value, taken[key]) for key, value in saved.items())
    if isinstance(saved, tuple):
        return len(saved) == len(taken) and all(map(_equal, saved, taken))
    if isinstance(saved, numpy.ndarray):
        return numpy.array_equal(saved, taken)
    return bool(saved == taken) or (saved != saved and taken != taken)


def _require_plain(state: dict[Any, Any], *, levels: int = 1) -> None:
    """Refuses what numpy would read number by number, at any depth."""
    import numpy

    for value in state.values():
        if isinstance(value, dict) and levels:
            _require_plain(value, levels=0)
        elif not isinstance(value, (str, int, float, numpy.integer, numpy.floating)) and not (
            isinstance(value, numpy.ndarray) and value.dtype.kind in "ui" and value.ndim == 1
        ):
            raise ValueError(f"a {type(value).__name__} in the state of numpy's generator")


def _numpy(state: Any) -> Any:
    import numpy

    if isinstance(state, dict):
        _require_plain(state)
        # numpy believes positions: it would read beyond the numbers.
        _check_position(state["state"].get("pos", 0), 624)
        _check_position(state.get("buffer_pos", 0), 4)
        return state
    name, keys, pos, has_gauss, cached = state
    _check_position(pos, 624)
    if type(keys) is not bytes or type(cached) is not float:
        raise ValueError("a state that is not one of numpy's generator")
    return name, numpy.frombuffer(keys, dtype=numpy.uint32), pos, int(has_gauss), cached


def put(state: dict[str, Any]) -> None:
    """Restores a state that :func:`get` returned."""
    random.setstate(_python(state["python"]))
    torch.set_rng_state(_bytes(state["torch"]))
    if "numpy" in state:
        import numpy

        kind = _bit_generator(state["numpy"])
        if numpy.random.get_state(legacy=False)["bit_generator"] != kind.__name__:
            numpy.random.set_bit_generator(kind())  # type: ignore[attr-defined]
        numpy.random.set_state(_numpy(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        here = torch.cuda.device_count()
        if here < len(state["cuda"]):
            warnings.warn(
                f"everstep: the checkpoint has the random generators of {len(state['cuda'])} GPUs, but this process sees {here}: "
                "only the generators of the visible GPUs are restored; to get the same random numbers, make as many GPUs visible as before",
                stacklevel=6,
            )
        for device, generator in enumerate(state["cuda"][:here]):
            torch.cuda.set_rng_state(_bytes(generator), device)
