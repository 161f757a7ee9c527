"""Halves the time in which the scripts of tests import torch.

Most tests start such processes, which spend most of their time on parts of torch that the tests do
not use:

- Its compiler: every optimizer imports ``torch._dynamo``, to say that its methods are not to be
  compiled. As long as nothing else of the compiler was used, nothing compiles, and there is nothing
  to say.
- Kernels for tensors without data that are written in Python, and ``torch.export``.
- Garbage collection, which goes through all that was imported, several times, and once more at the
  end of the process.

Whatever a script uses of these modules imports them. The Python bindings of the CUDA driver are the
exception: on a machine without the driver they count as not installed, and torch does without them.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
#: Imported for what it registers: nothing asks it for anything.
_KERNELS = "torch._meta_registrations"
#: Seconds for what threads of a process group still have to do. torch aborts if one of them needs
#: the interpreter while that ends, which takes a second longer with the compiler.
_THREADS_END = 0.2
#: What was asked of these modules: they are imported.
_wanted: set[str] = set()


class _NotYet(ModuleType):
    """Stands for a module until something is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name in ("__spec__", "__file__", "__wrapped__"):
            # The import system and inspect look for these in any module.
            raise AttributeError(name)
        return getattr(_imported(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_imported(self.__name__), name, value)


class _Part:
    """Stands for a module of the compiler, and knows some of its answers without it."""

    def __init__(self, name: str, **known: Any) -> None:
        self._name = name
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_imported(_COMPILER), self._name), name)


class _NoCompiler(_NotYet):
    """Stands for the compiler until anything else is asked of it."""

    #: A process group clears what was derived from these rules.
    trace_rules = _Part("trace_rules", clear_lru_cache=lambda: None)
    #: DistributedDataParallel asks how it would be compiled: this is the default.
    utils = _Part("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """Ends the part of a function that is compiled as one."""

    @staticmethod
    def disable(fn: Callable[..., Any], recursive: bool = True, **_: Any) -> Callable[..., Any]:
        """Returns the function such that it is not compiled, also if the compiler is imported
        later."""
        exempt: list[Callable[..., Any]] = []

        def inner(*args: Any, **kwargs: Any) -> Any:
            if isinstance(sys.modules.get(_COMPILER), _NotYet):
                return fn(*args, **kwargs)
            if not exempt:
                exempt.append(sys.modules[_COMPILER].disable(fn, recursive, wrapping=False))
            return exempt[0](*args, **kwargs)

        return inner


def _imported(name: str) -> ModuleType:
    if name != _KERNELS:
        # The order in which torch imports them.
        _imported(_KERNELS)
    if isinstance(sys.modules.get(name), _NotYet):
        _wanted.add(name)
        del sys.modules[name]
        importlib.import_module(name)
    return sys.modules[name]


def _leave() -> None:
    """Skips the garbage collection at the end of the process, unless a process group is still
    there, or libraries of the compiler, which report what was not collected."""
    group = sys.modules.get("torch.distributed")
    has_group = group is not None and group.is_available() and group.is_initialized()
    if has_group:
        time.sleep(_THREADS_END)
    elif isinstance(sys.modules[_COMPILER], _NotYet):
        gc.freeze()


class _Kernels(Loader):
    """Finds and loads, for the kernels, what stands for them. torch imports them when all else is
    there."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns how this module is loaded, if it is the one."""
        return ModuleSpec(name, cls()) if name == _KERNELS and name not in _wanted else None

    def exec_module(self, module: ModuleType) -> None:
        """Does what generators need of what the kernels import (torch._prims.rng_prims)."""
        import torch

        if hasattr(torch._C, "_set_generator_metaclass"):
            import torch._custom_class_base

            torch._C._set_generator_metaclass(torch._custom_class_base.CustomClassBaseMeta)
        module.__class__ = _NotYet


sys.meta_path.insert(0, _Kernels)
sys.modules[_COMPILER] = _NoCompiler(_COMPILER)
sys.modules["torch.export"] = _NotYet("torch.export")

if not os.path.exists("/dev/nvidiactl"):
    for name in ("cuda.bindings", "pynvml"):
        # The import system raises ImportError for these.
        sys.modules[name] = None  # type: ignore[assignment]

gc.set_threshold(100_000, 20, 100)
# Registered first, so it runs after what everstep and scripts have registered.
atexit.register(_leave)
