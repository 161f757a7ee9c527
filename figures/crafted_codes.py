"""Values as everstep's blobs write them, by the codes of their format: of any type, right and wrong
ones, nested deeply, and such that refer to each other.

Nothing here uses everstep.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from figures.crafted_values import EDGES

MARK = b"\xc1"
TUPLE, SET, FROZENSET, PAIRS, ORDERED, DEFAULT, COUNTER, DEQUE = range(1, 9)
BIG_INT, COMPLEX, TEXT, BYTEARRAY, RANGE, SLICE, ELLIPSIS = range(9, 16)
ARRAY, SCALAR, TENSOR, INLINE, SIZE, CONSTANT, DEVICE, GENERATOR, SAME = range(16, 25)

#: Whether something fits into msgpack's own integers.
_INTEGERS = [n for n in EDGES if -(1 << 63) <= n < 1 << 64]
KEYS = [
    "", "x", "params", "state", "groups", "values", "whole", "names", "kind", "other", "shapes", "sharded", "dtypes", "versions",
    "__everstep_module__", "__class__", "_metadata", "optimizer", "lr_lambdas", "param_names", "lr", "step", "numpy", "cuda",
    "model.0.weight", "param_0", "_extra_state", 0, 1, -1, 7, 18, 24, 25, 1 << 63, None, True, 1.5, float("nan"), b"k",
]  # fmt: skip
_NUMPY = [
    "<f4", "<f8", ">i2", "|b1", "<u8", "<c16", "08f4", "0f4", "2f4", "(2,)f4", "(0,)f4", "f4,f4", "O", "|O8", "V8", "|V0",
    "<U0", "<U3", "<U999999999", "|S0", "|S4", "<M8[ns]", "<M8[999999999999s]", "<m8", "e", "g", "?", "b", "", "x", "float32", "int\0",
]  # fmt: skip
_SHAPES: list[Any] = [
    [], [2], [1, 3], [2, 2], [0], [0, 1 << 62], [1 << 40, 0, 1 << 40], [1 << 63, 0], [-1], [-2, -3], [2.0], [True, True],
    ["x"], None, 4, "ab", [1] * 32, [1] * 33, [1] * 64, [1] * 65, [0] * 100, [[2]],
]  # fmt: skip
#: Positions in the buffers of generators, most of them outside.
_POSITIONS: list[Any] = [
    0, 1, 4, 5, 623, 624, 625, -1, -5, 1 << 20, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 40, -(1 << 40), -(1 << 63), 1 << 63,
    1.5, True, None, "1", {BIG_INT: b"\xff" * 20 + b"\x01"},
]  # fmt: skip

_Inner = Callable[[], Any]


def strange(r: random.Random, names: list[str], levels: int = 2) -> Any:
    """Returns any value of the format. ``names``: tensors that it may refer to."""

    def inner() -> Any:
        return strange(r, names, levels - 1) if levels else _own(r)

    return r.choice(_SORTS)(r, names, inner)


def _own(r: random.Random, *_: Any) -> Any:
    """A value that msgpack has itself."""
    return r.choice([
        None, True, False, 1.5, float("nan"), -0.0, "", "x", "\0", "é", b"", b"b", [], {}, [1, 2.5], ["a", "b"], {"a": 1},
        {1: 2, 3: 4}, r.choice(_INTEGERS), {r.choice(KEYS): 1}, {25: [1]}, {99: None}, {-1: []},
    ])  # fmt: skip


def _reference(r: random.Random, names: list[str], inner: _Inner) -> Any:
    name = r.choice([*names, "none"]) if r.random() < 0.95 else r.choice([None, 5, [], b"model.0.weight"])
    if r.random() < 0.6:
        return {TENSOR: name}
    note = r.choice([
        {}, {"grad": True}, {"parameter": True}, {"parameter": True, "grad": True}, {"device": "cuda:7"}, {"device": "meta"},
        {"device": ""},
        {"order": [1, 0]}, {"order": [0, 0]}, {"order": [0, 5]}, {"order": 3}, {"dtype": "complex128"}, {"dtype": "complex64"},
        {"dtype": "int64"}, {"dtype": "float4_e2m1fn_x2"}, {"dtype": "nn"}, {"dtype": 5}, {"sharded": [["S0"], [4, 4]]},
        {"sharded": [["R"], [2]]}, {"sharded": [["Psum"], [2]]}, {"sharded": []}, {"sharded": [["S99"], [1 << 40]]}, None, [], {1: 2},
    ])  # fmt: skip
    return {TENSOR: r.choice([[name, note], [name, note], [name], [name, note, 1]])}


def _same(r: random.Random, *_: Any) -> Any:
    return {SAME: r.choice([0, 1, 2, 5, 20, 300, 10**6, -1, -2, 1 << 63, 1.5, True, "x", None, [0]])}


def _elements(r: random.Random, dtype: str, shape: Any) -> bytes:
    """Returns the bytes of an array, most times as many as it has to have."""
    try:
        count = math.prod(shape) * np.dtype(dtype).itemsize
    except (TypeError, ValueError, SyntaxError):
        count = 8
    count = int(count) if isinstance(count, (int, float)) and 0 <= count < 4096 else 8
    return r.randbytes(count if r.random() < 0.8 else r.randrange(40))


def _array(r: random.Random, *_: Any) -> Any:
    dtype, shape = r.choice(_NUMPY), r.choice(_SHAPES)
    return {ARRAY: [dtype, _elements(r, dtype, shape), shape, r.choice([False, True, True, None, "x"])]}


def _scalar(r: random.Random, *_: Any) -> Any:
    dtype = r.choice(_NUMPY)
    return {SCALAR: [dtype, _elements(r, dtype, [])]}


def _inline(r: random.Random, *_: Any) -> Any:
    dtype, shape = r.choice(["F32", "U8", "BF16", "C64", "BOOL", "F8_E8M0", "F4", "", 5]), r.choice(_SHAPES)
    data = r.choice([_elements(r, "<f4", shape), b"", 1 << 40, "x"])
    return {
        INLINE: [dtype, shape, data, r.choice([{}, {}, {"grad": True}, {"order": [1, 0]}, {"parameter": True}, None])]
    }


def _number(r: random.Random, *_: Any) -> Any:
    big = {BIG_INT: r.randbytes(r.choice([0, 1, 8, 9, 100, 1780, 1800, 2500, 4000]))}
    return r.choice([
        big, big, {BIG_INT: "x"}, {BIG_INT: 4000}, {COMPLEX: [1.5, -0.0]}, {COMPLEX: [float("nan"), float("inf")]}, {COMPLEX: [1, 2]},
        {COMPLEX: [1.5]}, {RANGE: [0, 10, 3]}, {RANGE: [0, 1 << 62, 1]}, {RANGE: [0, 5, 0]}, {RANGE: [big, big, 1]}, {RANGE: []},
        {SLICE: [None, 5, None]}, {SLICE: [1]}, {SLICE: [[1], {}, "x"]}, {ELLIPSIS: None}, {ELLIPSIS: 5},
    ])  # fmt: skip


def _string(r: random.Random, *_: Any) -> Any:
    return r.choice([
        {TEXT: b"\xed\xa0\x80"}, {TEXT: b"x\xed\xbf\xbf" * r.choice([1, 400])}, {TEXT: b"\xff"}, {TEXT: b""}, {TEXT: "x"},
        {BYTEARRAY: b"b" * r.choice([0, 1, 5000])}, {BYTEARRAY: 1 << 34}, {BYTEARRAY: [1, 2]},
    ])  # fmt: skip


def _named(r: random.Random, *_: Any) -> Any:
    return r.choice([
        {CONSTANT: "torch.float32"}, {CONSTANT: "torch.sparse_coo"}, {CONSTANT: "torch.nn"}, {CONSTANT: 5}, {DEVICE: "cpu"},
        {DEVICE: "cuda:99"}, {DEVICE: "cuda:-1"}, {DEVICE: "meta"}, {DEVICE: "x" * 500}, {DEVICE: 0},
        {GENERATOR: ["cpu", r.randbytes(5056)]},
        {GENERATOR: ["cpu", b""]}, {GENERATOR: ["cuda", r.randbytes(16)]}, {GENERATOR: ["meta", r.randbytes(16)]}, {GENERATOR: []},
    ])  # fmt: skip


def _container(r: random.Random, names: list[str], inner: _Inner) -> Any:
    items = [inner() for _ in range(r.choice([0, 1, 2, 4]))]
    attributes = r.choice([None, None, {}, {"a": 1}, {"__class__": 1}, {1: 2}, [], "x"])
    return r.choice([
        {TUPLE: items}, {SET: items}, {FROZENSET: items}, {SIZE: items}, {SIZE: [2, -3, 1 << 62]}, {PAIRS: items},
        {PAIRS: [inner(), 1, inner(), 2]}, {ORDERED: [[inner(), inner()], attributes]}, {COUNTER: [[inner(), inner()], attributes]},
        {DEFAULT: [r.choice(["list", "None", "int", "nn", "", None, ["list"]]), [inner(), inner()]]},
        {DEQUE: [items, r.choice([None, 0, 1, -1, 1 << 63, 1.5, "x"])]}, {r.randrange(1, 9): inner()}, {r.randrange(1, 25): None}, items,
    ])  # fmt: skip


_SORTS = [
    _own,
    _reference,
    _reference,
    _same,
    _array,
    _scalar,
    _inline,
    _number,
    _string,
    _named,
    _container,
    _container,
]


def generator(r: random.Random) -> Any:
    """Returns a state of numpy's global generator, with any position in its buffer."""
    at, has = r.choice(_POSITIONS), r.choice([0, 1, 2, -1, 1 << 40])

    def array(dtype: str, count: int) -> Any:
        count += r.choice([0] * 8 + [1, -1])
        return {ARRAY: [dtype, r.randbytes(count * np.dtype(dtype).itemsize), [count], False]}

    def big() -> Any:
        return {BIG_INT: r.randbytes(r.choice([16, 17, 17, 40])) + b"\0"}

    key, after = array("<u4", 624), {"has_uint32": has, "uinteger": r.choice(_POSITIONS)}
    return r.choice([
        ["MT19937", r.randbytes(2496), at, has, 0.5],
        ["MT19937", r.randbytes(r.choice([2492, 2500, 0])), at, has, 0.5],
        {"bit_generator": "MT19937", "state": {"key": key, "pos": at}, "has_gauss": has, "gauss": 0.5},
        {"bit_generator": "MT19937", "state": {"key": key, "pos": at}},
        {"bit_generator": "Philox", "state": {"counter": array("<u8", 4), "key": array("<u8", 2)}, "buffer": array("<u8", 4),
         "buffer_pos": at,
         **after, "has_gauss": 0, "gauss": 0.0},
        {"bit_generator": "SFC64", "state": {"state": array("<u8", 4)}, **after, "has_gauss": 0, "gauss": 0.0},
        {"bit_generator": r.choice(["PCG64", "PCG64DXSM"]), "state": {"state": big(), "inc": big()}, **after, "has_gauss": 0, "gauss": 0.0},
        {"bit_generator": r.choice(["RandomState", "seed", "", 5]), "state": {}},
    ])  # fmt: skip


