"""Captures one step after another into slots, without an agent and without torch, until it is
killed.

Every byte of step N is a function of N, so that a reader of a slot can tell whether it contains
exactly one step.
"""

from __future__ import annotations

import ctypes
import sys
from array import array

from everstep import _internal

TENSORS, WORDS = 48, 16_384


def content(step: int, tensor: int) -> bytes:
    """Returns the contents of a tensor at a step."""
    return array("Q", [(step * 1_000_003 + tensor) * 0x9E3779B97F4A7C15 & (2**64 - 1)]).tobytes() * WORDS


def main() -> None:
    paths, first = sys.argv[1].split(","), int(sys.argv[2])
    arena = _internal.Arena(paths, "writer", 0, 1, 1)
    arena.populate()
    size = WORDS * 8
    memory = [ctypes.create_string_buffer(size) for _ in range(TENSORS)]
    entries = [_internal.Entry(f"t{i}", "U8", [size], size) for i in range(TENSORS)]
    sources = [_internal.Source(ctypes.addressof(m), size, i % 7 == 0) for i, m in enumerate(memory)]
    layout = _internal.SlotLayout(entries, sources)
    step = first
    while True:
        step += 1
        for i, m in enumerate(memory):
            ctypes.memmove(m, content(step, i), size)
        arena.capture(step, layout, [], None, 2, None, False, False)
        arena.wait()
        # Printed only once the step is sealed.
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
