"""Random training states, the same for the same number in every process.

Objects of a ``CheckpointManager``, as they are after some steps or as a fresh process makes them.
"""

from __future__ import annotations

import copy
import enum
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Random = random.Random
Point = namedtuple("Point", "x y")


class Color(enum.IntEnum):
    RED = 1


class Word(str):
    pass


class Kept:
    """Any state."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
RARE_DTYPES = [
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def _tensor(r: Random, dtypes: list[torch.dtype]) -> Tensor:
    shape = [r.randrange(4) for _ in range(r.randrange(4))]
    dtype = r.choice(dtypes)
    size = torch.empty([], dtype=dtype).element_size() * math.prod(shape)
    if dtype is torch.bool:
        return torch.tensor([r.random() < 0.5 for _ in range(math.prod(shape))], dtype=torch.bool).reshape(shape)
    # All bytes are valid values: NaNs with payloads, denormals.
    return (
        torch.frombuffer(bytearray(r.randbytes(size)), dtype=dtype).reshape(shape).clone()
        if size
        else torch.empty(shape, dtype=dtype)
    )


def _float(r: Random) -> float:
    odd = [0.0, -0.0, math.inf, -math.inf, math.nan, struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf8\xff")[0]]
    return r.choice(odd) if r.random() < 0.3 else r.uniform(-1e9, 1e9)


def _int(r: Random) -> int:
    return r.choice([0, -1, 2**63, 2**64 - 1, -(2**63), r.randrange(-1000, 1000), r.getrandbits(40)])


def _text(r: Random) -> str:
    return "".join(r.choice("abcxyz_0./é本\n") for _ in range(r.randrange(8)))


PLAIN: list[Callable[[Random], Any]] = [
    _int, _float, _text, lambda r: r.choice([True, False, None]), lambda r: _tensor(r, DTYPES), lambda r: torch.tensor(_float(r)),
]  # fmt: skip


def _strided(r: Random) -> Tensor:
    return torch.arange(24.0).reshape(2, 3, 4)[:, :: r.randrange(1, 3), r.randrange(2) :: 2]


def _expanded(r: Random) -> Tensor:
    return torch.tensor([_float(r)]).expand(r.randrange(1, 4), 3)


def _permuted(r: Random) -> Tensor:
    order = [0, 1, 2]
    r.shuffle(order)
    return torch.arange(24.0).reshape(2, 3, 4).permute(order)


def _numpy(r: Random) -> Any:
    dtype = r.choice(["<f8", ">f4", "<i2", ">u8", "|b1", "<c16", "<f2", "<M8[s]", "<m8[us]", "<U3", "|S2"])
    shape = [r.randrange(1, 4) for _ in range(r.randrange(3))]
    if dtype[1] == "U":
        return np.full(shape, r.choice(["ab", "", "xyz"]), dtype)
    raw = bytes(b & 1 for b in r.randbytes(64)) if dtype == "|b1" else r.randbytes(64 * 16)
    array = np.frombuffer(raw, dtype)[: math.prod(shape)].reshape(shape).copy()
    return np.asfortranarray(array) if r.random() < 0.3 else array


def _generator(r: Random) -> torch.Generator:
    generator = torch.Generator().manual_seed(r.getrandbits(32))
    torch.rand(r.randrange(4), generator=generator)
    return generator


def _key(r: Random) -> Any:
    return r.choice(
        [
            _int,
            _text,
            lambda r: (1, _text(r)),
            lambda r: frozenset({_int(r)}),
            lambda r: r.choice([None, True, 2.5, b"k", torch.float32, 1 + 2j, range(3)]),
        ]
    )(r)


#: Everything else that is accepted.
RICH: list[Callable[[Random], Any]] = [
    lambda r: complex(_float(r), _float(r)), lambda r: r.randbytes(r.randrange(9)),
    lambda r: bytearray(r.randbytes(3)), lambda r: 10 ** r.randrange(20, 6000),
    lambda r: range(r.randrange(5), r.randrange(5, 99), r.randrange(1, 4)), lambda r: slice(None, r.randrange(9), None), lambda r: ...,
    lambda r: {_key(r): _int(r) for _ in range(3)}, lambda r: {_key(r) for _ in range(3)}, lambda r: frozenset(_key(r) for _ in range(2)),
    lambda r: OrderedDict((_text(r), _int(r)) for _ in range(3)), lambda r: defaultdict(r.choice([list, int, dict, None]), {_text(r): [1]}),
    lambda r: Counter(_text(r)), lambda r: deque(range(r.randrange(5)), maxlen=r.choice([None, 7])), lambda r: _text(r) + "\udc80",
    lambda r: r.choice([torch.float16, torch.strided, torch.channels_last, torch.device("cpu"), torch.device("cuda", 1),
                        torch.Size([1, 2]), torch.Size([])]),
    _generator, _numpy, lambda r: _numpy(r).reshape(-1)[0], lambda r: _tensor(r, RARE_DTYPES), _strided, _expanded, _permuted,
    lambda r: torch.randn(3, dtype=torch.complex64, generator=_generator(r)).conj(), lambda r: torch._neg_view(torch.tensor([1.0, -0.0])),
    lambda r: torch.randn(3, dtype=torch.complex128, generator=_generator(r)).conj().imag,
    lambda r: nn.Parameter(torch.tensor([_float(r)]), r.random() < 0.5),
    lambda r: torch.tensor([_float(r)], requires_grad=True),
]  # fmt: skip


def _itself(_: Random) -> Any:
    value: list[Any] = []
    value.append(value)
    return value


#: What is refused, or may be.
REFUSED: list[Callable[[Random], Any]] = [
    lambda r: Color.RED, lambda r: Point(1, 2), lambda r: Word("x"), lambda r: (lambda: 1),
    lambda r: defaultdict(lambda: 1), lambda r: Path("x"), lambda r: object(),
    lambda r: nn.Linear(1, 1), lambda r: torch.eye(2).to_sparse(), lambda r: torch.empty(2, device="meta"),
    lambda r: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    lambda r: {1: torch.ones(1), "1": torch.zeros(1)},
    lambda r: {"a": {"b": torch.ones(1)}, "a/b": torch.zeros(1)}, _itself, lambda r: {torch.ones(1): 1},
    lambda r: np.array([None, 1]), lambda r: np.zeros(1, [("a", "i4")]),
    lambda r: torch.eye(2).to_sparse_csr(), lambda r: Kept, lambda r: np.random.default_rng(1),
]  # fmt: skip


def _nested(r: Random, leaves: list[Callable[[Random], Any]], depth: int, shared: list[Any]) -> Any:
    if depth == 0 or r.random() < 0.3:
        if shared and r.random() < 0.15:
            return r.choice(shared)
        value = r.choice(leaves)(r)
        if isinstance(value, Tensor) and r.random() < 0.3:
            shared += [value, value.detach()[..., :1] if value.dim() else value]
        return value
    inner = [_nested(r, leaves, depth - 1, shared) for _ in range(r.randrange(4))]
    kind = r.randrange(4)
    if kind == 0:
        return inner
    if kind == 1:
        return tuple(inner)
    keys = [f"k{i}" if kind == 2 else r.choice([i, f"s{i}"]) for i in range(len(inner))]
    return dict(zip(keys, inner, strict=True))


class Halved(nn.Module):
    """Saves copies in half precision, by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self._register_state_dict_hook(lambda _m, s, _p, _l: OrderedDict((k, v.half()) for k, v in s.items()))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight.detach().t().clone()

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].t()
        super()._load_from_state_dict(state, prefix, *args)


