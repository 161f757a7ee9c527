"""What a damaged or crafted checkpoint makes a reader raise, turned into one error at one place."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from ._internal import CheckpointError, DamagedError

#: UnicodeDecodeError is a ValueError, KeyError and IndexError are LookupErrors, torch's own are RuntimeErrors.
_RAISED = (
    LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, MemoryError, RuntimeError, AssertionError,
    EOFError, BufferError, pickle.UnpicklingError,
)  # fmt: skip


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Around whatever makes sense of bytes of a checkpoint: it is damaged, not the program, when that fails.

    Raises:
        DamagedError: for any error that bytes can cause; errors of everstep's own pass.
    """
    try:
        yield
    except CheckpointError:
        raise
    except _RAISED as e:
        raise DamagedError(f"{what} cannot be read: {type(e).__name__}: {str(e)[:300]}", []) from e
