"""Values that are not what their type code says.

A few bytes must neither allocate any amount of memory nor end in another error than damage.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict

import msgpack
import pytest
import torch
from torch.optim import lr_scheduler

from everstep import CheckpointError, decoding, encoding, object_state, rng
from everstep import blob_format as f
from everstep._internal import DamagedError
from everstep.compare import difference
from everstep.optimizer_state import by_names
from everstep.optimizer_value import checked
from everstep.tensor_places import parameter_in

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
    "an array of a dtype that numpy cannot parse": {f.ARRAY: ["08f4", b"", [0], False]},
    "an attribute in place of a method": {f.ORDERED: [[], {"items": 5}]},
    "a placement that is none": {f.TENSOR: ["w", {"sharded": [["Sx"], [4]]}]},
    "a large key": {f.PAIRS: [{f.TUPLE: [list(range(1 << 20))]}, 1]},
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


def test_values_of_an_earlier_format_are_not_nested_without_end():
    """Each level takes C's stack, of which the interpreter died."""
    nested = msgpack.packb([1])
    for _ in range(500):
        nested = msgpack.packb(msgpack.ExtType(1, nested))
    with pytest.raises(DamagedError, match="nested too deeply"):
        decoding.decode(nested, lambda name: None)


@pytest.mark.parametrize("how", [f.PAIRS, f.SET])
@pytest.mark.parametrize("of_two", [False, True], ids=["a chain", "each twice the one before"])
def test_what_is_hashed_is_not_nested_without_end(how, of_two):
    """Of a chain of shared tuples, hash() takes C's stack; of tuples that each have the one before
    twice, it never ends."""
    count = 60 if of_two else 200_000
    # They are numbered in the order in which they are complete.
    shared = [{f.TUPLE: ["a"]}, *({f.TUPLE: [{f.SAME: n}] * (1 + of_two)} for n in range(count))]
    key = {f.SAME: count}
    with pytest.raises(
        CheckpointError, match="a key or an element of a set is too large" if of_two else "nested more than"
    ):
        _decoded([shared, {how: [key, 1] if how == f.PAIRS else [key]}])


@pytest.mark.parametrize("of_two", [False, True], ids=["a chain", "each twice the one before"])
def test_what_becomes_a_key_of_an_optimizers_state_is_not_nested_without_end(of_two):
    """Keys of no parameter are values of a list in the checkpoint: hash() took C's stack, or never
    ended."""
    count = 60 if of_two else 200_000
    shared = [{f.TUPLE: ["a"]}, *({f.TUPLE: [{f.SAME: n}] * (1 + of_two)} for n in range(count))]
    groups = [{"params": [], "kept": shared}]
    with pytest.raises(CheckpointError):
        checked(_decoded({"groups": groups, "state": {}, "names": 2, "other": [[{f.SAME: count}, 1]]}))


@pytest.mark.parametrize("container", ["list", "dict", "tuple", "attributes"])
def test_a_value_is_not_nested_more_deeply_by_what_it_shares(container):
    """Whoever compared or copied such a state ended with Python's RecursionError."""
    shared = {
        "list": lambda n: [{f.SAME: n}],
        "dict": lambda n: {"a": {f.SAME: n}},
        "tuple": lambda n: {f.TUPLE: [{f.SAME: n}]},
        "attributes": lambda n: {f.ORDERED: [[], {"mine": {f.SAME: n}}]},
    }[container]
    # Each has attributes that are numbered, too.
    step = 2 if container == "attributes" else 1
    for count, good in ((60, True), (5000, False)):
        chain = [[1], *(shared(n * step) for n in range(count))]
        if good:
            assert len(_decoded(chain)) == count + 1
            continue
        with pytest.raises(CheckpointError, match="nested more than"):
            _decoded(chain)


def test_a_value_of_an_earlier_format_is_not_nested_more_deeply_than_one_of_this():
    nested: object = 1
    for _ in range(400):
        nested = [nested]
    with pytest.raises(DamagedError, match="nested too deeply"):
        decoding.decode(msgpack.packb(nested), lambda name: None)


@pytest.mark.parametrize("leaf", [1, "a", range(1 << 70)], ids=str)
def test_the_most_deeply_nested_value_that_is_saved_is_read(leaf):
    for of in (lambda v: [v], lambda v: (v,), lambda v: {v: 1}, lambda v: frozenset([v])):
        value = leaf
        levels = 0
        while True:
            try:
                nested = of(value)
                encoded = encoding.encode(nested)
            except (CheckpointError, TypeError):
                break
            value, levels = nested, levels + 1
            assert decoding.decode(encoded, lambda name: None) == value
        assert levels in (1, 99, 100, 101), "a dict is no key"


def test_a_value_that_occurs_many_times_is_compared_once():
    """Sixty levels with two of the one before would never end."""
    one, other = [1], [1]
    for _ in range(60):
        one, other = [one, one], [other, other]
    assert difference(one, other) is None
    different = [2]
    for _ in range(60):
        different = [different, different]
    assert difference(one, different) == "[0]" * 61


@pytest.mark.parametrize("pos", [-1, 625, 2147483646])
def test_a_position_outside_of_the_numbers_of_a_generator_is_damage(pos):
    """numpy believes it, and the next number that is drawn lies outside of the process's memory."""
    numpy = pytest.importorskip("numpy")
    state = numpy.random.RandomState(1).get_state(legacy=False)
    rng.check({**rng.get(), "numpy": state})
    with pytest.raises(DamagedError, match="a position of numpy's generator"):
        rng.check({**rng.get(), "numpy": {**state, "state": {**state["state"], "pos": pos}}})
    philox = numpy.random.RandomState(numpy.random.Philox(1)).get_state(legacy=False)
    rng.check({**rng.get(), "numpy": philox})
    with pytest.raises(DamagedError, match="a position of numpy's generator"):
        rng.check({**rng.get(), "numpy": {**philox, "buffer_pos": pos}})


