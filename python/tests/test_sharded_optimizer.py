"""Sharded tensors (``DTensor``) of optimizers: parameters of no module, and state of any form, with
the same and with other ranks."""

from __future__ import annotations

from pathlib import Path

from harness.ranks import run_phase

_SEEDED = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(1)
"""


def _ranks(tmp_path: Path, script: str, phase: str, size: int, *, fails: bool = False) -> str:
    return run_phase(tmp_path, _SEEDED + script, phase, size, fails=fails)


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


def test_a_sharded_parameter_of_no_module_keeps_its_value(tmp_path):
    _ranks(tmp_path, _LOOSE, "save", 2)
    for size in (2, 3, 1):
        _ranks(tmp_path, _LOOSE, "load", size)


def test_and_so_do_all_parameters_of_a_module_that_the_manager_does_not_have(tmp_path):
    (tmp_path / "alone").mkdir()
    _ranks(tmp_path / "alone", _LOOSE, "save", 2)
    _ranks(tmp_path / "alone", _LOOSE, "load", 2)
    errors = _ranks(tmp_path / "alone", _LOOSE, "turned", 2, fails=True)
    assert "parameter 0, which belongs to no module, is sharded differently in the checkpoint" in errors


_STATE = """
sharded = "whole" not in phase
model = nn.Linear(4, 6)
if sharded:
    fully_shard(model, mesh=mesh)
weight, bias = model.weight, model.bias
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
W = torch.arange(24.0).reshape(6, 4)

def made(value, *kinds):
    return distribute_tensor(value, mesh, kinds or [Shard(0)]) if sharded else value

# What was saved by one process is sharded as its parameter is.
AS_PARAMETER = ()
if "saved-whole" in out:
    AS_PARAMETER = ("/hist[0]", "/hist[1]/deep", "/momentum", "/mask", "/again[0]", "/again[1]/deep")

def state_of(rank):
    hist = [made(W), {"deep": made(W + 1)}]
    state = {"hist": hist, "momentum": made(W + 2), "rows": made(W[:, :1].clone()), "cols": made(W[:1].clone(), Replicate()),
             "old_dirs": [torch.arange(5.0)], "mask": W + 3, "none": [None], "step": torch.tensor(3.0)}
    if size == 2 and not AS_PARAMETER:
        state["local"] = torch.full((3, 4), float(rank))
    # One list for two parameters.
    return state, {"again": hist}

def same(found, right, path):
    if isinstance(right, torch.Tensor):
        want = sharded and (path in AS_PARAMETER if AS_PARAMETER else isinstance(right, DTensor))
        assert isinstance(found, DTensor) is want, (path, type(found))
        assert phase != "load-2" or AS_PARAMETER or not want or found.placements == right.placements, path
        whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in (found, right)]
        assert torch.equal(*whole), (path, *whole)
    elif isinstance(right, dict):
        # A plain tensor of the shape of a part is each rank's own.
        assert found.keys() - {"local"} == right.keys() - {"local"}, (path, found.keys())
        for k in right:
            same(found[k], right[k], f"{path}/{k}")
    elif isinstance(right, list):
        assert type(found) is list and len(found) == len(right), path
        for i, (a, b) in enumerate(zip(found, right)):
            same(a, b, f"{path}[{i}]")
    else:
        assert found == right, (path, found)

right = state_of(rank)
if saving or phase == "save-whole":
    optimizer.state[weight], optimizer.state[bias] = right
ckpt = es.CheckpointManager(out, persist=1, model=model, optimizer=optimizer)
if saving or phase == "save-whole":
    ckpt.step(1)
else:
    assert ckpt.restore() == 1
    for found, wanted in zip((optimizer.state[weight], optimizer.state[bias]), right):
        same(found, wanted, "")
    assert optimizer.state[weight]["hist"] is optimizer.state[bias]["again"]
