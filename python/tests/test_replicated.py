"""Which objects are taken to be the same on all ranks, so that one rank's state can stand for another's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import everstep as es
from everstep.replicated import is_replicated
from harness.cluster import free_port


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def _ddp(module: nn.Module | None = None, *, broadcasts: bool = True) -> nn.Module:
    model = DistributedDataParallel(_normalized() if module is None else module)
    # The option that sets this has another name in newer versions of torch.
    model.broadcast_buffers = broadcasts
    return model


def _ignoring() -> nn.Module:
    module = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
    return _ddp(module)


def _frozen() -> nn.Module:
    return nn.Linear(3, 3).requires_grad_(False)


def _with_temperature(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(1))])


def _with_constant() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_buffer("frequencies", torch.ones(3), persistent=False)
    return module


def test_what_ddp_keeps_the_same_is_replicated():
    model = _ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    usual = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": torch.amp.GradScaler("cpu")}
    assert is_replicated(usual)
    assert is_replicated({"model": torch.compile(model)})
    assert is_replicated({"model": model, "body": model.module, "teacher": _frozen()})
    assert is_replicated({"model": _ddp(_with_constant(), broadcasts=False)})
    assert is_replicated({"generator": _ddp(), "critic": _ddp(nn.Linear(3, 3))})
    assert is_replicated({"model": model, "average": AveragedModel(model.module)})
    assert is_replicated({"model": model, "average": copy.deepcopy(model.module).requires_grad_(False).eval()})


@pytest.mark.parametrize(
    ("objects"),
    [
        lambda: {"model": nn.Linear(3, 3)},
        lambda: {"model": _ddp(), "experts": nn.Linear(3, 3)},
        lambda: {"model": _ddp(), "statistics": nn.BatchNorm1d(3, affine=False)},
        lambda: {"model": (model := _ddp()), "average": copy.deepcopy(model.module)},
        lambda: {"model": _ddp(broadcasts=False)},
        lambda: {"model": _ignoring()},
        lambda: {"model": (model := _ddp()), "optimizer": _with_temperature(model)},
        lambda: {"model": _ddp(), "frozen": _normalized().requires_grad_(False)},
    ],
    ids=[
        "no DDP",
        "another module",
        "other statistics",
        "an average",
        "own statistics",
        "ignored parameters",
        "a parameter of no module",
        "statistics of a frozen module",
    ],
)
def test_what_ddp_leaves_to_each_rank_is_not(objects):
    assert not is_replicated(objects())


def test_ddp_in_a_part_of_the_ranks_is_not_the_same_on_all(monkeypatch):
    model = _ddp()
    assert is_replicated({"model": model})
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    assert not is_replicated({"model": model})


def test_ranks_with_weights_of_their_own_are_not_restored_from_another(tmp_path, monkeypatch):
    """A checkpoint of two ranks, read by one of three: DDP's state can be anybody's, the experts' cannot."""
    model, experts = _ddp(), nn.Linear(3, 3)
    for number, objects in enumerate([{"model": model}, {"model": model, "experts": experts}]):
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv("RANK", "0")
        directory = tmp_path / str(number)
        ckpt = es.CheckpointManager(directory, persist=1, **objects)
        ckpt.restore()
        ckpt.step(1)
        ckpt.close()
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", "1")
        again = es.CheckpointManager(directory, persist=1, **objects)
        if number == 0:
            assert again.restore() == 1
        else:
            with (
                pytest.warns(match="skipping"),
                pytest.raises(es.CheckpointError, match="each with a state of its own"),
            ):
                again.restore()
