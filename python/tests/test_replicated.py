"""Which objects are taken to be the same on all ranks, so that one rank's state can stand for
another's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import everstep as es
from everstep._internal import Arena, reserve_slot
from everstep.outcome import Arrivals
from everstep.replicated import is_replicated
from everstep.slots import Slots, Snapshot
from everstep.state import Layout, State
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


class _Reader:
    """A data reader with a position of its own on each rank."""

    position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class _Wrapped:
    """Wraps a scheduler as Accelerate does."""

    def __init__(self, scheduler: object, **beside: int) -> None:
        self.scheduler, self.beside = scheduler, beside

    def state_dict(self) -> dict[str, object]:
        state = self.scheduler.state_dict()
        return {**state, **self.beside} if self.beside else state

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.scheduler.load_state_dict(state)


def _scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), 1)


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


@pytest.mark.filterwarnings("ignore:.*GradScaler")
def test_objects_that_are_known_to_be_the_same_are_replicated():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    known = {
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        "scheduler": _Wrapped(_Wrapped(_scheduler())),
        "scaler": torch.cuda.amp.GradScaler(enabled=False),
        "sampler": es.data.ElasticDistributedSampler(range(8)),
        "stream": es.data.ElasticIterable(lambda epoch, first: iter(range(first, 8)), samples=8, batch_size=2),
        "batch": es.resumable(lambda: torch.randn(3)),
    }
    for name, obj in known.items():
        assert is_replicated({"model": _ddp(), name: obj}), name


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
        lambda: {"model": _ddp(), "data": _Reader()},
        lambda: {"model": _ddp(), "scheduler": _Wrapped(_scheduler(), seen=3)},
        lambda: {"model": _ddp(), "scheduler": _Wrapped(_Reader())},
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
        "a data reader",
        "a scheduler and more",
        "a data reader named scheduler",
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
    """A checkpoint of one rank, read by one of three: DDP's state can be anybody's; that of experts
    and of a data reader cannot.
    """
    model = _ddp()
    for number, more in enumerate([{}, {"experts": nn.Linear(3, 3)}, {"data": _Reader()}]):
        objects = {"model": model, **more}
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
                pytest.raises(es.CheckpointError, match="each with its own state"),
            ):
                again.restore()


def _synchronizing() -> nn.Module:
    model = _ddp(broadcasts=True)
    # DDP itself takes them on a GPU only.
    model.module[1] = nn.SyncBatchNorm(3)
    return model


@pytest.mark.parametrize(
    ("model", "rank", "said"),
    [
        (_ddp, 0, True),
        (lambda: torch.compile(_ddp()), 0, True),
        (_ddp, 1, False),
        (_ddp, 2, False),
        (_synchronizing, 0, False),
        (lambda: _ddp(nn.Linear(3, 3)), 0, False),
    ],
    ids=["rank 0", "compiled", "rank 1", "the same rank", "SyncBatchNorm", "no buffers"],
)
def test_rank_0_reports_that_it_has_the_statistics_of_another_rank(tmp_path, capfd, model, rank, said):
    """DDP sends rank 0's to all ranks before each forward pass."""
    slots, source = Slots(Arrivals()), State({"net": model()}, Layout(2, 3, True))
    snapshot = Snapshot(1, source.collect({}), None)
    reserve_slot(str(tmp_path / "slot"), snapshot.slot_bytes())
    slots.arena = Arena([str(tmp_path / "slot")], "j", 2, 3, 0, True)
    assert slots.capture(snapshot, None)
    slots.wait()
    world_size = 3 if rank == 2 else 2
    State({"net": model()}, Layout(rank, world_size, True)).restore(slots.arena.shard(1))
    line = (
        "everstep: rank 0 continues with rank 2's running statistics (buffers of net): those of rank 0 were lost; "
        "everything else is the same on all ranks\n"
    )
    assert capfd.readouterr().err == (line if said else "")
