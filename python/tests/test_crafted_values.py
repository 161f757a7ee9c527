"""Values that are not what their type code says.

A few bytes must neither allocate any amount of memory nor end in another error than damage.
"""

from __future__ import annotations

import msgpack
import pytest

from everstep import blob_format as f
from everstep import decoding, rng
from everstep._internal import DamagedError

#: More than any machine has.
HUGE = 1 << 60
SOME = list(b"2 numbers and more")

WRONG = {
    "a number of bytes": {f.BYTEARRAY: HUGE},
    "bytes as numbers": {f.BYTEARRAY: SOME},
    "a generator's number of bytes": {f.GENERATOR: ["cpu", HUGE]},
    "a generator's device by number": {f.GENERATOR: [0, b""]},
    "an integer of numbers": {f.BIG_INT: SOME},
    "a complex number of strings": {f.COMPLEX: ["1", 0.0]},
    "a complex number of bytes": {f.COMPLEX: b"12"},
    "text of a string": {f.TEXT: "a"},
    "a device by number": {f.DEVICE: 0},
    "a tuple of bytes": {f.TUPLE: b"12"},
    "a tuple of keys": {f.TUPLE: {"a": 1}},
    "a set of bytes": {f.SET: b"12"},
    "a size of bytes": {f.SIZE: b"12"},
    "pairs of bytes": {f.PAIRS: b"12"},
    "a range of bytes": {f.RANGE: b"12"},
    "a slice of bytes": {f.SLICE: b"12"},
    "a deque of bytes": {f.DEQUE: [b"12", None]},
    "pairs as attributes": {f.ORDERED: [[], [["a", 1]]]},
    "a constant that is none": {f.CONSTANT: "torch.load"},
    "an array of numbers": {f.ARRAY: ["|u1", [1, 2], [2], False]},
    "an array of a record": {f.ARRAY: [["|u1"], b"12", [2], False]},
    "an array whose shape is bytes": {f.ARRAY: ["|u1", b"12", b"\2", False]},
    "a scalar of numbers": {f.SCALAR: ["|u1", [1]]},
    "a tensor of numbers": {f.INLINE: ["U8", [2], [1, 2], {}]},
}


def _decoded(node: object) -> object:
    return decoding.decode(f.MARK + msgpack.packb(node), lambda name: None)


@pytest.mark.parametrize("what", WRONG)
def test_a_value_that_is_not_of_the_type_of_its_code_is_damaged(what):
    with pytest.raises(DamagedError):
        _decoded(WRONG[what])
    with pytest.raises(DamagedError):
        _decoded([{"inside": WRONG[what]}])


def test_strings_without_a_size_take_no_memory():
    """As a copy, each of them would have a size."""
    found = _decoded({f.ARRAY: ["<U0", b"", [1 << 20, 1 << 20], True]})
    assert found.shape == (1 << 20, 1 << 20) and found.nbytes == 0 and found.flags.f_contiguous


@pytest.mark.parametrize("change", [{"torch": HUGE}, {"cuda": [HUGE]}, {"python": [3, range(HUGE), None]}], ids=str)
def test_a_number_where_the_state_of_a_generator_belongs_is_damage(change):
    with pytest.raises(DamagedError):
        rng.check({**rng.get(), **change})
