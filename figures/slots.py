"""The superblock of a slot in shared memory: the first words of its file.

See ``crates/checkpoint/src/arena.rs``.
"""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import NamedTuple

WRITING, SEALED = 1, 2


class Superblock(NamedTuple):
    """Fields of a superblock, all zero if there is no slot."""

    state: int = 0
    #: For a parity shard, the number of its stripe.
    rank: int = 0
    step: int = 0
    index_bytes: int = 0
    region_bytes: int = 0
    generation: int = 0


def superblock(slot: Path) -> Superblock:
    """Reads a slot's superblock."""
    with contextlib.suppress(OSError), slot.open("rb") as f:
        head = f.read(11 * 8)
        if len(head) == 11 * 8:
            words = struct.unpack("<11Q", head)
            return Superblock(words[1] & 0xFF, words[4], words[6], words[8], words[10], words[5])
    return Superblock()
