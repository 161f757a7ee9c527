"""Optimizer state other than tensors comes back exactly, even where torch would create it anew."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everstep as es


def _training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW([{"params": list(part.parameters())} for part in model], lr=0.1)
    return model, optimizer


def _update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "shared", [[0.5, 0.25], {"a": 1}, ("enc", 3), [["deep"]]], ids=["list", "dict", "tuple", "nested"]
)
def test_an_object_that_groups_come_to_share_is_theirs_after_a_restore(tmp_path, shared):
    model, optimizer = _training(1)
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=1)
    for step in range(1, 5):
        _update(model, optimizer)
        if step == 3:
            # The structure is known by now.
            for group in optimizer.param_groups:
                group["kept"] = shared
        ckpt.step(step)
    ckpt.close()
    model, other = _training(2)
    for group in other.param_groups:
        group["kept"] = None
    assert es.CheckpointManager(tmp_path, model=model, optimizer=other, persist=0).restore() == 4
    kept = [group["kept"] for group in other.param_groups]
    assert kept == [shared, shared] and type(kept[0]) is type(shared)
    assert other.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def _values(shared: Any) -> dict[str, Any]:
    return {
        "array": np.arange(3),
        "nested": {"a": np.arange(3.0), "b": [np.float32(1)]},
        "range": range(3),
        "last": deque([1.0, 2.0], 3),
        "ordered": OrderedDict(b=1, a=torch.ones(2)),
        "shared": shared,
        "text": "text",
        "bytes": b"bytes",
        "set": {1, 2},
        "none": None,
        "flag": True,
    }


def test_what_torch_makes_anew_comes_back_as_it_was(tmp_path):
    model, optimizer = _training(1)
    _update(model, optimizer)
    shared = [1.0, torch.zeros(2)]
    for state in optimizer.state.values():
        state.update(_values(shared))
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=1)
    ckpt.step(1)
    ckpt.close()
    model, other = _training(2)
    assert es.CheckpointManager(tmp_path, model=model, optimizer=other, persist=0).restore() == 1
    lists = []
    for own, was in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert [*own] == [*was]
        assert np.array_equal(own["array"], np.arange(3)) and own["array"].dtype == np.arange(3).dtype
        assert np.array_equal(own["nested"]["a"], np.arange(3.0)) and type(own["nested"]["b"][0]) is np.float32
        assert own["range"] == range(3) and own["last"] == deque([1.0, 2.0]) and own["last"].maxlen == 3
        assert (
            type(own["ordered"]) is OrderedDict
            and [*own["ordered"]] == ["b", "a"]
            and torch.equal(own["ordered"]["a"], torch.ones(2))
        )
        assert (own["text"], own["bytes"], own["set"], own["none"], own["flag"]) == (
            "text",
            b"bytes",
            {1, 2},
            None,
            True,
        )
        lists.append(own["shared"])
    assert all(each is lists[0] for each in lists)
    _update(model, other)


def test_values_of_a_step_go_with_it_when_the_manager_makes_it_durable(tmp_path):
    def run(last: int, close: Any) -> tuple[int, dict[str, Any]]:
        ckpt = es.CheckpointManager(tmp_path, model=nn.Linear(2, 2), persist=1000)
        done, extra = ckpt.restore(), dict(ckpt.extra)
        for step in range(done + 1, last + 1):
            ckpt.step(step, best=step)
        close(ckpt)
        ckpt.close()
        return done, extra

    assert run(5, lambda ckpt: None) == (0, {})
    assert run(8, lambda ckpt: ckpt.save()) == (5, {"best": 5})
    assert run(8, lambda ckpt: ckpt.save(9)) == (8, {"best": 8})
    assert run(9, lambda ckpt: ckpt.save(10, best="mine")) == (9, {"best": 8})
    assert run(10, lambda ckpt: None) == (10, {"best": "mine"})


@pytest.mark.parametrize("hooked", [False, True])
def test_one_element_of_a_larger_tensor(tmp_path, hooked):
    def model(first: float) -> nn.Module:
        found = nn.Linear(4, 4)
        found.register_buffer("one", (torch.arange(4.0) + first).reshape(1, 4)[:, 2])
        found.register_buffer("two", found.one)
        if hooked:
            found.register_load_state_dict_post_hook(lambda module, keys: None)
        return found

    ckpt = es.CheckpointManager(tmp_path, model=model(1.0), persist=1)
    ckpt.step(1, last=torch.arange(4.0).reshape(1, 4)[:, 3])
    ckpt.close()
    other = model(7.0)
    ckpt = es.CheckpointManager(tmp_path, model=other, persist=0)
    assert ckpt.restore() == 1
    assert other.one.item() == other.two.item() == 3.0 and ckpt.extra["last"].item() == 3.0


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_numpy_s_global_generator_of_any_kind(tmp_path: Path, name):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, name)(3))
        np.random.standard_normal()
        ckpt = es.CheckpointManager(tmp_path, model=nn.Linear(2, 2), persist=1)
        ckpt.step(1)
        ckpt.close()
        wanted = [np.random.standard_normal() for _ in range(3)]
        np.random.set_bit_generator(np.random.MT19937(5))
        assert es.CheckpointManager(tmp_path, model=nn.Linear(2, 2), persist=0).restore() == 1
        assert [np.random.standard_normal() for _ in range(3)] == wanted
        assert type(np.random.get_bit_generator()).__name__ == name
    finally:
        np.random.set_bit_generator(before)


def test_generators_of_more_gpus_than_there_are_do_not_stop_a_restore(tmp_path: Path, monkeypatch):
    states = [torch.full((16,), n, dtype=torch.uint8) for n in range(3)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    ckpt = es.CheckpointManager(tmp_path, model=nn.Linear(1, 1), persist=1)
    ckpt.step(1)
    ckpt.close()
    found = {}

    def set_rng_state(state: torch.Tensor, device: int) -> None:
        # As torch does where there is no such device.
        if device >= 2:
            raise IndexError(device)
        found[device] = state

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda all_: [set_rng_state(s, n) for n, s in enumerate(all_)])
    with pytest.warns(UserWarning, match="of 3 GPUs, but this process sees 2"):
        assert es.CheckpointManager(tmp_path, model=nn.Linear(1, 1), persist=0).restore() == 1
    assert [found[n].tolist() for n in (0, 1)] == [s.tolist() for s in states[:2]]


def test_minus_zero_is_not_zero(tmp_path: Path):
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(1, 1)
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    model, optimizer = made()
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=1)
    for step in range(1, 7):
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        # Compared with its earlier value once the structure of the state is known.
        optimizer.state[model.weight]["seen"] = 0.0 if step < 5 else -0.0
        ckpt.step(step)
    model, optimizer = made()
    assert es.CheckpointManager(tmp_path, model=model, optimizer=optimizer).restore() == 6
    assert math.copysign(1, optimizer.state[model.weight]["seen"]) == -1


class Holder:
    """Saves a parameter of its own."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"parameter": self.parameter.detach()}

    def load_state_dict(self, value: dict[str, torch.Tensor]) -> None:
        self.parameter.data.copy_(value["parameter"])


