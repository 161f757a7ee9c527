"""Looks through a file of ``torch.save`` before torch loads it.

``torch.load(weights_only=True)`` runs no code of the file, but calls what it allows with any
arguments: ``bytearray(n)`` takes ``n`` bytes, and ``torch.Tensor(n)`` is whatever lay in memory.
``torch.save`` writes neither.
"""

from __future__ import annotations

import io
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any, BinaryIO

import torch

from .restricted_unpickler import Made, marked, step
from .sizes import check_packed

#: How torch recognizes its own files.
ZIP = b"PK\3\4"
#: Calls the function that it is given (function, type, arguments, state): torch.save writes it for
#: a tensor of a subclass or with attributes.
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
#: Classes whose calls return memory that nobody has written.
_MEMORY = {
    "torch.Tensor",
    "torch.UntypedStorage",
    "torch.storage.UntypedStorage",
    "torch.storage.TypedStorage",
    *(f"{made.__module__}.{made.__name__}" for made in torch._tensor_classes),
}


def check(data: BinaryIO, what: str) -> None:
    """Checks a file, from its current position (and keeps that).

    Raises:
        CheckpointError: when its records are longer than the file.
        ValueError: when it is not a file of ``torch.save``, or calls what that never writes.
    """
    at = data.tell()
    if data.read(len(ZIP)) != ZIP:
        # The form before, several pickles in a row, may name storages and not contain them.
        raise ValueError(
            "it is not in the form that torch.save has written since torch 1.6; if it is older, load it with torch.load and save it again"
        )
    data.seek(at)
    check_packed(data, what)
    # torch's own reader: another one might see other records in the same file.
    archive = torch._C.PyTorchFileReader(data)
    pickled = archive.get_record("data.pkl")
    data.seek(at)
    _check_calls(pickled)


def _check_calls(pickled: bytes) -> None:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for op, arg, _ in pickletools.genops(io.BytesIO(pickled)):
        if op.name == "STOP":
            return
        if op.name in ("REDUCE", "NEWOBJ"):
            _check_call(*stack[-2:])
        if op.name == "BINPERSID":
            stack[-1] = Made("torch.storage", True)
        elif op.name == "EMPTY_SET":
            stack.append(Made("builtins.set", True))
        elif op.name == "SHORT_BINSTRING":
            stack.append(arg)
        elif op.name == "APPEND" and isinstance(stack[-2], Made):
            stack.pop()
        elif op.name == "APPENDS":
            values = marked(stack)
            if isinstance(stack[-1], list):
                stack[-1].extend(values)
        elif not step(op.name, arg, stack, memo, _any_name):
            # Nor does torch know this operation.
            return
    raise ValueError("the pickle does not end")


def _check_call(made: Any, args: Any) -> None:
    if not isinstance(args, tuple):
        return
    name = _name_of(made)
    while name == _FROM_TYPE:
        given = args[2] if len(args) == 4 else None
        name = _name_of(args[0]) if isinstance(given, tuple) else ""
        if not name:
            raise ValueError(f"it calls {_FROM_TYPE} without a function, which torch.save does not write")
        args = given
    if name in _MEMORY or (name == "builtins.bytearray" and not all(map(_is_content, args))):
        raise ValueError(f"it calls {name}, which torch.save does not write")


def _name_of(made: Any) -> str:
    """Returns the name of what would be called; an empty one for what is no name, or was called."""
    return made.name if isinstance(made, Made) and not made.called else ""


def _is_content(arg: Any) -> bool:
    """Returns whether an argument of ``bytearray()`` is what it contains. A number is its length,
    and so is a tensor of one number."""
    return isinstance(arg, (str, bytes)) or (isinstance(arg, Made) and arg.name == "_codecs.encode")


def _any_name(module: str, name: str) -> Made:
    """Returns what torch would look up, by the names of Python 3."""
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    return Made(f"{IMPORT_MAPPING.get(module, module)}.{name}")
