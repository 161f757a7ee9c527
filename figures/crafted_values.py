"""Changes to single values: numbers, trees of msgpack or JSON, and bytes."""

from __future__ import annotations

import random
from typing import Any

EDGES = [
    0,
    1,
    -1,
    4,
    4096,
    1 << 20,
    (1 << 31) - 1,
    1 << 32,
    (1 << 53) + 1,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    1 << 64,
]


def number(r: random.Random, n: int) -> int:
    """Returns a number near ``n``, or one at an edge."""
    return n + r.randint(-8, 8) if r.random() < 0.5 else r.choice(EDGES)


def odd(r: random.Random) -> Any:
    """Returns a value of another type."""
    return r.choice(
        [
            None,
            True,
            -1,
            1.5,
            "x",
            "",
            b"b",
            [],
            {},
            [1],
            [[[]]],
            {"a": 1},
            {1: [1]},
            {24: 0},
            {24: 99},
            {18: "none"},
            {20: []},
            float("nan"),
            1 << 63,
        ]
    )


def tree(r: random.Random, node: Any) -> Any:
    """Returns the value with one node changed."""
    if isinstance(node, dict) and node and r.random() < 0.85:
        key = r.choice(list(node))
        what = r.random()
        if what < 0.1:
            return {k: v for k, v in node.items() if k != key}
        if what < 0.2:
            other = r.choice([r.randint(0, 30), "x", "params", "state"])
            return {(other if k == key else k): v for k, v in node.items()}
        return {k: (tree(r, v) if k == key else v) for k, v in node.items()}
    if isinstance(node, list) and node and r.random() < 0.85:
        at = r.randrange(len(node))
        what = r.random()
        if what < 0.1:
            return node[:at] + node[at + 1 :]
        if what < 0.2:
            return [*node[:at], node[at], *node[at:]]
        return [tree(r, v) if i == at else v for i, v in enumerate(node)]
    if isinstance(node, bool) or node is None:
        return odd(r)
    if isinstance(node, int) and r.random() < 0.7:
        return min(max(number(r, node), -(1 << 63)), (1 << 64) - 1)
    if isinstance(node, float) and r.random() < 0.7:
        return r.choice([0.0, -1.0, 1e308, float("inf"), node * 2])
    if isinstance(node, (str, bytes)) and node and r.random() < 0.7:
        at = r.randrange(len(node))
        return r.choice(
            [node[:at], node + node[:at], node[:at] + (b"\xff" if isinstance(node, bytes) else "\x00") + node[at + 1 :]]
        )
    return odd(r)


def noise(r: random.Random, data: bytes) -> bytes:
    """Returns the data with some bytes changed."""
    changed = bytearray(data)
    for _ in range(r.randint(1, 4)):
        at = r.randrange(len(changed) + 1)
        what = r.randrange(4)
        if what == 0:
            del changed[at:]
        elif what == 1:
            changed[at:at] = bytes(
                r.choice([0x91, 0xC1, 0xC7, 0xDD, 0x81, 0xFF, 0x24]) for _ in range(r.randint(1, 600))
            )
        elif at < len(changed):
            changed[at] ^= 1 << r.randrange(8)
    return bytes(changed)
