"""What is saved comes back equal in value and type, or the capture refuses it and names its
place."""

from __future__ import annotations

import enum
import math
import struct
import tempfile
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everstep as es


class Kept:
    """Any state."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def _save(directory: Path, **objects: Any) -> None:
    ckpt = es.CheckpointManager(directory, persist=1, **objects)
    ckpt.step(1)
    ckpt.close()


def _there_and_back(directory: Path, value: Any) -> Any:
    _save(directory, data=Kept(value))
    back = Kept()
    assert es.CheckpointManager(directory, data=back).restore() == 1
    return back.value


class _Color(enum.IntEnum):
    RED = 1


class _Name(str, enum.Enum):
    A = "a"


class _Float(float):
    pass


_Point = namedtuple("_Point", "x y")


def _bits(value: float) -> bytes:
    return struct.pack("d", value)


def test_containers_and_numbers_keep_their_types(tmp_path):
    payload = struct.unpack("d", b"\x01\x02\x00\x00\x00\x00\xf8\x7f")[0]
    value = {
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "default": defaultdict(list, {"x": [1]}),
        "counter": Counter("abca"),
        "ring": deque([1, 2, 3], maxlen=3),
        "keys": {1: "a", "1": "b", (2, 3): "c", None: "d", 2.5: "f", b"x": "g", frozenset({1}): "h"},
        "tuples": ((), (1,), ([2], "x")),
        "numbers": [10**40, 1 << 64, -(1 << 63), True, 1.0, -0.0, math.inf, payload, 2 + 3j, complex(-0.0, math.nan)],
        "bytes": [b"\x00\xff", bytearray(b"ab"), "ü\udc80", "", "a/b"],
        "other": [
            range(1, 10, 3),
            slice(None, 3),
            ...,
            torch.Size([1, 2]),
            torch.float16,
            torch.device("cpu"),
            torch.strided,
            torch.channels_last,
        ],
    }
    sets = [{1, (2, 3)}, frozenset({"a", frozenset({1})}), set(), {frozenset({1})}]
    back, found, huge = _there_and_back(tmp_path, (value, sets, -(10**5000)))
    assert repr(back) == repr(value) and huge == -(10**5000)
    assert found == sets and [type(s) for s in found] == [type(s) for s in sets]
    assert type(back["ordered"]) is OrderedDict and type(back["keys"]) is dict and back["default"]["new"] == []
    assert type(back["bytes"][1]) is bytearray and back["ring"].maxlen == 3
    assert _bits(back["numbers"][7]) == _bits(payload) and _bits(back["numbers"][5]) == _bits(-0.0)


def test_numpy_keeps_dtype_shape_and_order(tmp_path):
    value = [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(["a", "bcd"]),
        np.array([1 + 2j], dtype=np.complex128),
        np.datetime64("2026-01-02T03:04"),
        np.complex128(1 + 2j),
        np.float64(0.1),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.zeros((0, 3), np.float16),
        np.array(3.5),
        np.longdouble(1) / 3,
        # As long as other types, but distinct types.
        np.longlong(3),
        np.array([1], np.ulonglong),
        # Without a size, or with one: numpy allows both.
        np.str_(""),
        np.bytes_(b""),
        np.array(["", ""]),
        np.array(b""),
        np.ndarray((3,), "U0"),
        np.ndarray((0,), "S0"),
    ]
    back = _there_and_back(tmp_path, value)
    for one, other in zip(value, back, strict=True):
        assert (
            type(one) is type(other)
            and (one.dtype, one.dtype.char) == (other.dtype, other.dtype.char)
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        ), one
    assert back[1].flags.f_contiguous and not back[1].flags.c_contiguous


def test_tensors_views_and_dtypes(tmp_path):
    torch.manual_seed(0)
    z = torch.randn(3, dtype=torch.complex64)
    generator = torch.Generator().manual_seed(7)
    torch.randn(3, generator=generator)
    value = {
        "conj": z.conj(),
        "neg": torch._neg_view(torch.ones(3)),
        "imag": z.conj().imag,
        "c128": torch.randn(2, 2, dtype=torch.complex128),
        "c32": torch.ones(2, dtype=torch.complex32),
        "unsigned": [torch.arange(3).to(t) for t in (torch.uint16, torch.uint32, torch.uint64)],
        "small": [torch.ones(3).to(t) for t in (torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.bfloat16)],
        "expanded": torch.arange(3.0).expand(4, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "strided": torch.arange(10.0)[::3],
        "last": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "empty": [torch.empty(0, 5), torch.tensor(3.0), torch.empty(0, dtype=torch.complex128)],
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True),
        "generator": generator,
    }
    back = _there_and_back(tmp_path, value)

    def same(a: Any, b: Any) -> None:
        assert type(a) is type(b), (a, b)
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for k in a:
                same(a[k], b[k])
        elif isinstance(a, list):
            for x, y in zip(a, b, strict=True):
                same(x, y)
        elif isinstance(a, torch.Generator):
            assert torch.equal(torch.randn(4, generator=a), torch.randn(4, generator=b))
        else:
            assert a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
            if a.numel():
                plain = [
                    t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)
                ]
                assert torch.equal(*plain), (a, b)

    same(value, back)
    assert back["last"].is_contiguous(memory_format=torch.channels_last)


def test_one_object_in_two_places_stays_one(tmp_path):
    shared, tensor = [1, 2], torch.ones(3)
    back = _there_and_back(tmp_path, {"a": shared, "b": (shared, tensor), "c": tensor})
    assert back["a"] is back["b"][0] and back["b"][1] is back["c"]


def test_values_of_a_step_may_be_tensors(tmp_path):
    ckpt = es.CheckpointManager(tmp_path, persist=1, data=Kept(1))
    ckpt.step(1, loss=torch.tensor([1.5]).conj(), why=frozenset({1}))
    ckpt.close()
    again = es.CheckpointManager(tmp_path, data=Kept())
    again.restore()
    assert torch.equal(again.extra["loss"], torch.tensor([1.5])) and again.extra["why"] == frozenset({1})


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def _itself() -> list[Any]:
    value: list[Any] = [1]
    value.append({"again": value})
    return value


def _mapped(rows: int) -> np.memmap:
    with tempfile.NamedTemporaryFile() as file:
        return np.memmap(file.name, "i4", "w+", shape=(rows,))


_REFUSED: dict[str, tuple[Any, str]] = {
    "enum": (lambda: {"buffer": [0, 1, 2, _Color.RED]}, r"data/buffer\[3\].*_Color"),
    "str enum": (lambda: {"x": _Name.A}, r"data/x .*_Name"),
    "namedtuple": (lambda: {"p": _Point(1, 2)}, r"data/p .*_Point.*tuple"),
    "float subclass": (lambda: [_Float(1)], r"data\[0\] .*_Float"),
    "lambda": (lambda: {"f": lambda: 1}, "data/f .*function"),
    "default factory": (lambda: {"d": defaultdict(lambda: 1)}, "data/d .*default_factory"),
    "module": (lambda: {"m": nn.Linear(1, 1)}, "data/m .*Linear.*state_dict"),
    "path": (lambda: {"p": Path("x")}, "data/p .*Path"),
    "records": (lambda: {"r": np.zeros(2, [("a", "i4")])}, "data/r .*numpy"),
    "objects": (lambda: {"o": np.array([None])}, "data/o .*numpy"),
    "memory map": (lambda: {"m": _mapped(3)}, r"data/m is of type numpy\.memmap"),
    "memory map of one": (lambda: {"m": _mapped(1)}, r"data/m is of type numpy\.memmap"),
    "matrix": (lambda: {"m": np.matrix([[7]])}, r"data/m is of type numpy\.matrix"),
    "dtype with metadata": (lambda: {"a": np.array([1], np.dtype("i4", metadata={"a": 1}))}, "data/a .*numpy"),
    "zero tensor": (lambda: {"z": torch._efficientzerotensor((300,))}, "data/z is a tensor of zeros without memory"),
    "sparse": (lambda: {"s": torch.eye(2).to_sparse()}, "data/s has layout"),
    "nested": (lambda: {"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, "data/n is a nested"),
    "jagged": (
        lambda: {"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)},
        "data/n .*ested",
    ),
    "meta": (lambda: {"m": torch.empty(3, device="meta")}, "data/m is on the meta"),
    "quantized": (
        lambda: {"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
        "data/q is a quantized",
    ),
    "itself": (lambda: {"a": _itself()}, r"data/a\[1\]/again contains itself"),
    "deep": (lambda: {"a": _nested(500)}, "data/a.*levels deep"),
    "tensor as key": (lambda: {torch.ones(1): 1}, "data.*key"),
    "1 and '1'": (lambda: {1: torch.ones(1), "1": torch.zeros(1)}, "two tensors .*data/1"),
    "a/b": (lambda: {"a": {"b": torch.ones(1)}, "a/b": torch.zeros(1)}, "two tensors .*data/a/b"),
    "surrogate": (lambda: {"\udc80": torch.ones(1)}, r"data/\\udc80 .*not valid Unicode"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", _REFUSED)
def test_what_cannot_come_back_is_refused_with_its_place(tmp_path, what):
    make, message = _REFUSED[what]
    ckpt = es.CheckpointManager(tmp_path, persist=1, data=Kept(make()))
    with pytest.raises(es.CheckpointError, match=message):
        ckpt.step(1)
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("name", ["rng", "extra", "layout", "parts", "align", "dcp", "a.b", "a/b", "", "__metadata__"])
def test_names_of_objects_that_would_collide_are_refused(tmp_path, name):
    with pytest.raises(es.CheckpointError, match="cannot be the name"):
        es.CheckpointManager(tmp_path, **{name: Kept(1)})


def test_slashes_in_names_of_parameters(tmp_path):
    def make() -> nn.ModuleDict:
        return nn.ModuleDict({"a/b": nn.Linear(2, 2)})

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model["a/b"](torch.ones(2)).sum().backward()
    optimizer.step()
    _save(tmp_path, model=model, optimizer=optimizer)
    again = make()
    other = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    assert es.CheckpointManager(tmp_path, model=again, optimizer=other).restore() == 1
    assert torch.equal(again["a/b"].weight, model["a/b"].weight)
    assert torch.equal(
        other.state[again["a/b"].weight]["momentum_buffer"], optimizer.state[model["a/b"].weight]["momentum_buffer"]
    )


def test_a_header_that_no_reader_accepts_is_refused(tmp_path):
    ckpt = es.CheckpointManager(tmp_path, persist=1, data=Kept({"k" * 101_000_000: torch.ones(1)}))
    with pytest.raises(es.CheckpointError, match=r"header may have; use shorter keys.*data/kkkk"):
        ckpt.step(1)
    assert not list(tmp_path.glob("step-*"))


def test_long_names_of_any_characters_are_saved(tmp_path):
    value = {c * 100_000: torch.tensor(float(n)) for n, c in enumerate(("x", "\x01", "é", "\U0001f600", '"'))}
    back = _there_and_back(tmp_path, value)
    assert back == value


@pytest.mark.parametrize("step", [-1, True, 2**63, 1.5])
@pytest.mark.parametrize("call", ["step", "save"])
def test_what_is_no_number_of_steps_is_refused(tmp_path, call, step):
    ckpt = es.CheckpointManager(tmp_path, persist=1, data=Kept(1))
    ckpt.restore()
    with pytest.raises((ValueError, TypeError), match=r"pass the number of|integer"):
        getattr(ckpt, call)(step)
    ckpt.step(1)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-1"]


class _Expanded(nn.Linear):
    """Loads itself, because of its extra state."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("shared", torch.ones(1).expand(4))

    def get_extra_state(self) -> int:
        return 1


def test_an_expanded_buffer_that_could_not_be_loaded_is_refused_at_once(tmp_path):
    ckpt = es.CheckpointManager(tmp_path, model=_Expanded(), persist=1)
    with pytest.raises(es.CheckpointError, match=r"model\.shared is an expanded view.*\.contiguous\(\)"):
        ckpt.step(1)
