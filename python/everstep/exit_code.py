"""The exit code with which a script reports that it has failed.

A process that aborts while its interpreter shuts down loses it, and the interpreter shows it to
nobody before. So it is recorded where it is given.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from typing import Any, NoReturn

#: The outermost frame while a script runs: its module, or what ``python -m`` calls. The interpreter
#: has none when it handles an exception that nobody has caught, and others when it shuts down.
_OF_SCRIPTS = ("<module>", "_run_module_as_main")


class _Raised:
    """Lives as long as the exception of one ``sys.exit()``."""


class ExitCode:
    """The exit code of this process's script, as far as it is known before the process ends."""

    def __init__(self) -> None:
        #: 0 as long as the script has not failed.
        self.value = 0
        self._latest: weakref.ref[_Raised] | None = None

    def watch(self) -> None:
        """Records the exit codes that the main thread gives to ``sys.exit()``."""
        inner, main = sys.exit, threading.main_thread()

        @functools.wraps(inner)
        def leave(status: Any = None, /) -> NoReturn:
            try:
                inner(status)
            except SystemExit as error:
                if threading.current_thread() is main:
                    code = status if isinstance(status, int) else int(status is not None)
                    self.value = code & 0xFF or int(code != 0)
                    raised = error._everstep = _Raised()  # type: ignore[attr-defined]
                    self._latest = weakref.ref(raised, self._dropped)
                raise

        sys.exit = leave

    def went_on(self) -> None:
        """Records that the script does something that it cannot do once it has failed."""
        if self.value and threading.current_thread() is threading.main_thread():
            self.value = 0

    def _dropped(self, raised: weakref.ref[_Raised]) -> None:
        """Takes back an exit code whose exception is gone although the script still runs: it was
        caught."""
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        if raised is self._latest and frame.f_code.co_name in _OF_SCRIPTS:
            self.went_on()
