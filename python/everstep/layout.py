"""What sort of object a saved value belongs to, which decides what the value has to look like."""

from __future__ import annotations

from typing import Any

from ._internal import CheckpointError

MODULE, OPTIMIZER, OTHER = "module", "optimizer", "other"


def guessed(value: Any, *, in_module: bool) -> str:
    """Guesses the kind of an object in an earlier checkpoint, which does not record it.

    Args:
        value: the object's value, decoded.
        in_module: whether the checkpoint has tensors of a module of this name.
    """
    if isinstance(value, dict) and ({"state", "groups"} <= value.keys() or value.keys() == {"whole"}):
        return OPTIMIZER
    return MODULE if in_module and isinstance(value, dict) else OTHER


def mismatch(name: str, saved: str | None, own: str) -> CheckpointError:
    """Returns the error for an object that is of another kind than when it was saved."""
    return CheckpointError(
        f"{name}= is of kind {saved or 'none'!r} in the checkpoint, but of kind {own!r} here; "
        "pass the same kinds of objects as when it was saved"
    )
