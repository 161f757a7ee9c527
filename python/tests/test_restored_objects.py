"""Modules and optimizers come back whole.

Parameters by object, hooks and copies through load_state_dict, wrappers unwrapped.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

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


def _save(directory: Path, step: int = 1, **objects: Any) -> None:
    ckpt = es.CheckpointManager(directory, persist=1, **objects)
    ckpt.step(step)
    ckpt.close()


def _restore(directory: Path, **objects: Any) -> None:
    assert es.CheckpointManager(directory, **objects).restore() == 1


def _update(optimizer: torch.optim.Optimizer, *modules: nn.Module) -> None:
    for n, module in enumerate(modules, 1):
        loss = module(torch.full((2, 3), float(n))).square().sum()
        loss.backward()
    optimizer.step()


def _pair() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    enc, dec = nn.Linear(3, 3), nn.Linear(3, 3)
    return enc, dec, torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=0.1)


def test_two_modules_of_equal_parameter_names_keep_their_optimizer_state(tmp_path):
    enc, dec, optimizer = _pair()
    _update(optimizer, enc, dec)
    _save(tmp_path, enc=enc, dec=dec, optimizer=optimizer)
    enc2, dec2, other = _pair()
    _restore(tmp_path, enc=enc2, dec=dec2, optimizer=other)
    for one, two in zip([*enc.parameters(), *dec.parameters()], [*enc2.parameters(), *dec2.parameters()], strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], other.state[two]["exp_avg"])


def test_neither_order_nor_names_of_tied_objects_matter(tmp_path):
    enc, dec, optimizer = _pair()
    _update(optimizer, enc, dec)
    both = nn.ModuleList([enc, dec])
    _save(tmp_path, both=both, dec=dec, enc=enc, optimizer=optimizer)
    enc2, dec2, _ = _pair()
    other = torch.optim.Adam([*dec2.parameters(), *reversed(list(enc2.parameters()))], lr=0.1)
    _restore(tmp_path, enc=enc2, dec=dec2, both=nn.ModuleList([enc2, dec2]), optimizer=other)
    assert torch.equal(other.state[enc2.bias]["exp_avg"], optimizer.state[enc.bias]["exp_avg"])


def test_parameters_that_do_not_match_are_refused_with_a_diff(tmp_path):
    enc, dec, optimizer = _pair()
    _update(optimizer, enc, dec)
    _save(tmp_path, enc=enc, dec=dec, optimizer=optimizer)
    enc2, dec2, _ = _pair()
    only = torch.optim.Adam([*enc2.parameters()], lr=0.1)
    with pytest.raises(es.CheckpointError, match=r"dec\.weight: only in the checkpoint, in group 0"):
        _restore(tmp_path, enc=enc2, dec=dec2, optimizer=only)
    groups = torch.optim.Adam([{"params": enc2.parameters()}, {"params": dec2.parameters()}], lr=0.1)
    with pytest.raises(es.CheckpointError, match="has 1 parameter groups, but this one has 2"):
        _restore(tmp_path, enc=enc2, dec=dec2, optimizer=groups)
    other = torch.optim.SGD([*enc2.parameters(), *dec2.parameters()], lr=0.1)
    with pytest.raises(
        es.CheckpointError,
        match=r"the checkpoint was saved with torch\.optim\.adam\.Adam, but this is torch\.optim\.sgd\.SGD",
    ):
        _restore(tmp_path, enc=enc2, dec=dec2, optimizer=other)


def test_a_learning_rate_that_is_a_tensor(tmp_path):
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 3)
        return model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), foreach=False, capturable=False)

    model, optimizer = make()
    _update(optimizer, model)
    optimizer.param_groups[0]["lr"].fill_(0.125)
    _save(tmp_path, model=model, optimizer=optimizer)
    model2, other = make()
    _restore(tmp_path, model=model2, optimizer=other)
    assert torch.equal(other.param_groups[0]["lr"], torch.tensor(0.125))


def test_optimizer_state_keeps_its_own_dtype(tmp_path):
    """torch casts state to the dtype of its parameter when it loads."""

    class Precise(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p] = {
                        "master": torch.full(p.shape, 1 / 3, dtype=torch.float64),
                        "name": "abc",
                        "pair": (1, torch.ones(1)),
                    }

    model = nn.Linear(3, 3)
    optimizer = Precise(model.parameters())
    optimizer.step()
    _save(tmp_path, model=model, optimizer=optimizer)
    again = nn.Linear(3, 3)
    other = Precise(again.parameters())
    _restore(tmp_path, model=again, optimizer=other)
    state = other.state[again.weight]
    assert (
        torch.equal(state["master"], optimizer.state[model.weight]["master"]) and state["master"].dtype is torch.float64
    )
    assert state["name"] == "abc" and state["pair"] == (1, torch.ones(1))


class _Half(nn.Module):
    """Saves copies in half precision, by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.loads: list[str] = []
        self._register_state_dict_hook(lambda _m, state, _p, _l: OrderedDict((k, v.half()) for k, v in state.items()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class _Transposed(nn.Module):
    """Saves its weight transposed, by methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight.detach().t().contiguous()

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].t()
        super()._load_from_state_dict(state, prefix, *args)


class _Cloned(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return OrderedDict((k, v.clone()) for k, v in super().state_dict(*args, **kwargs).items())


class _Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_modules_whose_state_dict_returns_copies_are_restored(tmp_path):
    for make in (_Half, _Transposed, lambda: _Cloned(3, 3)):
        torch.manual_seed(1)
        model = make()
        directory = tmp_path / type(model).__name__
        _save(directory, model=model)
        torch.manual_seed(2)
        again = make()
        _restore(directory, model=again)
        for key, value in model.state_dict().items():
            assert torch.equal(value, again.state_dict()[key]), (type(model), key)
    assert torch.equal(again.weight, model.weight)


def test_parametrizations_and_tied_weights(tmp_path):
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
            nn.utils.spectral_norm(nn.Linear(3, 3)),
            nn.Linear(3, 3),
            nn.Linear(3, 3),
        )
        model[3].weight = model[2].weight
        return model

    model = make(1)
    model(torch.ones(2, 3))
    _save(tmp_path, model=model)
    again = make(2)
    _restore(tmp_path, model=again)
    assert torch.equal(model(torch.ones(2, 3)), again(torch.ones(2, 3))) and again[3].weight is again[2].weight


def test_hooks_of_loading_run_once(tmp_path):
    def make() -> tuple[nn.Module, list[str]]:
        model, calls = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), []
        model.register_load_state_dict_pre_hook(lambda *_: calls.append("pre"))
        model[1].register_load_state_dict_post_hook(lambda *_: calls.append("post"))
        return model, calls

    model, calls = make()
    _save(tmp_path, model=model)
    assert calls == []
    again, calls = make()
    _restore(tmp_path, model=again)
    assert calls == ["pre", "post"] and torch.equal(again[1].weight, model[1].weight)


def test_extra_state_of_any_kind(tmp_path):
    for n, extra in enumerate([{"scale": (1, 2.5), "history": [torch.ones(2)]}, torch.ones(2), None, [frozenset({1})]]):
        model = _Extra()
        model.extra = extra
        _save(tmp_path / str(n), model=model)
        again = _Extra()
        _restore(tmp_path / str(n), model=again)
        assert repr(again.extra) == repr(extra) and torch.equal(again.weight, model.weight)


def test_a_buffer_whose_name_ends_like_extra_state_is_compared_as_any_other(tmp_path):
    def module(buffer: torch.Tensor) -> nn.Module:
        found = nn.Linear(2, 2)
        found.register_buffer("quant_extra_state", buffer)
        return found

    _save(tmp_path, model=module(torch.ones(2, 3)))
    with pytest.raises(es.CheckpointError, match="quant_extra_state: shape"):
        _restore(tmp_path, model=module(torch.zeros(3, 2, dtype=torch.int32)))


def test_extra_state_that_nobody_takes_is_refused(tmp_path):
    model = _Extra()
    model.extra = 3
    _save(tmp_path, model=model)
    with pytest.raises(es.CheckpointError, match=r"model: load_state_dict\(\) rejected(?s:.*)_extra_state"):
        _restore(tmp_path, model=nn.Linear(3, 3))


def test_what_does_not_arrive_is_an_error(tmp_path):
    class Deaf(_Extra):
        def set_extra_state(self, state: Any) -> None:
            pass

    model = Deaf()
    model.extra = 3
    _save(tmp_path / "extra", model=model)
    with pytest.raises(es.CheckpointError, match=r"model\._extra_state was not restored"):
        _restore(tmp_path / "extra", model=Deaf())

    class Forgets(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return OrderedDict((k, v.clone()) for k, v in super().state_dict(*args, **kwargs).items())

        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict({**state, "weight": self.weight}, *args, **kwargs)

    _save(tmp_path / "forgets", model=Forgets(3, 3))
    with pytest.raises(es.CheckpointError, match=r"model\.weight was not restored"):
        _restore(tmp_path / "forgets", model=Forgets(3, 3))


def test_weights_that_were_saved_apart_are_not_loaded_into_tied_ones(tmp_path):
    _save(tmp_path, model=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(es.CheckpointError, match=r"weight was not restored.*tied"):
        _restore(tmp_path, model=tied)


def test_complex_expanded_and_conjugated_entries_of_modules(tmp_path):
    class Odd(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.z = nn.Parameter(torch.randn(3, dtype=torch.complex128))
            self.register_buffer("conj", torch.randn(3, dtype=torch.complex64).conj())
            self.register_buffer("wide", torch.randn(3).expand(4, 3))
            self.register_buffer("turned", torch.randn(2, 3).t())
            self.register_buffer("volatile", torch.randn(3), persistent=False)
            self.register_buffer("small", (torch.arange(3) + seed).to(torch.uint16))

    model, again = Odd(1), Odd(2)
    _save(tmp_path, model=model)
    _restore(tmp_path, model=again)
    for key in ("z", "conj", "wide", "turned", "small"):
        assert torch.equal(getattr(model, key), getattr(again, key)), key
    assert again.conj.is_conj() and not torch.equal(model.volatile, again.volatile)


def test_a_lazy_module_is_refused_until_it_has_a_shape_and_restored_before(tmp_path):
    lazy = nn.LazyLinear(3)
    ckpt = es.CheckpointManager(tmp_path, persist=1, model=lazy)
    with pytest.raises(es.CheckpointError, match=r"model\.(weight|bias) is not initialized yet"):
        ckpt.step(1)
    lazy(torch.ones(1, 2))
    ckpt.step(2)
    ckpt.close()
    again = nn.LazyLinear(3)
    assert es.CheckpointManager(tmp_path, model=again).restore() == 2
    assert torch.equal(again.weight, lazy.weight)


def test_modules_on_the_meta_device_and_sparse_buffers_are_refused(tmp_path):
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    with pytest.raises(es.CheckpointError, match=r"model\.weight is on the meta device"):
        es.CheckpointManager(tmp_path, persist=1, model=meta).step(1)
    module = nn.Module()
    module.register_buffer("s", torch.eye(2).to_sparse())
    with pytest.raises(es.CheckpointError, match=r"model\.s has layout"):
        es.CheckpointManager(tmp_path, persist=1, model=module).step(1)


class _Wrapper(torch.optim.Optimizer):
    """Like Accelerate's: a subclass without its own initialization that forwards everything."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


def test_wrapped_optimizers_are_unwrapped(tmp_path):
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        return model, optimizer, _Wrapper(_Wrapper(optimizer))

    model, optimizer, wrapper = make()
    _update(wrapper, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.step()
    _save(tmp_path, model=model, optimizer=wrapper, scheduler=scheduler)
    again, inner, outer = make()
    clock = torch.optim.lr_scheduler.StepLR(inner, 1)
    _restore(tmp_path, model=again, optimizer=outer, scheduler=clock)
    assert torch.equal(inner.state[again.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert clock.last_epoch == 1 and inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_an_optimizer_around_another_keeps_its_own_state(tmp_path):
    class Lookahead(_Wrapper):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer)
            self.slow = torch.zeros(2)

        def state_dict(self) -> Any:
            return {**self.optimizer.state_dict(), "slow": self.slow}

        def load_state_dict(self, state: Any) -> None:
            self.slow = state["slow"]
            self.optimizer.load_state_dict({k: v for k, v in state.items() if k != "slow"})

    model = nn.Linear(3, 3)
    outer = Lookahead(torch.optim.Adam(model.parameters()))
    _update(outer, model)
    outer.slow += 3
    _save(tmp_path, model=model, optimizer=outer)
    again = nn.Linear(3, 3)
    other = Lookahead(torch.optim.Adam(again.parameters()))
    _restore(tmp_path, model=again, optimizer=other)
    assert torch.equal(other.slow, torch.full((2,), 3.0))
    assert torch.equal(other.optimizer.state[again.weight]["exp_avg"], outer.optimizer.state[model.weight]["exp_avg"])


def test_what_an_optimizer_cannot_save_is_named(tmp_path):
    class LossScaler:
        pass

    class Zero:
        def state_dict(self) -> Any:
            return {"loss_scaler": LossScaler(), "partition": [torch.ones(1)]}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    with pytest.raises(
        es.CheckpointError,
        match=r"optimizer/loss_scaler is of type .*LossScaler, which cannot be saved without pickle; ",
    ):
        es.CheckpointManager(tmp_path, persist=1, optimizer=Zero()).step(1)


def test_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)

    def make() -> tuple[Any, Any]:
        model = nn.Linear(3, 3)
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.5))

    model, optimizer = make()
    _update(optimizer, model)
    _save(tmp_path, model=model, optimizer=optimizer)
    again, other = make()
    _restore(tmp_path, model=again, optimizer=other)
    assert torch.equal(other.state[again.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


#: Checkpoints of an earlier format, in which parameter names lacked the object and some types were
#: lost.
EARLIER = Path(__file__).parent / "golden" / "earlier"


def test_earlier_checkpoints_are_restored_where_their_names_are_unique(tmp_path):
    shutil.copytree(EARLIER / "one", tmp_path / "one")
    model, data = nn.Linear(3, 2), Kept()
    optimizer = torch.optim.Adam([{"params": [model.bias]}, {"params": [model.weight]}], lr=0.25)
    ckpt = es.CheckpointManager(tmp_path / "one", model=model, optimizer=optimizer, data=data)
    assert ckpt.restore() == 1 and ckpt.extra == {"best": 0.5}
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert torch.allclose(optimizer.state[model.weight]["exp_avg"], torch.full((2, 3), 0.1))
    assert (
        data.value["seen"] == {(1, 2)}
        and torch.equal(data.value["left"][0], torch.arange(3))
        and data.value["pair"] == (1, None)
    )


def test_an_earlier_checkpoint_with_ambiguous_names_is_refused(tmp_path):
    shutil.copytree(EARLIER / "two", tmp_path / "two")
    enc, dec = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.Adam([*enc.parameters(), *dec.parameters()])
    with pytest.raises(es.CheckpointError, match="weight names several parameters"):
        es.CheckpointManager(tmp_path / "two", enc=enc, dec=dec, optimizer=optimizer).restore()
    assert es.CheckpointManager(tmp_path / "two", enc=enc, dec=dec).restore() == 1


def test_a_parameter_that_its_optimizer_lost_sight_of_is_refused_at_capture(tmp_path):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=1)
    _update(optimizer, model)
    ckpt.step(1)
    trained, average = model.weight, nn.Parameter(torch.ones(3, 3))
    model.weight = average
    with pytest.raises(
        es.CheckpointError,
        match=r"^model\.weight is no longer the parameter of its module, but optimizer= still holds it",
    ):
        ckpt.step(2)
    model.weight = trained
    ckpt.step(3)
    model.weight = average
    optimizer.param_groups[0]["params"][0] = average
    optimizer.state[average] = optimizer.state.pop(trained)
    ckpt.step(4)
    ckpt.close()
    fresh = nn.Linear(3, 3)
    again = es.CheckpointManager(tmp_path, model=fresh, optimizer=torch.optim.AdamW(fresh.parameters(), lr=0.1))
    assert again.restore() == 4
    assert torch.equal(fresh.weight, average)