class Derived(nn.Linear):
    """Has an attribute that only its hook computes, and extra state."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.sum = 0.0
        self.extra: Any = None
        self.register_load_state_dict_post_hook(lambda m, _: setattr(m, "sum", float(m.weight.sum())))

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


class Odd(nn.Module):
    """Complex, expanded, conjugated, transposed and overlapping entries, and one that is not
    saved."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.register_buffer("conj", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("wide", torch.randn(3).expand(2, 3))
        self.register_buffer("turned", torch.randn(2, 3).t())
        base = torch.randn(6)
        self.register_buffer("left", base[:4])
        self.register_buffer("right", base[2:])
        self.register_buffer("scratch", torch.randn(2), persistent=False)


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4))
    model[1].weight = model[0].weight
    return model


def _copied() -> nn.Module:
    one = nn.Linear(3, 3)
    return nn.ModuleDict({"a/b": one, "copy": copy.deepcopy(one), "again": one})


MODULES: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(3, 3), lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.PReLU()), lambda: nn.LSTM(3, 3), _tied, _copied,
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    lambda: nn.utils.spectral_norm(nn.Linear(3, 3)), lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
    Halved, Transposed, Derived, Odd, lambda: nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last),
    lambda: nn.ParameterList([nn.Parameter(torch.randn(2))]),
    lambda: nn.Linear(3, 3).to(torch.bfloat16), lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
]  # fmt: skip

OPTIMIZERS: list[str] = [
    n
    for n, c in sorted(vars(torch.optim).items())
    if isinstance(c, type) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer
]


def _optimizer(r: Random, name: str, modules: list[nn.Module]) -> torch.optim.Optimizer:
    parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
    if name == "Muon":
        parameters = [p for p in parameters if p.dim() == 2 and not p.is_complex()] or [nn.Parameter(torch.ones(2, 2))]
    if name in ("Adafactor", "Rprop", "LBFGS", "SparseAdam", "ASGD"):
        parameters = [p for p in parameters if not p.is_complex()] or [nn.Parameter(torch.ones(2))]
    options: dict[str, Any] = {"lr": r.choice([0.1, 0.01])}
    if name in ("Adam", "AdamW") and r.random() < 0.5:
        options |= {"amsgrad": r.random() < 0.5, "lr": torch.tensor(0.01), "foreach": False}
    if name in ("SGD", "RMSprop"):
        options["momentum"] = 0.9
    make = getattr(torch.optim, name)
    if name == "LBFGS" or len(parameters) < 2 or r.random() < 0.5:
        return make(parameters, **options)
    return make(
        [
            {"params": parameters[:1], "weight_decay": 0.0} if name != "SparseAdam" else {"params": parameters[:1]},
            {"params": parameters[1:]},
        ],
        **options,
    )