def test_parameters_of_no_module_keep_their_values(tmp_path):
    """For example a temperature or logit scale: in the optimizer, but in nothing else that is
    saved."""

    def made() -> tuple[
        torch.Tensor, torch.Tensor, torch.Tensor, es.CheckpointManager, torch.optim.Optimizer, nn.Module
    ]:
        model = nn.Linear(2, 1)
        scale, matrix, held = (
            torch.zeros(1, requires_grad=True),
            torch.zeros(3, 2).t().requires_grad_(),
            torch.zeros(1000, requires_grad=True),
        )
        optimizer = torch.optim.Adam([*model.parameters(), scale, matrix, held], lr=0.1)
        return (
            scale,
            matrix,
            held,
            es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, holder=Holder(held), persist=1),
            optimizer,
            model,
        )

    *one, ckpt, optimizer, model = made()
    assert ckpt.restore() == 0
    for step in range(1, 4):
        (
            model(torch.ones(1, 2)).sum() * one[0].exp() + one[0] + sum((p + 1).square().sum() for p in one)
        ).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step)
    ckpt.close()
    names = [e.name for e in es._internal.open_shard(str(tmp_path / "step-3"), 0).entries()]
    assert "optimizer/values/param_2" in names and "optimizer/values/param_4" not in names, (
        "what another object saves is not saved twice"
    )
    *two, ckpt, _, _ = made()
    assert ckpt.restore() == 3
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(one, two, strict=True))


def test_a_flat_parameter_is_saved_although_a_module_has_a_view_of_its_beginning(tmp_path):
    def made(value: float) -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
        flat = nn.Parameter(torch.full((10,), value))
        model = nn.Linear(2, 1, bias=False)
        model.weight = nn.Parameter(flat.data[:2].view(1, 2))
        return model, flat, torch.optim.SGD([flat], lr=0.1)

    model, _, optimizer = made(3.0)
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=1)
    ckpt.step(1)
    ckpt.close()
    model, flat, optimizer = made(0.0)
    assert es.CheckpointManager(tmp_path, model=model, optimizer=optimizer).restore() == 1
    assert torch.equal(flat.detach(), torch.full((10,), 3.0))


class _Renamed(torch.optim.Adam):
    """The same under another name."""


