"""A tensor that moves, or changes its type, shape, strides or flags in place, is noticed, with
torch's DLPack table and without it.
"""

import pytest
import torch

from everstep import structure


@pytest.fixture(params=["table", "walk"])
def same_places(request, monkeypatch):
    if request.param == "walk":
        monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    return structure._same_places


def tensors():
    pair = torch.randn(2)
    return {
        "square": torch.randn(4, 4),
        "scalar": torch.zeros(()),
        "empty": torch.empty(0, 3),
        "complex": torch.randn(3, dtype=torch.complex64),
        "imaginary": torch.view_as_complex(pair).imag,
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "eight_bits": torch.randn(3).to(torch.float8_e4m3fn),
        "many_dimensions": torch.randn(2, 1, 2, 1, 2, 1, 3),
    }


def moved(t):
    t["square"].data = t["square"].clone()


def transposed(t):
    t["square"].data = t["square"].t()


def reshaped(t):
    t["square"].data = t["square"].view(2, 8)


def shorter(t):
    t["square"].resize_(2, 4)


def other_type(t):
    t["square"].data = t["square"].view(torch.int32)


def other_type_of_eight_bits(t):
    t["eight_bits"].data = t["eight_bits"].view(torch.float8_e5m2)


def with_a_dimension(t):
    t["scalar"].data = t["scalar"].view(1)


def without_rows(t):
    t["empty"].data = torch.empty(0, 4)


def conjugated(t):
    t["complex"].data = t["complex"].conj()


def negated(t):
    whole = torch.view_as_complex(torch.empty(0).set_(t["imaginary"].untyped_storage(), 0, (2,), (1,)))
    other = whole.conj().imag
    assert other.is_neg() and other.data_ptr() == t["imaginary"].data_ptr()
    t["imaginary"].data = other


def negated_where_it_is(t):
    t["square"].data = torch._neg_view(t["square"])


def swapped(t):
    t["parameter"].data = torch.randn(2, 2)


def swapped_with_another(t):
    torch.utils.swap_tensors(t["square"], torch.randn(4, 4))


def with_a_larger_storage(t):
    t["square"].untyped_storage().resize_(1 << 20)


def with_the_storage_of_another(t):
    t["square"].set_(torch.randn(4, 4).untyped_storage(), 0, (4, 4), (4, 1))


def further_in_the_storage(t):
    t["square"].set_(t["square"].untyped_storage(), 1, (3, 4), (4, 1))


def reshaped_with_many_dimensions(t):
    t["many_dimensions"].resize_(1, 2, 2, 1, 2, 1, 3)


CHANGES = [
    moved,
    transposed,
    reshaped,
    shorter,
    other_type,
    other_type_of_eight_bits,
    with_a_dimension,
    without_rows,
    conjugated,
    negated,
    negated_where_it_is,
    swapped,
    swapped_with_another,
    with_a_larger_storage,
    with_the_storage_of_another,
    further_in_the_storage,
    reshaped_with_many_dimensions,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_what_looks_otherwise_is_noticed(same_places, change):
    t = tensors()
    same = same_places([*t.values()])
    assert same() and same()
    with torch.no_grad():
        for each in t.values():
            # A change of values does not count.
            each.copy_(torch.ones_like(each, dtype=torch.float32))
        assert same()
        change(t)
    assert not same()


def test_this_torch_has_the_table():
    places = structure.Places([*tensors().values()])
    assert places.same() and places.reads_objects


def test_only_tensors_are_described():
    with pytest.raises(TypeError, match="no tensor"):
        structure.Places([torch.zeros(1), object()])
