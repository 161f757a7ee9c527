"""Turns whatever a damaged or crafted checkpoint makes a reader raise into one error, and a lack of
memory into another one."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ._internal import CheckpointError, DamagedError

#: UnicodeDecodeError is a ValueError, KeyError and IndexError are LookupErrors, torch's own are
#: RuntimeErrors. numpy raises SyntaxError for some dtypes.
_RAISED = (
    LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, MemoryError, RuntimeError, AssertionError,
    EOFError, BufferError, SyntaxError, pickle.UnpicklingError,
)  # fmt: skip


class Unavailable(CheckpointError):
    """A checkpoint, which may be good, needs what this machine does not have."""


class OutOfMemory(CheckpointError):
    """There is not enough memory to read a checkpoint, which may be good: no older one replaces
    it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether memory was lacking. For memory of the host, torch raises a plain
    RuntimeError."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return "DefaultCPUAllocator: " in text or text.startswith(
        ("CUDA error: out of memory", "CUDA driver error: out of")
    )


def out_of_memory(error: BaseException) -> OutOfMemory:
    """Returns the error to raise for a lack of memory."""
    text = str(error).partition("\n")[0][:300]
    return OutOfMemory(
        f"there is not enough memory to read the checkpoint ({type(error).__name__}{text and ': '}{text}); "
        "free host or GPU memory, or use a machine with more memory, and start again"
    )


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns errors of the enclosed code, which decodes bytes of a checkpoint, into one: the
    checkpoint is damaged, not the program.

    Raises:
        DamagedError: for any error that bytes can cause; errors of everstep's own pass.
        OutOfMemory: when memory is lacking. The enclosed code allocates no more than the file has.
        Unavailable: when a package is missing that the values need (numpy).
    """
    try:
        yield
    except CheckpointError:
        raise
    except ImportError as e:
        raise Unavailable(
            f"the checkpoint needs {e.name or 'a package'}, which cannot be imported ({str(e)[:300]}); install it"
        ) from e
    except _RAISED as e:
        if is_out_of_memory(e):
            raise out_of_memory(e) from e
        raise DamagedError(f"{what} cannot be read: {type(e).__name__}: {str(e)[:300]}", []) from e


@contextmanager
def loading(name: str, obj: object) -> Iterator[None]:
    """Turns errors of the enclosed code, which gives an object its state, into a refusal. That is
    not damage: what everstep knows of the state has been checked before.

    Raises:
        CheckpointError: naming the object, for any error; those of everstep's own pass.
        OutOfMemory: when memory is lacking.
    """
    try:
        yield
    except Exception as e:
        if isinstance(e, CheckpointError) and not isinstance(e, DamagedError):
            raise
        if is_out_of_memory(e):
            raise out_of_memory(e) from e
        damage = isinstance(e, DamagedError)
        raise CheckpointError(
            f"{name}=: load_state_dict() of {type(obj).__module__}.{type(obj).__qualname__} rejected the state in the "
            f"checkpoint: {e.args[0] if damage else f'{type(e).__name__}: {e}'}"
        ) from (None if damage else e)
