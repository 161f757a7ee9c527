"""Checkpoints whose ranks have different values by the same names, restored with other ranks or another sharding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.ranks import run_ranks

_BEGIN = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
import everstep as es
out, phase = sys.argv[1:3]
saving = phase == "save"
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))

class Held:
    def __init__(self, value):
        self.value = value
    def state_dict(self):
        return self.value
    def load_state_dict(self, value):
        self.value = value

def sharded(whole, dim=0, mesh=mesh):
    return nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None))
"""
_END = """
ckpt.close()
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""


def _ranks(tmp_path: Path, script: str, phase: str, size: int, *, fails: bool = False) -> str:
    """Runs ``script`` as ``size`` ranks; returns what they printed, or the errors of a run that fails."""
    path = tmp_path / "train.py"
    path.write_text(_BEGIN + script + _END)
    ended = run_ranks([sys.executable, str(path), str(tmp_path / "out"), phase], size)
    errors = "\n".join(r.err for r in ended)
    assert any(r.code != 0 for r in ended) is fails, errors[-3000:]
    return errors if fails else "".join(r.out for r in ended)


_SHAPE = """
shapes = {"save": (8, 4), "shorter": (4, 4), "longer": (16, 4), "narrower": (8, 2), "turned": (4, 8)}
model = nn.Linear(4, 4, bias=False)
model.weight = sharded(torch.arange(32.0).view(8, 4) if saving else torch.zeros(shapes[phase]), phase == "turned")
ckpt = es.CheckpointManager(out, persist=1, model=model)
ckpt.step(1) if saving else ckpt.restore()
"""


@pytest.mark.parametrize("size", [2, 1])
def test_a_sharded_weight_of_another_shape_is_refused(tmp_path, size):
    """A part of a smaller weight lies within the larger one of the checkpoint."""
    _ranks(tmp_path, _SHAPE, "save", 2)
    for phase, shape in (("shorter", "[4, 4]"), ("longer", "[16, 4]"), ("narrower", "[8, 2]"), ("turned", "[4, 8]")):
        errors = _ranks(tmp_path, _SHAPE, phase, size, fails=True)
        assert f"model.weight: shape [8, 4] in the checkpoint, {shape} in the model" in errors, errors[-2000:]


_OWN = """
r = rank if saving else 99
model = nn.Linear(4, 4, bias=False)
model.weight = sharded(torch.arange(16.0).view(4, 4) if saving else torch.zeros(4, 4), not saving)
model.register_buffer("mean", torch.full((2,), float(r)))
data = Held({"position": r, "buffer": torch.full((2,), float(r)), "longer": torch.full((3 + r,), float(r))})
progress = Held({"tokens": 5 if saving else 0, "lengths": torch.arange(3) if saving else None})
objects = {"data": data} if phase != "common" else {}
ckpt = es.CheckpointManager(out, persist=1, model=model, progress=progress, **objects)
if saving:
    ckpt.step(1)
else:
    assert ckpt.restore() == 1
    assert torch.equal(model.weight.full_tensor(), torch.arange(16.0).view(4, 4))
    was = rank % 2
    assert model.mean.tolist() == [was] * 2, model.mean
    assert progress.value["tokens"] == 5 and progress.value["lengths"].tolist() == [0, 1, 2]
    if objects:
        value = data.value
        assert [value["position"], *value["buffer"], *value["longer"]] == [was] * (6 + was), value
"""


def test_a_rank_gets_its_own_values_when_its_weights_are_sharded_differently(tmp_path):
    _ranks(tmp_path, _OWN, "save", 2)
    _ranks(tmp_path, _OWN, "load", 2)


def test_values_of_each_rank_cannot_be_divided_among_other_ranks(tmp_path):
    _ranks(tmp_path, _OWN, "save", 2)
    for size in (3, 1):
        errors = _ranks(tmp_path, _OWN, "load", size, fails=True)
        assert "data= has different values on ranks 0 and 1" in errors, errors[-2000:]
    # What all ranks have in common is restored to any number of them.
    _ranks(tmp_path, _OWN, "common", 3)


_INDEPENDENT = """
model = nn.Linear(2, 2, bias=False)
nn.init.constant_(model.weight, rank if saving else -1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
objects = {"critic": nn.Linear(1, 1)} if rank == 0 else {}
ckpt = es.CheckpointManager(out, persist=1, model=model, optimizer=optimizer, **objects)
if saving:
    optimizer.state[model.weight] = {"momentum_buffer": torch.full((2, 2), 100.0 + rank)}
    ckpt.step(1)
else:
    assert ckpt.restore() == 1
    assert model.weight.unique().tolist() == [rank], model.weight
    assert optimizer.state[model.weight]["momentum_buffer"].unique().tolist() == [100 + rank]
"""


def test_ranks_with_models_of_their_own_are_not_mixed(tmp_path):
    """That one of them has another object does not make the models stages of one model."""
    _ranks(tmp_path, _INDEPENDENT, "save", 2)
    _ranks(tmp_path, _INDEPENDENT, "load", 2)
    for size in (3, 1):
        errors = _ranks(tmp_path, _INDEPENDENT, "load", size, fails=True)
        assert "model.weight has different values on ranks 0 and 1" in errors, errors[-2000:]


_STAGES = """
rows = 8 if "unlike" in phase and (rank // 2 if size == 4 else rank) else 4
saving = phase.startswith("save")
model = nn.Linear(4, rows, bias=False)
if size == 4:
    stage = rank // 2
    inner = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))["fsdp"]
    model.weight = sharded(torch.full((rows, 4), float(stage + 1) if saving else 0.0), mesh=inner)
ckpt = es.CheckpointManager(out, persist=1, model=model)
if saving:
    ckpt.step(1)
else:
    assert ckpt.restore() == 1
    assert model.weight.full_tensor().unique().tolist() == [stage + 1], model.weight
"""


@pytest.mark.parametrize("kind", ["alike", "unlike"])
def test_stages_that_use_the_same_names_are_restored_only_to_the_same_ranks(tmp_path, kind):
    _ranks(tmp_path, _STAGES, f"save-{kind}", 4)
    verdict = subprocess.run(
        [Path(sys.executable).parent / "everstep", "ckpt", "verify", tmp_path / "out"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert verdict.returncode == 0, verdict.stdout
    _ranks(tmp_path, _STAGES, f"load-{kind}", 4)
    errors = _ranks(tmp_path, _STAGES, f"load-{kind}", 2, fails=True)
    said = "has different values on ranks" if kind == "alike" else "in one shard and"
    assert said in errors, errors[-2000:]


_COMPLEX = """
model = nn.Module()
model.weight = sharded(torch.ones(4, 2, dtype=torch.complex128))
ckpt = es.CheckpointManager(out, persist=1, model=model)
ckpt.step(1)
"""


def test_a_sharded_tensor_that_could_not_be_read_is_refused_when_it_is_saved(tmp_path):
    errors = _ranks(tmp_path, _COMPLEX, "save", 2, fails=True)
    assert "model.weight is a sharded tensor of torch.complex128" in errors, errors[-2000:]