def _scheduler(r: Random, optimizer: torch.optim.Optimizer) -> Any:
    lrs = torch.optim.lr_scheduler
    return r.choice(
        [
            lambda: lrs.StepLR(optimizer, 2),
            lambda: lrs.CosineAnnealingLR(optimizer, 10),
            lambda: lrs.ReduceLROnPlateau(optimizer),
            lambda: lrs.SequentialLR(optimizer, [lrs.ConstantLR(optimizer), lrs.ExponentialLR(optimizer, 0.9)], [2]),
            lambda: lrs.MultiStepLR(optimizer, [2, 3, 3]),
            lambda: lrs.CosineAnnealingWarmRestarts(optimizer, 3),
            lambda: lrs.PolynomialLR(optimizer),
            lambda: lrs.LambdaLR(optimizer, lambda step: 0.5**step),
        ]
    )()


def _train(optimizer: torch.optim.Optimizer, sparse: bool, generator: torch.Generator) -> None:
    """Makes steps with arbitrary gradients. Only the resulting state matters."""

    def closure() -> float:
        for group in optimizer.param_groups:
            for p in group["params"]:
                gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
                p.grad = gradient.to_sparse() if sparse else gradient
        return 1.0

    closure()
    optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)


def build(number: int, *, fresh: bool) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Returns objects, extra values, and the kind.

    ``plain`` (only what must be accepted), ``rich`` or ``refused``.
    """
    r = Random(number)
    kind = "plain" if number % 2 == 0 else "refused" if number % 10 == 1 else "rich"
    seed = torch.Generator().manual_seed(number)
    torch.manual_seed(number + (10**6 if fresh else 0))
    leaves = PLAIN + (RICH * 2 if kind != "plain" else [])
    objects: dict[str, Any] = {}
    modules: dict[str, nn.Module] = {name: r.choice(MODULES)() for name in ("model", "other")[: r.randrange(3)]}
    if len(modules) == 2 and r.random() < 0.3:
        # Two of one kind, whose parameters have equal names.
        modules["other"] = copy.deepcopy(modules["model"])
    objects.update(modules)
    name = OPTIMIZERS[number // 2 % len(OPTIMIZERS)]
    if any(p.requires_grad for m in modules.values() for p in m.parameters()):
        optimizer = _optimizer(r, name, list(modules.values()))
        objects["optimizer"] = optimizer
        scheduler = _scheduler(r, optimizer) if r.random() < 0.5 and name != "Muon" else None
        for _ in range(0 if fresh else r.randrange(4)):
            with torch.random.fork_rng(devices=[]):
                _train(optimizer, name == "SparseAdam", seed)
            if scheduler is not None:
                scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
        if scheduler is not None:
            objects["scheduler"] = scheduler
    r = Random(number + 7)
    for n in range(r.randrange(1, 3)):
        value = _nested(r, leaves, 4, [])
        if kind == "refused" and n == 0:
            value = {"good": value, "bad": [_nested(r, PLAIN, 2, []), r.choice(REFUSED)(r)]}
        objects[f"kept{n}"] = Kept(None if fresh else value)
    for module in modules.values():
        if isinstance(module, Derived) and not fresh:
            module.extra = _nested(r, PLAIN if kind == "plain" else leaves, 2, [])
    extra = {"best": _nested(r, leaves, 2, [])}
    return objects, extra, kind


def change(number: int, objects: dict[str, Any]) -> None:
    """Changes what a script may change once the structure of its state is known.

    Options that groups share, and state other than tensors.
    """
    r = Random(-number - 1)
    for optimizer in (o for o in objects.values() if isinstance(o, torch.optim.Optimizer)):
        shared = r.choice(
            ([0.5, 0.25], {"a": [1]}, ("text", 3), (1, 2.0), [[], ()], OrderedDict(b=1), np.arange(3), "text", 1 << 80)
        )
        for group in optimizer.param_groups:
            group["late"], group["later"] = shared, shared if r.random() < 0.8 else r.choice((None, 1, [0.5]))
        if r.random() < 0.5:
            value = r.choice(
                (
                    [1.0, torch.ones(2)],
                    deque([1, 2], 3),
                    np.arange(3.0),
                    range(4),
                    {"a": (1, "b")},
                    OrderedDict(b=1, a=2),
                    "text",
                    b"bytes",
                    {1, 2},
                )
            )
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    state["late"] = value