#: What opens and closes one level of each container around a value.
_LEVELS = [
    (b"\x91", b""), (b"\x81\xa1a", b""), (b"\x81\x01\x91", b""), (b"\x81\x04\x92\xa1a", b""), (b"\x81\x05\x92\x92\xa1a", b"\xc0"),
    (b"\x81\x05\x92\x90\x81\xa1a", b""), (b"\x81\x06\x92\xa4list\x92\xa1a", b""), (b"\x81\x08\x92\x91", b"\xc0"), (b"\x81\x03\x91", b""),
]  # fmt: skip
_DEPTHS = [
    50,
    90,
    99,
    100,
    101,
    120,
    160,
    170,
    200,
    250,
    300,
    330,
    400,
    480,
    500,
    511,
    512,
    700,
    1000,
    1023,
    1024,
    2000,
    5000,
]


def nested(r: random.Random) -> bytes:
    """Returns the msgpack of containers in containers."""
    some = r.sample(_LEVELS, r.choice([1, 1, 1, 3]))
    levels = [r.choice(some) for _ in range(r.choice(_DEPTHS))]
    return b"".join(before for before, _ in levels) + b"\x01" + b"".join(after for _, after in reversed(levels))


def nested_extensions(r: random.Random) -> bytes:
    """Returns the same as earlier versions wrote it: extension types in extension types."""
    codes = r.sample([1, 2, 7, 8, 9], r.choice([1, 1, 3]))
    found = b"\x01"
    for _ in range(r.choice(_DEPTHS)):
        code = r.choice(codes)
        # Pairs are lists of two, and a tensor of torch's is a kind and a name.
        items = b"\x91\x92\xa1a" if code == 8 else b"\x92\xa5dtype" if code == 7 else b"\x91"
        found = msgpack.packb(msgpack.ExtType(code, items + found))
    return found if r.random() < 0.5 else b"\x81\xa1a" + found