ckpt.close()
"""


def test_state_in_containers_is_read_with_other_ranks_and_each_tensor_is_sharded_as_it_was(tmp_path):
    _ranks(tmp_path, _STATE, "save", 2)
    for phase, size in (("load-2", 2), ("load-3", 3), ("load-whole", 1)):
        _ranks(tmp_path, _STATE, phase, size)


def test_state_of_one_process_is_sharded_as_its_parameters_are(tmp_path):
    (tmp_path / "saved-whole").mkdir()
    _ranks(tmp_path / "saved-whole", _STATE, "save-whole", 1)
    _ranks(tmp_path / "saved-whole", _STATE, "load-2", 2)


_REFUSED = """
model = nn.Linear(4, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.state[model.weight]["average"] = [distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])]
es.CheckpointManager(out, persist=1, model=model, optimizer=optimizer).step(1)
"""


def test_a_sharded_tensor_whose_mesh_would_not_be_known_is_refused(tmp_path):
    errors = _ranks(tmp_path, _REFUSED, "save", 1, fails=True)
    assert "optimizer/state/model.weight/average/0 is a sharded tensor (DTensor) that is not in the state of" in errors


_SUMS = """
model = nn.Linear(4, 6)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
terms = torch.full((2,), rank + 1.0)
if saving:
    optimizer.state[model.weight]["sum"] = DTensor.from_local(terms, mesh, [Partial()], run_check=False)
ckpt = es.CheckpointManager(out, persist=1, model=model, optimizer=optimizer)
if saving:
    ckpt.step(1)
else:
    assert ckpt.restore() == 1
    found = optimizer.state[model.weight]["sum"]
    assert found.placements == (Partial(),) and torch.equal(found.to_local(), terms), found
ckpt.close()
"""


def test_a_tensor_that_ranks_have_in_terms_is_restored_by_as_many_only(tmp_path):
    _ranks(tmp_path, _SUMS, "save", 2)
    _ranks(tmp_path, _SUMS, "load", 2)
    errors = _ranks(tmp_path, _SUMS, "load", 1, fails=True)
    assert "a partial sum (Partial) that must be reduced" in errors


_OTHER_MESH = """
mesh = mesh if saving else init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))
model = nn.Linear(4, 4)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = es.CheckpointManager(out, persist=1, model=model, optimizer=optimizer)
if saving:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    ckpt.step(1)
else:
    assert ckpt.restore() == 1
    for p in model.parameters():
        found = optimizer.state[p]["exp_avg"]
        assert isinstance(found, DTensor) and found.placements == p.placements, found
        assert found.full_tensor().abs().sum() > 0
ckpt.close()
"""


def test_a_mesh_with_another_dimension_that_shards_alike_is_no_other_sharding(tmp_path):
    _ranks(tmp_path, _OTHER_MESH, "save", 2)
    _ranks(tmp_path, _OTHER_MESH, "load", 2)


_EMPTY = """
model = nn.Linear(4, 1)
fully_shard(model, mesh=mesh)
p = nn.Parameter(distribute_tensor(torch.arange(4.0) + 1 if saving else torch.zeros(4), mesh, [Shard(0)]))
optimizer = torch.optim.SGD([*model.parameters(), p], lr=0.0)
ckpt = es.CheckpointManager(out, persist=1, model=model, optimizer=optimizer)
if saving:
    p.square().sum().backward()
    optimizer.step()
    ckpt.step(1)
else:
    assert ckpt.restore() == 1
    assert torch.equal(p.full_tensor(), torch.arange(4.0) + 1), p.full_tensor()
ckpt.close()
"""


def test_a_rank_with_no_elements_of_a_parameter_knows_of_it(tmp_path):
    """Of 4 elements on 3 ranks the last has none, as of the module's bias."""
    _ranks(tmp_path, _EMPTY, "save", 3)
    for size in (3, 4):
        _ranks(tmp_path, _EMPTY, "load", size)
