"""The native encoder of plain values writes what the Python encoder does, or leaves the value to
it."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import msgpack
import numpy as np
import pytest

from everstep import CheckpointError, decoding, encoding
from everstep._internal import encode_groups, encode_plain
from everstep.blob_format import MARK

_ROOT: encoding.Path = (None, "state", False)
_LEAVES = [
    None, True, False, 0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1,
    2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -32, -33, -128, -129, -32768,
    -32769, -(2**31), -(2**31) - 1, -(2**63), 0.0, -0.0, 0.1, 1e300, float("inf"), float("-inf"),
    float("nan"), "", "a", "é", "x" * 31, "x" * 32, "x" * 255, "x" * 256, "x" * 65536,
    "\0", b"", b"\xff", b"x" * 255, b"x" * 256, b"x" * 65536, (), (1, 2.0, None, True), (0.9, 0.999), tuple(range(16)), tuple(range(70000)),
]  # fmt: skip


def _by_python(value: Any) -> bytes:
    encoder = encoding._Encoder(None, False)
    return MARK + msgpack.packb(encoder.value(value, _ROOT), strict_types=True)


def _random(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(4) if depth else 0
    if kind == 1:
        return [_random(rng, depth - 1) for _ in range(rng.choice((0, 1, 3, 15, 16, 20)))]
    if kind >= 2:
        return {f"{rng.choice('abé')}{n}": _random(rng, depth - 1) for n in range(rng.choice((0, 1, 3, 15, 16, 20)))}
    return rng.choice(_LEAVES[:-1])


@pytest.mark.parametrize("leaf", _LEAVES, ids=range(len(_LEAVES)))
def test_each_plain_value_is_written_as_python_writes_it(leaf):
    for value in (leaf, [leaf], {"key": leaf}):
        assert encode_plain(value) == _by_python(value)


def test_nested_plain_values_are_written_as_python_writes_them():
    for seed in range(300):
        value = {"state": _random(random.Random(seed), 3)}
        assert encode_plain(value) == _by_python(value), seed


def test_groups_of_parameters_are_written_as_python_writes_them():
    for seed in range(300):
        chance = random.Random(seed)
        groups, names = [], []
        for _ in range(chance.choice((1, 2, 17))):
            group = {f"key{n}": _random(chance, 1) for n in range(chance.choice((0, 1, 12, 20)))}
            # The parameters come first, last or in between; they may be anything.
            items = [*group.items()]
            items.insert(chance.randint(0, len(items)), ("params", [object()]))
            groups.append(dict(items))
            names.append([f"model.{n}" for n in range(chance.choice((0, 1, 40)))])
        whole = [
            {k: v for k, v in g.items() if k != "params"} | {"params": n} for g, n in zip(groups, names, strict=True)
        ]
        assert encode_groups(groups, [encode_plain(n) for n in names]) == _by_python(whole), seed


def test_groups_that_are_not_plain_are_left_to_python():
    names, shared = [encode_plain(["model.0"])], [1]
    for group in (
        {"lr": 0.1},
        {"params": [], "lr": np.float64(0.1)},
        {"params": [], 1: 2},
        {"params": [], "a": shared, "b": shared},
    ):
        assert encode_groups([group], names) is None
    assert encode_groups([{"params": []}, {"params": []}], names) is None


class _Int(int):
    pass


class _List(list):  # type: ignore[type-arg]
    pass


_SHARED: list[Any] = []
_DEEP: list[Any] = []
for _ in range(50):
    _DEEP = [_DEEP]
_CIRCULAR: list[Any] = []
_CIRCULAR.append(_CIRCULAR)


@pytest.mark.parametrize(
    "value",
    [2**64, -(2**63) - 1, "\ud800", {"\ud800": 1}, (1, "a"), ((),), (2**70,), {1: 2}, {None: 1}, {("a",): 1},
     {"a": {3}}, {"a": frozenset()}, _Int(1), _List(), {_Int(1): 1}, OrderedDict(a=1),
     np.float32(1), np.float64(1), np.bool_(True), np.str_("a"), np.zeros(3),
     1j, bytearray(b"a"), range(3), ..., int, [_SHARED, _SHARED], {"a": _SHARED, "b": _SHARED},
     _DEEP, _CIRCULAR],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_what_is_not_plain_is_left_to_python(value):
    assert encode_plain(value) is None
    assert encode_plain({"key": [value]}) is None


def test_what_shared_containers_nest_too_deeply_is_refused_when_it_is_saved():
    """A history in which each entry has the one before it was saved, and could not be restored."""
    for count, good in ((90, True), (150, False)):
        entries: list[Any] = [[0]]
        for _ in range(count):
            entries.append([entries[-1]])
        if good:
            assert len(decoding.decode(encoding.encode(entries), lambda name: None)) == count + 1
            continue
        with pytest.raises(CheckpointError, match="nested more than 100 levels deep"):
            encoding.encode(entries)
