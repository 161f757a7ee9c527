"""Sharded tensors (``DTensor``) of optimizers: parameters of no module, and state of any form, with the same and with other ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.ranks import run_ranks

_BEGIN = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
import everstep as es
out, phase = sys.argv[1:3]
saving = phase == "save"
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
torch.manual_seed(1)
"""
_END = """
dist.barrier()
dist.destroy_process_group()
# fully_shard over gloo aborts in torch's own destructors now and then.
sys.stdout.flush()
os._exit(0)
"""


def _ranks(tmp_path: Path, script: str, phase: str, size: int, *, fails: bool = False) -> str:
    """Runs ``script`` as ``size`` ranks; returns what they printed, or the errors of a run that fails."""
    path = tmp_path / "train.py"
    path.write_text(_BEGIN + script + _END)
    ended = run_ranks([sys.executable, str(path), str(tmp_path / "out"), phase], size)
    errors = "\n".join(r.err for r in ended)
    assert all((r.code != 0) is fails for r in ended), errors[-3000:]
    return errors if fails else "".join(r.out for r in ended)


_LOOSE = """
modules = {}
if "alone" not in sys.argv[1]:
    modules["model"] = nn.Linear(4, 4)
    fully_shard(modules["model"], mesh=mesh)
whole = torch.arange(12.0).reshape(6, 2) + 1
kinds = [Shard(1)] if phase == "turned" else [Shard(0)]
p = nn.Parameter(distribute_tensor(whole if saving else torch.zeros(6, 2), mesh, kinds))
optimizer = torch.optim.SGD([*(q for m in modules.values() for q in m.parameters()), p], lr=0.25, momentum=0.9)
ckpt = es.CheckpointManager(out, persist=1, optimizer=optimizer, **modules)
if saving:
    for m in modules.values():
        m(torch.ones(1, 4)).sum().backward()
    p.square().sum().backward()
    optimizer.step()
    ckpt.step(1)
else:
    assert ckpt.restore() == 1
    assert torch.equal(p.full_tensor(), whole / 2), p.full_tensor()
    momentum = optimizer.state[p]["momentum_buffer"]
    assert isinstance(momentum, DTensor) and torch.equal(momentum.full_tensor(), 2 * whole), momentum
ckpt.close()
"""


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (2, 1)])
def test_a_sharded_parameter_of_no_module_keeps_its_value(tmp_path, before, after):
    _ranks(tmp_path, _LOOSE, "save", before)
    _ranks(tmp_path, _LOOSE, "load", after)


def test_and_so_do_all_parameters_of_a_module_that_the_manager_does_not_have(tmp_path):
    (tmp_path / "alone").mkdir()
    _ranks(tmp_path / "alone", _LOOSE, "save", 2)
    _ranks(tmp_path / "alone", _LOOSE, "load", 2)
    errors = _ranks(tmp_path / "alone", _LOOSE, "turned", 2, fails=True)
    assert "parameter 0, which belongs to no module, is sharded in another way in the checkpoint" in errors
