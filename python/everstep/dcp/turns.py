"""The order of saves. Two saves on one process group would interleave DCP's collectives, in another
order on each rank, so each waits for the one before it. What was staged is written meanwhile.

DCP does not tell a writer when a save ends, on ranks other than the first, and after an error. But
as long as it runs, DCP's own function is on the stack of its thread.
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

from torch.distributed.checkpoint import state_dict_saver

#: Functions of DCP that are on the stack of a thread that saves.
_SAVING = frozenset({"save", "save_state_dict", "_save_state_dict"})
#: Interval between two looks whether a save has ended.
LOOK = 0.002


def is_saving(thread: threading.Thread) -> bool:
    """Returns whether a thread is in one of DCP's functions that save."""
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name in _SAVING and frame.f_globals.get("__name__") == state_dict_saver.__name__:
            return True
        frame = frame.f_back
    return False


class Turn:
    """A save of the thread that creates this, which has begun."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._is_visible = is_saving(self._thread)
        self._left = threading.Event()

    def leave(self) -> None:
        """Notes that the thread has begun another save."""
        self._left.set()

    def is_over(self) -> bool:
        """Returns whether the save has ended, with or without success. Its thread may do anything
        else by now, such as wait for a save of another thread."""
        if self._left.is_set() or not self._thread.is_alive():
            return True
        return self._is_visible and not is_saving(self._thread)

    def wait(self) -> None:
        """Waits until it has ended."""
        while not self.is_over():
            time.sleep(LOOK)


_lock = threading.Lock()
_latest: Turn | None = None
_mine = threading.local()


def begin() -> tuple[Turn, Turn | None]:
    """Makes the save of this thread the latest one. Returns it, and the one before, which must end
    before DCP's collectives of this one begin."""
    global _latest
    with _lock:
        earlier: Turn | None = getattr(_mine, "turn", None)
        if earlier is not None:
            earlier.leave()
        mine = _mine.turn = Turn()
        before, _latest = _latest, mine
    return mine, before