def doubled(r: random.Random, levels: int = 60) -> Any:
    """Returns containers that each hold the one before twice, once by its number. Numbers begin at
    0: it has to be decoded first."""
    sort = r.randrange(6)
    found: Any = {FROZENSET: []} if sort == 5 else [1]
    for n in range(levels):
        again = {SAME: n}
        found = [
            [found, again],
            {"a": found, "b": again},
            {TUPLE: [found, again]},
            {PAIRS: ["a", found, "b", again]},
            {ORDERED: [["a", found, "b", again], None]},
            {TUPLE: [found, again]},
        ][sort]
    # Tuples of what can be hashed: a key has to be, and hashes all that is in it.
    return r.choice([{SET: [found]}, {PAIRS: [found, 1]}, found]) if sort == 5 else found


def placed_first(r: random.Random, tree: Any, value: Any) -> Any:
    """Returns the tree with the value in a place that is decoded before all others."""
    named = isinstance(tree, dict) and all(isinstance(k, str) for k in tree)
    if named and tree and r.random() < 0.6:
        (key, first), *rest = tree.items()
        return {key: placed_first(r, first, value), **dict(rest)}
    if isinstance(tree, list) and tree and r.random() < 0.6:
        return [placed_first(r, tree[0], value), *tree[1:]]
    if r.random() < 0.5:
        return {"first": value, **tree} if named else [value, *tree] if isinstance(tree, list) else value
    return value


