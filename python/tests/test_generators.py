"""What is read of random generators is their state, however seldom it is read."""

import random
from array import array

import numpy
import pytest
import torch

from everstep import encoding, generators, rng
from everstep.state import State
from everstep.values import Layout


def python_state():
    version, internal, gauss = random.getstate()
    return [version, array("I", internal).tobytes(), gauss]


def numpy_state():
    found = numpy.random.get_state(legacy=False)
    if found["bit_generator"] != "MT19937":
        return str(found)
    mt = found["state"]
    return ["MT19937", mt["key"].tobytes(), int(mt["pos"]), int(found["has_gauss"]), float(found["gauss"])]


def read_numpy():
    found = generators.numpy()
    return found if isinstance(found, list) else str(found)


def test_this_interpreter_this_numpy_and_this_torch_keep_their_states_in_place():
    assert generators._python_is_in_place() and generators._numpy_is_in_place()
    assert generators._torch_numbers_at() is not None


def test_an_unused_generator_is_read_once():
    assert generators.python() is generators.python()
    assert generators.numpy() is generators.numpy()
    random.random()
    before = generators.python()
    random.random()
    assert generators.python() is not before


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_to_a_generator_is_read(seed):
    chance = random.Random(seed)
    saved_python, saved_numpy = [random.getstate()], [numpy.random.get_state()]
    steps = [
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.shuffle([*range(9)]),
        lambda: random.seed(chance.randrange(5)),
        lambda: random.setstate(chance.choice(saved_python)),
        lambda: saved_python.append(random.getstate()),
        numpy.random.rand,
        numpy.random.randn,
        numpy.random.standard_normal,
        lambda: numpy.random.permutation(9),
        lambda: numpy.random.seed(chance.randrange(5)),
        lambda: numpy.random.set_state(chance.choice(saved_numpy)),
        lambda: saved_numpy.append(numpy.random.get_state()),
        lambda: None,
    ]
    for _ in range(400):
        chance.choice(steps)()
        assert generators.python() == python_state()
        assert read_numpy() == numpy_state()


def test_another_generator_in_its_place_is_read():
    own, bits = random._inst, numpy.random.get_bit_generator()
    try:
        for kind in (numpy.random.PCG64, numpy.random.MT19937):
            numpy.random.set_bit_generator(kind(7))
            for _ in range(3):
                numpy.random.rand()
                assert read_numpy() == numpy_state()
    finally:
        numpy.random.set_bit_generator(bits)
    assert random._inst is own


def test_what_is_written_of_all_generators_is_what_they_are_now():
    state, chance = State({}, Layout(0, 1, replicated=True)), random.Random(3)
    saved = [torch.get_rng_state()]
    steps = [
        random.random,
        lambda: random.gauss(0, 1),
        numpy.random.rand,
        numpy.random.standard_normal,
        lambda: torch.rand(1),
        lambda: torch.randn(1),
        lambda: torch.empty(3).normal_(),
        lambda: torch.randperm(5),
        lambda: torch.nn.functional.dropout(torch.ones(3)),
        lambda: torch.manual_seed(chance.randrange(3)),
        lambda: torch.set_rng_state(chance.choice(saved)),
        lambda: saved.append(torch.get_rng_state()),
        lambda: None,
    ]
    for _ in range(600):
        chance.choice(steps)()
        if chance.random() < 0.5:
            assert state._random() == encoding.encode(rng.get(), (None, "rng", False))
            assert rng.get()["torch"] == torch.get_rng_state().numpy().tobytes()
    assert state._random() is state._random(), "nothing was drawn"
    before = rng.get()
    assert rng.get() is not before and rng.same(rng.get(), before)
    assert rng.get()["torch"] is rng.get()["torch"], "not read again"


def test_generators_in_the_place_of_others_are_seen():
    own, bits = torch.default_generator, numpy.random.get_bit_generator()
    before = rng.get()
    assert rng.same(rng.get(), before)
    try:
        torch.default_generator = torch.Generator()
        assert rng.get()["torch"] == torch.default_generator.get_state().numpy().tobytes() != before["torch"]
        torch.default_generator = own
        before = rng.get()
        assert rng.same(rng.get(), before)
        for kind in (numpy.random.MT19937, numpy.random.PCG64):
            numpy.random.set_bit_generator(kind(7))
            assert not rng.same(rng.get(), before) and read_numpy() == numpy_state()
    finally:
        torch.default_generator = own
        numpy.random.set_bit_generator(bits)


def read_of(generator):
    return generators._Read(generator, generators._memory_of_python(generator))


def test_a_read_that_was_interrupted_is_done_again():
    generator = random.Random(1)
    read = read_of(generator)
    assert read.value(lambda: "old") == "old"
    generator.random()

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read.value(interrupted)
    assert read.value(lambda: "new") == "new"


def test_a_thread_that_draws_and_reads_meanwhile_does_not_hide_what_it_drew():
    generator = random.Random(1)
    read = read_of(generator)

    def meanwhile():
        generator.random()
        assert read.value(lambda: "of the other thread") == "of the other thread"
        return "from before"

    assert read.value(meanwhile) == "from before"
    assert read.value(lambda: "now") == "now"


def test_what_another_thread_puts_back_is_not_remembered(monkeypatch):
    state, right, read = State({}, Layout(0, 1, replicated=True)), torch.get_rng_state(), generators._read_torch

    def around():
        # A prefetching thread: it seeds the generator for itself, and puts it back.
        torch.manual_seed(7)
        found = read()
        torch.set_rng_state(right)
        return found

    torch.rand(1)
    torch.set_rng_state(right)
    state._random()
    torch.rand(1)
    right = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(generators, "_read_torch", around)
        state._random()
    for _ in range(3):
        assert state._random() == encoding.encode(rng.get(), (None, "rng", False))
        assert rng.get()["torch"] == right.numpy().tobytes()


def test_what_another_thread_puts_back_around_a_read_is_read_again():
    generator = random.Random(1)
    read, before = read_of(generator), generator.getstate()

    def around():
        # Another thread: it draws before the read, and puts the state back after it.
        generator.random()
        found = generator.getstate()
        generator.setstate(before)
        return found

    assert read.value(around) != before
    assert [read.value(generator.getstate) for _ in range(3)] == [before] * 3
