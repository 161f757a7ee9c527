"""Reads and restores the state of every random generator that a training loop uses."""

from __future__ import annotations

import hashlib
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
        random.Random().setstate(_python(state["python"]))
        torch.Generator().set_state(_bytes(state["torch"]))
        if "numpy" in state:
            import numpy

            numpy.random.RandomState(_bit_generator(state["numpy"])()).set_state(_numpy(state["numpy"]))
        for device in state.get("cuda", ()):
            _bytes(device)


def _python(state: Any) -> tuple[Any, ...]:
    """Returns a state as :mod:`random` takes it."""
    version, internal, gauss = state
    if type(internal) is bytes:
        return version, tuple(array("I", internal)), gauss
    # A range may be longer than any memory.
    if type(internal) not in (list, tuple):
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
    if name not in _BIT_GENERATORS:
        raise ValueError(f"numpy's generator {name!r}")
    return getattr(numpy.random, name)


def _numpy(state: Any) -> Any:
    import numpy

    if isinstance(state, dict):
        return state
    name, keys, pos, has_gauss, cached = state
    if not 0 <= pos <= 624:
        raise ValueError(f"position {pos} of numpy's generator")
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
                "only theirs are restored; make the same number of GPUs visible for the same random numbers",
                stacklevel=6,
            )
        for device, generator in enumerate(state["cuda"][:here]):
            torch.cuda.set_rng_state(_bytes(generator), device)
