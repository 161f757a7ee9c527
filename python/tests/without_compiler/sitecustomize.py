"""Spares the scripts of tests the import of torch's compiler, unless they use it.

Every optimizer imports ``torch._dynamo``, to say that its methods are not to be compiled. That takes almost as long as the import of
torch itself, and most tests start such processes. As long as nothing else of the compiler was used, nothing compiles, and there is
nothing to say. Whatever else is asked of it imports it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"


class _NotYet(ModuleType):
    """Stands for the compiler until something else than these two functions is asked of it."""

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """Ends the part of a function that is compiled as one."""

    @staticmethod
    def disable(fn: Callable[..., Any], recursive: bool = True, **_: Any) -> Callable[..., Any]:
        """Returns the function such that it is not compiled, also if the compiler is imported later."""
        exempt: list[Callable[..., Any]] = []

        def inner(*args: Any, **kwargs: Any) -> Any:
            if isinstance(sys.modules.get(_NAME), _NotYet):
                return fn(*args, **kwargs)
            if not exempt:
                exempt.append(sys.modules[_NAME].disable(fn, recursive, wrapping=False))
            return exempt[0](*args, **kwargs)

        return inner

    def __getattr__(self, name: str) -> Any:
        if name in ("__spec__", "__file__", "__wrapped__"):
            # The import system and inspect look for these in any module.
            raise AttributeError(name)
        return getattr(_imported(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_imported(), name, value)


def _imported() -> ModuleType:
    if isinstance(sys.modules.get(_NAME), _NotYet):
        del sys.modules[_NAME]
        importlib.import_module(_NAME)
    return sys.modules[_NAME]


sys.modules[_NAME] = _NotYet(_NAME)
