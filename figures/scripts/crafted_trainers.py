"""The trainers whose checkpoints are crafted, and what of them is compared with the files."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass
class Trainer:
    """Everything that a ``CheckpointManager`` is given."""

    objects: dict[str, Any]
    #: Makes one step.
    train: Callable[[], None]
    #: Its extra values.
    extra: dict[str, Any]

    def modules(self) -> dict[str, nn.Module]:
        return {name: o for name, o in self.objects.items() if isinstance(o, nn.Module)}

    def parameters(self, name: str) -> dict[str, Tensor]:
        """Returns the parameters of an optimizer, by the names under which everstep saves their
        state."""
        known = {id(p): f"{m}.{key}" for m, module in self.modules().items() for key, p in module.named_parameters()}
        members = [p for group in self.objects[name].param_groups for p in group["params"]]
        return {known.get(id(p), f"param_{n}"): p for n, p in enumerate(members)}

    def kept(self) -> Iterator[tuple[str, Any]]:
        """Yields everything but the tensors of modules, by the name of its object and in the form
        of what is saved."""
        for name, obj in self.objects.items():
            if isinstance(obj, torch.optim.Optimizer):
                members = self.parameters(name)
                loose = {n: p for n, p in members.items() if n.startswith("param_")}
                yield name, {"state": {n: obj.state.get(p, {}) for n, p in members.items()}, "values": loose}
            elif isinstance(obj, nn.Module):
                yield name, {"values": {k: v for k, v in obj.state_dict().items() if not isinstance(v, Tensor)}}
            else:
                yield name, obj.state_dict()


class Encoder(nn.Module):
    """A module of several types, with values of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6).bfloat16())
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))
        self.seen: Tensor
        self.register_buffer("seen", torch.arange(6))
        self.told: Any = {"words": ["a", "b"], "table": torch.arange(4.0), "pair": (1, 2.5), "keyed": {3: {7}}}

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state


class Held:
    """Any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def plain() -> Trainer:
    """Returns a model and Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)

    def train() -> None:
        model(torch.ones(2, 8)).sum().backward()
        adam.step()

    return Trainer({"model": model, "optimizer": adam}, train, {"loss": 0.5, "tokens": 12345})


def _held() -> dict[Any, Any]:
    shared = [1, "x"]
    return {
        "buffer": torch.arange(12).view(3, 4).t(), "tied": torch.ones(3), "deep": {"inner": [torch.zeros(2), (torch.ones(1), "a")]},
        "generator": torch.Generator(), "last": deque([1, 2.5], 4), "count": Counter("abca"), "by": defaultdict(list, {"a": [1]}),
        "range": range(0, 10, 3), "slice": slice(1, None), "size": torch.Size([2, 3]), "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "shared": shared, "again": shared, "keyed": {5: "by number", (1, "a"): None},
    }  # fmt: skip


def _extra() -> dict[str, Any]:
    shared = {"a": [1, 2]}
    return {
        "loss": 0.5, "tensor": torch.arange(6.0).view(2, 3), "tuple": (1, "a", (2.5, None)),
        "ordered": OrderedDict(b=1, a=[2]), "set": {1, 2, 3},
        "frozen": frozenset([(1, 2)]), "bytes": b"\0\xff", "big": 1 << 200, "complex": 1.5 - 2j,
        "array": np.arange(6, dtype="<i2").reshape(2, 3),
        "columns": np.asfortranarray(np.ones((2, 3))), "words": np.array(["a", "bcd"]), "time": np.datetime64("2024-06-01"),
        "scalar": np.float32(1.5),
        "lone": "\ud800", "bytearray": bytearray(b"abc"), "more": ..., "parameter": nn.Parameter(torch.ones(2)), "shared": [shared, shared],
    }  # fmt: skip


def rich() -> Trainer:
    """Returns models, optimizers, schedulers and values of all types, and gives numpy another
    generator."""
    np.random.set_bit_generator(np.random.Philox(7))
    np.random.standard_normal()
    made = plain()
    adam, encoder, loose = made.objects["optimizer"], Encoder(), nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    sgd = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)
    lbfgs = torch.optim.LBFGS([loose], max_iter=3, history_size=2)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 2)
    warmup = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: min(step / 4, 1.0))

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = ((loose - 3) ** 4).sum()
        loss.backward()
        return loss

    def train() -> None:
        made.train()
        (encoder.weight.float().sum() + encoder.phase.abs().sum() + encoder.wide.abs().sum()).backward()
        sgd.step()
        lbfgs.step(closure)
        scheduler.step()
        warmup.step()

    others = {
        "encoder": encoder,
        "sgd": sgd,
        "lbfgs": lbfgs,
        "scheduler": scheduler,
        "warmup": warmup,
        "held": Held(_held()),
    }
    return Trainer({**made.objects, **others}, train, _extra())


def as_before() -> None:
    """Gives the global generators of Python and numpy the same state for each input; a trainer does
    torch's."""
    random.seed(0)
    np.random.set_bit_generator(np.random.MT19937(0))


def draw() -> None:
    """Uses the global generators, which may be in any state that a reader has accepted."""
    random.gauss(0, 1)
    np.random.standard_normal()
    torch.randn(1)


TRAINERS: dict[str, Callable[[], Trainer]] = {"plain": plain, "rich": rich}
