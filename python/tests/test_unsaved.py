"""A manager reports what it cannot save, or cannot bring back exactly."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import everstep as es


def _update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class TrainState:
    """A user's own object around an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> Any:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state.pop("optimizer"))


def test_an_optimizer_made_anew_in_the_loop_is_said(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=0)
    ckpt.restore()
    _update(model, optimizer)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="AdamW.* trains parameters that are saved, but is not saved itself"):
        _update(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _update(model, optimizer)
    ckpt.close()


class Outer(torch.optim.Optimizer):
    """An optimizer that works with another one."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.Adam(parameters)

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


class Sharp(torch.optim.Optimizer):
    """Makes its steps with another optimizer, whose state it forgets to save (as SAM does)."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.Adam(parameters)

    def step(self, closure: Any = None) -> None:
        self.base.step(closure)


def test_an_optimizer_inside_another_that_does_not_save_it_is_warned_about(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = Sharp([*model.parameters()])
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=0)
    ckpt.restore()
    with pytest.warns(UserWarning, match="Adam.* trains parameters that are saved, but is not saved itself"):
        _update(model, optimizer)
    ckpt.close()


@pytest.mark.parametrize("case", ["given", "in an object", "inside another", "of another model", "without state"])
def test_other_optimizers_are_not(tmp_path, case):
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.Adam((other if case == "of another model" else model).parameters())
    objects: dict[str, Any] = {"given": {"optimizer": optimizer}, "in an object": {"train": TrainState(optimizer)}}.get(
        case, {}
    )
    if case == "inside another":
        optimizer = Outer([*model.parameters()])
        objects = {"optimizer": optimizer}
    if case == "without state":
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ckpt = es.CheckpointManager(tmp_path, model=model, persist=0, **objects)
    ckpt.restore()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _update(other if case == "of another model" else model, optimizer)
    ckpt.close()


class Momentum(torch.optim.Optimizer):
    """Its momentum has more precision than its parameters, which torch does not keep on loading."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum"] = self.state[p].get("momentum", 0) + p.grad.float() / 3


@pytest.mark.parametrize(("kind", "exact"), [(Momentum, False), (torch.optim.Adam, True)])
def test_an_object_that_changes_what_it_loads_is_said(tmp_path, kind, exact):
    def made() -> tuple[nn.Module, torch.optim.Optimizer, es.CheckpointManager]:
        model = nn.Linear(2, 1, dtype=torch.bfloat16)
        optimizer = kind(model.parameters())
        return model, optimizer, es.CheckpointManager(tmp_path, model=model, train=TrainState(optimizer), persist=1)

    model, optimizer, ckpt = made()
    ckpt.restore()
    _update(model, optimizer)
    ckpt.step(1)
    ckpt.close()
    _, _, ckpt = made()
    if exact:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ckpt.restore() == 1
    else:
        with pytest.warns(
            UserWarning, match="train/optimizer/state/0/momentum differs from the checkpoint after load_state_dict"
        ):
            assert ckpt.restore() == 1


def test_a_manager_may_be_collected_while_an_optimizer_makes_a_step(tmp_path):
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
    # Registered before the manager's hook: torch still calls the hooks that follow.
    handle = register_optimizer_step_post_hook(lambda *_: gc.collect())
    try:
        ckpt: Any = es.CheckpointManager(tmp_path, model=nn.Linear(2, 1), persist=0)
        ckpt.itself = ckpt
        del ckpt
        optimizer.step()
    finally:
        handle.remove()