def test_generators_of_gpus_that_are_no_list_are_damage():
    with pytest.raises(DamagedError, match="expected the generators of GPUs, found dict"):
        rng.check({**rng.get(), "cuda": {}})


@pytest.mark.parametrize(
    "change",
    [
        {"python": [3, [[1]] * 625, None]},
        {"python": [3, [1 << 40] * 624 + [0], None]},
        {"python": [3, [1] * 624 + [0], b"12345678"]},
        {"numpy": {"bit_generator": "MT19937", "state": {"key": [[1]] * 624, "pos": 0}, "has_gauss": 0, "gauss": 0.0}},
    ],
    ids=["lists", "more than 32 bits", "gauss", "numpy"],
)
def test_a_state_that_a_generator_would_change_or_read_at_any_depth_is_damage(change):
    with pytest.raises(DamagedError):
        rng.check({**rng.get(), **change})


def test_what_would_be_damage_when_it_is_read_is_not_saved():
    counter, ordered = Counter("aab"), OrderedDict(a=1)
    counter.total, ordered.copy = 3, 1
    counted = Counter("aab")
    counted.mine = 3
    assert vars(decoding.decode(encoding.encode(counted), lambda name: None)) == {"mine": 3}
    for value in (counter, ordered):
        with pytest.raises(CheckpointError, match=r"state/a has the attribute '(total|copy)', which hides a method"):
            encoding.encode({"a": value})
    large = tuple(range(1 << 20))
    assert decoding.decode(encoding.encode({large[1:]: 1}), lambda name: None) == {large[1:]: 1}
    twice = ("a",) * (1 << 19)
    for value in ({large: 1}, {frozenset(large)}, {(twice, twice): 1}, defaultdict(int, {(1, large): 1})):
        with pytest.raises(
            CheckpointError, match=r"state\[0\] has a key or an element of a set with more than 1048576"
        ):
            encoding.encode([value])


def test_a_key_of_an_optimizers_state_that_would_be_damage_is_not_saved():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.state[tuple(range(1 << 20))] = {"seen": 1}
    with pytest.raises(CheckpointError, match="has state by a key with more than 1048576 elements"):
        by_names(optimizer, optimizer.state_dict(), ["param_0"], {})


def test_a_name_of_many_parts_is_searched_for_a_parameter_in_a_moment():
    class Known(dict):
        """Counts the characters of the names that are looked up, and stops where they are many."""

        looked_up = 0

        def __contains__(self, name):
            self.looked_up += len(name)
            assert self.looked_up < 1_000, "looks up more than the longest known name allows"
            return super().__contains__(name)

    names, long = ["model.weight", "model.a/b"], "x/" * 500_000
    assert parameter_in("optimizer/state/model.a/b/exp_avg", Known.fromkeys(names)) == "model.a/b"
    assert parameter_in("optimizer/model.weight/exp_avg", Known.fromkeys(names)) == "model.weight"
    assert parameter_in("optimizer/state/model.a/b/" + long, Known.fromkeys(names)) == "model.a/b"
    assert parameter_in("optimizer/state/" + long, Known.fromkeys(names)) is None
    assert parameter_in("optimizer/state/" + long, Known()) is None


def test_a_value_of_a_package_that_is_not_installed_is_no_damage(monkeypatch):
    """restore() ended with ModuleNotFoundError."""
    numpy = pytest.importorskip("numpy")
    encoded = encoding.encode([numpy.arange(3)])
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(
        CheckpointError, match=r"the checkpoint needs numpy, which cannot be imported .*; install it"
    ) as found:
        decoding.decode(encoded, lambda name: None)
    assert not isinstance(found.value, DamagedError)


def test_a_state_that_would_keep_a_scheduler_busy_for_ever_is_refused():
    """restore() did not end: a scheduler takes what it is given, and hashes or counts it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    step, constant = lr_scheduler.StepLR(optimizer, 2), lr_scheduler.ConstantLR(optimizer)
    chosen = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    both = lr_scheduler.SequentialLR(optimizer, [step, constant], [3])
    pairs = ()
    for _ in range(100):
        pairs = (pairs, pairs)
    inner = [both.state_dict()["_schedulers"][0], pairs]
    for scheduler, change, why in (
        (step, None, "a tuple, not a dict"),
        (chosen, {"lr_lambdas": range(1 << 60)}, "its lr_lambdas is a range, not a list"),
        (chosen, {"lr_lambdas": [pairs]}, "the attributes of a function are a tuple, not a dict"),
        (both, {"_schedulers": inner}, "a tuple, not a dict"),
    ):
        value = pairs if change is None else scheduler.state_dict() | change
        with pytest.raises(CheckpointError, match=f"scheduler=: load_state_dict.* rejected .*{why}"):
            object_state.load("scheduler", scheduler, value)
    for scheduler in (step, chosen, both):
        object_state.load("scheduler", scheduler, scheduler.state_dict())

    class Own(lr_scheduler.StepLR):
        def load_state_dict(self, state_dict):
            self.last_epoch = state_dict[0]

    own = Own(optimizer, 2)
    object_state.load("scheduler", own, (7,))
    assert own.last_epoch == 7
