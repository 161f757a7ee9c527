"""Reads the pickle that ``torch.distributed.checkpoint`` writes as ``.metadata`` without running
any of it.

A pickle is a program: names of functions, and calls of them. Here, nothing is looked up and nothing
is called: a name stays a :class:`Made` with its arguments, and the reader accepts the few names
that DCP writes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .._internal import CheckpointError

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "INT", "LONG", "FLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_MARK = object()

#: The names in DCP's metadata, in all versions of torch since 2.0.
ALLOWED = {
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
    "torch.Size",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
    "pathlib.Path", "pathlib.PosixPath", "pathlib._local.Path", "pathlib._local.PosixPath",
}  # fmt: skip


@dataclass(eq=False)
class Made:
    """A name, or what the pickle would have made by calling it: never looked up, never called."""

    name: str
    called: bool = False
    args: tuple[Any, ...] = ()
    state: Any = None
    #: Items that would have been set in it.
    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(eq=False)
class Pairs:
    """A dict that is not built yet, because its keys may be anything."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


def refused(what: str) -> CheckpointError:
    """Returns the error for what is not read here, with an alternative."""
    return CheckpointError(
        f"{what}; everstep does not unpickle it, because that could run anything. If you trust its author, load it with "
        "torch.distributed.checkpoint in a program of your own, and save only tensors, numbers, strings and containers of them"
    )


def loads(data: bytes) -> Any:
    """Returns the contents of the pickle.

    Raises:
        CheckpointError: for operations and names that DCP's metadata does not have.
        ValueError: and others of :mod:`pickletools`, when it is not a pickle.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for op, arg, _ in pickletools.genops(data):
        if op.name == "STOP":
            (value,) = stack
            return value
        if not step(op.name, arg, stack, memo, _name):
            raise refused(
                f"the metadata has the operation {op.name}, which torch.distributed.checkpoint does not write"
            )
    raise ValueError("the pickle does not end")


def step(op: str, arg: Any, stack: list[Any], memo: dict[int, Any], name: Callable[[str, str], Made]) -> bool:
    """Does one operation of a pickle. ``name`` returns what stands for a name of a module.

    Returns whether the operation is known.
    """
    if op in ("PROTO", "FRAME"):
        return True
    if op in _VALUES:
        stack.append(arg)
    elif op in _CONSTANTS:
        stack.append(_CONSTANTS[op])
    elif op == "MARK":
        stack.append(_MARK)
    elif op in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
        memo[len(memo) if op == "MEMOIZE" else int(arg)] = stack[-1]
    elif op in ("BINGET", "LONG_BINGET", "GET"):
        stack.append(memo[int(arg)])
    elif op in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"):
        stack.append({"EMPTY_DICT": Pairs, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[op]())
    elif op in ("TUPLE1", "TUPLE2", "TUPLE3"):
        n = int(op[-1])
        stack[-n:] = [tuple(_popped(stack, n))]
    elif op == "TUPLE":
        stack.append(tuple(marked(stack)))
    elif op in ("APPEND", "APPENDS"):
        values = marked(stack) if op == "APPENDS" else [stack.pop()]
        _a(list, stack[-1]).extend(values)
    elif op in ("SETITEM", "SETITEMS"):
        values = marked(stack) if op == "SETITEMS" else [stack.pop(-2), stack.pop()]
        target = stack[-1]
        if len(values) % 2 or not isinstance(target, (Pairs, Made)):
            raise ValueError("items of what has none")
        target.items.extend(zip(values[::2], values[1::2], strict=True))
    elif op == "GLOBAL":
        stack.append(name(*str(arg).split(" ", 1)))
    elif op == "STACK_GLOBAL":
        last, module = stack.pop(), stack.pop()
        stack.append(name(_a(str, module), _a(str, last)))
    elif op in ("REDUCE", "NEWOBJ"):
        args, made = stack.pop(), stack.pop()
        stack.append(Made(_a(Made, made).name, True, _a(tuple, args)))
    elif op == "BUILD":
        state = stack.pop()
        _a(Made, stack[-1]).state = state
    elif op == "POP":
        stack.pop()
    else:
        return False
    return True


def _popped(stack: list[Any], n: int) -> list[Any]:
    values = stack[-n:]
    if len(values) != n or _MARK in values:
        raise ValueError("the pickle's stack is too short")
    return values


def marked(stack: list[Any]) -> list[Any]:
    """Takes what lies above the last mark off the stack, and the mark."""
    at = len(stack) - 1
    while stack[at] is not _MARK:
        at -= 1
        if at < 0:
            raise ValueError("the pickle has no mark")
    values = stack[at + 1 :]
    del stack[at:]
    return values


def _a(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _name(module: str, name: str) -> Made:
    full = f"{module}.{name}"
    # A dtype is a name of torch's; the code that expects a dtype checks which one it is.
    if full in ALLOWED or (module == "torch" and name.isidentifier()):
        return Made(full)
    raise refused(f"the metadata names {full[:200]}, which torch.distributed.checkpoint does not write")
