"""How much memory a file of ``torch.save`` may take, for its length.

A tensor whose elements share memory (``expand()``), a compressed record, or one list that occurs in
many others: each takes a few bytes of a file, and once written out, any amount of memory.
"""

from __future__ import annotations

import os
import zipfile
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .._internal import CheckpointError

#: Memory that any file may take, and how often a file may hold the same elements (tied weights).
_FREE, _TIMES = 64 << 20, 32
#: An element of a container, in bytes.
_ELEMENT = 8


def _refused(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what}; if you trust its author, load it with torch.load in your own program, clone() its tensors, and save it again"
    )


def length_of(data: BinaryIO) -> int:
    """Returns the length of a file, from its current position (and keeps that)."""
    at = data.tell()
    end = data.seek(0, os.SEEK_END)
    data.seek(at)
    return end - at


def check_packed(data: BinaryIO, what: str) -> None:
    """Checks, before anything is loaded, that the records of a file are no longer than the file:
    ``torch.save`` compresses nothing.

    Raises:
        CheckpointError: when they are.
        ValueError: when its table of records cannot be read.
    """
    at, length = data.tell(), length_of(data)
    try:
        with zipfile.ZipFile(data) as file:
            claimed = sum(record.file_size for record in file.infolist())
    except (zipfile.BadZipFile, OSError) as e:
        raise ValueError(str(e)) from e
    data.seek(at)
    if claimed > length:
        raise _refused(f"{what} has {length} bytes, but its records have {claimed}, and torch.save compresses none")


class Allowance:
    """The memory that the values in files of ``length`` bytes may take once they are written
    out."""

    def __init__(self, length: int) -> None:
        self._length, self._left = length, _FREE + _TIMES * length

    def take(self, value: Any, what: str) -> None:
        """Takes what one of the values needs.

        Raises:
            CheckpointError: when not enough is left.
        """
        # Not by identity: what occurs twice is written twice.
        stack = [value]
        while stack:
            value = stack.pop()
            if isinstance(value, Tensor):
                # Others have no elements in memory, and cannot be written.
                if value.layout is torch.strided and not value.is_meta:
                    self._left -= value.numel() * value.element_size()
            elif isinstance(value, (str, bytes, bytearray)):
                self._left -= len(value)
            elif isinstance(value, (list, tuple, set, dict)):
                self._left -= _ELEMENT * len(value)
                if self._left >= 0:
                    stack.extend([*value, *value.values()] if isinstance(value, dict) else value)
            if self._left < 0:
                raise _refused(
                    f"the values of {what} would take more than {_TIMES} times the {self._length} bytes of their files (and "
                    f"{_FREE >> 20} MiB): some repeat a few elements (expand()), or occur many times"
                )