def test_an_optimizer_class_of_another_name_takes_the_state_of_one_with_a_scheduler(tmp_path):
    def training(kind: type[torch.optim.Optimizer]):
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"model": model, "optimizer": optimizer, "schedule": schedule}

    saved = training(torch.optim.Adam)
    ckpt = es.CheckpointManager(tmp_path, persist=1, **saved)
    for step in range(1, 4):
        saved["model"](torch.ones(1, 2)).sum().backward()
        saved["optimizer"].step()
        saved["schedule"].step()
        ckpt.step(step)
    ckpt.close()
    restored = training(_Renamed)
    assert es.CheckpointManager(tmp_path, **restored).restore() == 3
    assert restored["optimizer"].param_groups[0]["lr"] == saved["optimizer"].param_groups[0]["lr"]


def test_a_default_device_changes_nothing(tmp_path):
    def training() -> tuple[nn.Module, torch.optim.Optimizer, es.CheckpointManager]:
        model = nn.Linear(3, 2, device="cpu")
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=1)

    model, optimizer, ckpt = training()
    ckpt.restore()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    ckpt.step(1)
    ckpt.close()
    again, other, ckpt = training()
    # Memory on any other device has no address on the host.
    with torch.device("meta"):
        assert ckpt.restore() == 1
    assert torch.equal(again.weight, model.weight)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        for key, value in optimizer.state[p].items():
            assert torch.equal(other.state[q][key], value), key


def test_a_parameter_that_is_given_twice_is_refused(tmp_path):
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "decoder": nn.Linear(2, 2)})
    model["decoder"].weight = model["encoder"].weight
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([p for m in model.values() for p in m.parameters()], lr=0.1, momentum=0.5)
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=1)
    ckpt.restore()
    with pytest.raises(es.CheckpointError, match=r"encoder\.weight more than once.*each parameter once"):
        ckpt.step(1)


def test_a_scheduler_may_be_added_and_an_optimizer_may_keep_state_of_no_parameter(tmp_path):
    model, optimizer = _training(1)
    optimizer.state["whole"] = {"name": "a", "seen": [1, 2]}
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=1)
    ckpt.restore()
    _update(model, optimizer)
    ckpt.step(1)
    ckpt.close()
    model, optimizer = _training(2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    assert es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=0).restore() == 1
    assert optimizer.state["whole"] == {"name": "a", "seen": [1, 2]}
    assert [group["initial_lr"] for group in optimizer.param_groups] == scheduler.base_lrs


def test_groups_keep_the_order_of_their_options(tmp_path):
    model, optimizer = _training(1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=1)
    ckpt.restore()
    _update(model, optimizer)
    ckpt.step(1)
    ckpt.close()
    before = [list(group) for group in optimizer.state_dict()["param_groups"]]
    model, optimizer = _training(2)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    assert es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=0).restore() == 1
    assert [list(group) for group in optimizer.state_dict()["param_groups"]] == before


class _Unusual(torch.optim.Optimizer):
    """An optimizer of the user whose state does not have torch's form."""

    def __init__(self, parameters: Any, form: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.form = form

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if self.form == "option":
                group[5] = 1
            for p in group["params"]:
                if self.form == "tensor":
                    self.state[p] = torch.ones(2)  # type: ignore[assignment]
                else:
                    self.state[p]["seen"] = 1


@pytest.mark.parametrize(
    ("form", "said"),
    [("tensor", "the state of model.weight is a Tensor"), ("option", "parameter group 0 has the key 5")],
)
def test_a_state_that_could_not_be_restored_is_refused_when_it_is_saved(tmp_path, form, said):
    model = nn.Linear(2, 2)
    optimizer = _Unusual(model.parameters(), form)
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=1)
    optimizer.step()
    with pytest.raises(es.CheckpointError, match=said):
        ckpt.step(1)


@pytest.mark.parametrize("key", [-1, 100])
def test_state_by_a_number_that_is_no_parameters_is_not_one_of_them(tmp_path, key):
    """A negative one was taken for a position from the end."""
    model, optimizer = _training(1)
    _update(model, optimizer)
    optimizer.state[key] = {"exp_avg": torch.full((2,), 5.0), "seen": "text"}
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=1)
    ckpt.step(1)
    ckpt.close()
    model, other = _training(2)
    assert es.CheckpointManager(tmp_path, model=model, optimizer=other, persist=0).restore() == 1
    assert other.state[key]["seen"] == "text" and torch.equal(other.state[key]["exp_avg"], torch.full((2,), 5.0))
    last, was = (list(o.param_groups[-1]["params"])[-1] for o in (other, optimizer))
    assert torch.equal(other.state[last]["exp_avg"], optimizer.state[was]["exp_avg"])
    assert other.state[last].keys() == optimizer.state[was].keys()