def _containers(tree: Any) -> list[Any]:
    """Returns the dicts and lists in a tree, also those in which a code describes another type."""
    found, left = [], [tree]
    while left:
        node = left.pop()
        if isinstance(node, (dict, list)):
            found.append(node)
            left += node.values() if isinstance(node, dict) else node
    return found


def placed(r: random.Random, tree: Any, value: Any) -> Any:
    """Returns the tree (which it changes) with the value at a random place, its root among them."""
    there = _containers(tree)
    if not there or r.random() < 0.1:
        return value
    at = r.choice([tree, r.choice(there)])
    if isinstance(at, list):
        place = r.randrange(len(at) + 1)
        at[place : place + r.choice([0, 1])] = [value]
    else:
        at[r.choice([*at, "deep"])] = value
    return tree


def references(tree: Any) -> list[Any]:
    """Returns the references to tensors in a tree."""
    return [node for node in _containers(tree) if isinstance(node, dict) and list(node) == [TENSOR]]


def grown(r: random.Random, tree: Any, names: list[str]) -> Any:
    """Returns the tree (which it changes) with other keys, items and values at random places."""
    for _ in range(r.randint(1, 3)):
        there = _containers(tree)
        if not there:
            return strange(r, names)
        at, what = r.choice(there), r.random()
        if isinstance(at, list):
            place = r.randrange(len(at) + 1)
            at[place : place + r.choice([0, 1])] = [strange(r, names)] * r.choice([1, 1, 1, 2, 40])
            continue
        keys = list(at)
        if keys and what < 0.3:
            old, new = r.choice(keys), r.choice(KEYS)
            items = [(new if k is old else k, v) for k, v in at.items()]
            at.clear()
            at.update(items)
        else:
            at[r.choice(keys) if keys and what < 0.65 else r.choice(KEYS)] = strange(r, names)
    return tree
