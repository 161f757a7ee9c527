"""Measures how long the loop waits for data, where torch's data loaders return a batch."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .worker import _Worker


def watch(worker: _Worker) -> bool:
    """Watches all data loaders of this process
    (``torch.utils.data.dataloader._BaseDataLoaderIter.__next__``). Returns False if torch's module
    is not loaded completely yet."""
    module = sys.modules.get("torch.utils.data.dataloader")
    base = getattr(module, "_BaseDataLoaderIter", None)
    if base is None:
        return module is not None
    inner = base.__next__
    main = threading.main_thread()

    def next_batch(iterator: Any) -> Any:
        board = worker.board
        # The time in a section (an evaluation) counts as that section's.
        if board is None or worker.sections or threading.current_thread() is not main:
            return inner(iterator)
        board.enter("data", 0, 0)
        try:
            return inner(iterator)
        finally:
            board.enter("", 0, 0)

    base.__next__ = next_batch
    return True
