"""Saves or restores a batch of random states: ``save|restore DIRECTORY FIRST LAST [FAULT]``.

Prints one JSON line for each.
"""

from __future__ import annotations

import json
import struct
import sys
import warnings
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
import everstep as es
from figures.scripts.random_states import build, change

warnings.simplefilter("ignore")


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return bytes(plain.untyped_storage()) if plain.numel() else b""


def differs(saved: Any, found: Any, path: str) -> str | None:
    """Returns the first place where two values differ. Independent of everstep's own comparison."""
    if type(saved) is not type(found):
        return f"{path}: {type(saved)} became {type(found)}"
    if isinstance(saved, Tensor):
        same = saved.dtype == found.dtype and saved.shape == found.shape and saved.requires_grad == found.requires_grad
        return None if same and _bytes(saved) == _bytes(found) else f"{path}: {saved} became {found}"
    if isinstance(saved, float):
        return None if struct.pack("d", saved) == struct.pack("d", found) else f"{path}: {saved!r} became {found!r}"
    if isinstance(saved, complex):
        return differs((saved.real, saved.imag), (found.real, found.imag), path)
    if isinstance(saved, Mapping):
        attributes = [getattr(x, "default_factory", None) for x in (saved, found)]
        if len(saved) != len(found) or attributes[0] is not attributes[1]:
            return f"{path}: {saved} became {found}"
        # The order must be the same, too.
        for (k, v), (n, w) in zip(saved.items(), found.items(), strict=True):
            at = differs(k, n, f"{path} key") or differs(v, w, f"{path}/{k!r}")
            if at is not None:
                return at
        return None
    if isinstance(saved, (list, tuple, deque)):
        if len(saved) != len(found) or getattr(saved, "maxlen", None) != getattr(found, "maxlen", None):
            return f"{path}: {saved} became {found}"
        return next(
            (d for i, (a, b) in enumerate(zip(saved, found, strict=True)) if (d := differs(a, b, f"{path}[{i}]"))), None
        )
    if isinstance(saved, (set, frozenset)):
        return differs(sorted(map(repr, saved)), sorted(map(repr, found)), path) if saved != found else None
    if isinstance(saved, (np.ndarray, np.generic)):
        same = saved.dtype == found.dtype and saved.shape == found.shape and saved.tobytes() == found.tobytes()
        order = getattr(saved, "strides", None) == getattr(found, "strides", None)
        return None if same and order else f"{path}: {saved!r} became {found!r}"
    if isinstance(saved, torch.Generator):
        return differs(saved.get_state(), found.get_state(), path)
    if type(saved).__module__ not in ("builtins", "torch"):
        # Schedulers' options that are objects are compared by their attributes.
        return differs(vars(saved), vars(found), path) if hasattr(saved, "__dict__") else None
    return None if saved == found else f"{path}: {saved!r} became {found!r}"


def contents(obj: Any, *, loaded: bool) -> Any:
    """Returns what must be the same after a restore."""
    if isinstance(obj, nn.Module):
        live = {f"live {k}": v.detach() for k, v in obj.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
        exact = dict(obj.named_parameters()) if type(obj).__name__ != "Halved" else {}
        # What a load hook computes.
        derived = None if not hasattr(obj, "sum") else obj.sum if loaded else float(obj.weight.sum())
        return {"state": obj.state_dict(), "live": live, "parameters": exact, "derived": derived}
    if isinstance(obj, torch.optim.Optimizer):
        state = obj.state_dict()
        return {"state": dict(sorted(state["state"].items())), "param_groups": state["param_groups"]}
    return obj.state_dict()


def save(directory: Path, number: int) -> dict[str, Any]:
    objects, extra, kind = build(number, fresh=False)
    at = directory / str(number)
    ckpt = es.CheckpointManager(at, persist=1, **objects)
    try:
        ckpt.step(1, **extra)
        if number % 2:
            # By now, the structure of the state is known and kept.
            ckpt.step(2, **extra)
            change(number, objects)
            ckpt.step(3, **extra)
        ckpt.close()
    except es.CheckpointError as e:
        place = any(
            str(e).startswith(f"{name}{mark}") or f" {name}{mark}" in str(e)
            for name in [*objects, "extra"]
            for mark in (".", "/", "[", "=", " ")
        )
        return {"kind": kind, "refused": str(e), "placed": place, "published": any(at.glob("step-*"))}
    return {"kind": kind}


def restore(directory: Path, number: int) -> dict[str, Any]:
    at = directory / str(number)
    if not any(at.glob("step-*")):
        return {}
    expected, extra, _ = build(number, fresh=False)
    if number % 2:
        change(number, expected)
    objects, _, _ = build(number, fresh=True)
    ckpt = es.CheckpointManager(at, **objects)
    ckpt.restore()
    for name, obj in objects.items():
        at_ = differs(contents(expected[name], loaded=False), contents(obj, loaded=True), name)
        if at_ is not None:
            return {"different": at_[:400]}
    at_ = differs(extra, ckpt.extra, "extra")
    return {"different": at_[:400]} if at_ is not None else {"same": True}


def plant(fault: str) -> None:
    """Plants a defect in this process only, which the comparison must find."""
    from everstep import decoding, encoding, state

    if fault == "set":
        decoding._OF_ITEMS[decoding.FROZENSET] = set
    if fault == "conj":
        encoding.storable = state.storable = lambda tensor, path: tensor


def main() -> None:
    do, directory, first, last, *fault = sys.argv[1:]
    torch.set_num_threads(1)
    for name in fault:
        plant(name)
    for number in range(int(first), int(last)):
        try:
            row = {"save": save, "restore": restore}[do](Path(directory), number)
        except Exception as e:  # noqa: BLE001
            row = {"raised": f"{type(e).__name__}: {e}"[:400]}
        print(json.dumps({"number": number, **row}), flush=True)


if __name__ == "__main__":
    main()
