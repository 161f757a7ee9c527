"""The state of every random generator that a training loop uses, and how to put it back."""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from typing import Any

import torch


def get() -> dict[str, Any]:
    """Python's, torch's, numpy's (if it was imported) and all GPUs' generators."""
    version, internal, gauss = random.getstate()
    # As bytes: at each step hundreds of numbers would be encoded one by one.
    state: dict[str, Any] = {"python": [version, array("I", internal).tobytes(), gauss], "torch": torch.get_rng_state().numpy().tobytes()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [name, keys.tobytes(), *(int(r) if isinstance(r, int) else float(r) for r in rest)]
    if torch.cuda.is_initialized():
        state["cuda"] = [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()]
    return state


def diverge(rank: int) -> None:
    """Another rank's state was put: go on from there in a way of this rank's own, the same every time."""
    seed = int.from_bytes(hashlib.blake2b(torch.get_rng_state().numpy().tobytes() + rank.to_bytes(8, "little"), digest_size=8).digest(), "little")
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


def put(state: dict[str, Any]) -> None:
    """Puts a state of :func:`get` back."""
    version, internal, gauss = state["python"]
    if isinstance(internal, bytes):
        internal = array("I", internal)
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if "numpy" in state:
        import numpy

        name, keys, pos, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), pos, int(has_gauss), cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in state["cuda"]])
