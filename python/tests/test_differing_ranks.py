"""Checkpoints whose ranks have different values by the same names, restored with other ranks or
another sharding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.ranks import run_phase

_OBJECTS = """
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


def _ranks(tmp_path: Path, script: str, phase: str, size: int, *, fails: bool = False) -> str:
    return run_phase(tmp_path, f"{_OBJECTS}{script}\nckpt.close()", phase, size, fails=fails)


_SHAPE = """
def manager(shape, values, dim=0):
    model = nn.Linear(4, 4, bias=False)
    model.weight = sharded(values.view(shape), dim)
    return es.CheckpointManager(out, persist=1, model=model)
if saving:
    ckpt = manager((8, 4), torch.arange(32.0))
    ckpt.step(1)
else:
    for dim, shape in ((0, (4, 4)), (0, (16, 4)), (0, (8, 2)), (1, (4, 8))):
        ckpt = manager(shape, torch.zeros(shape), dim)
        try:
            ckpt.restore()
        except es.CheckpointError as e:
            assert f"model.weight: shape [8, 4] in the checkpoint, {list(shape)} in the model" in str(e), e
        else:
            raise AssertionError(f"{shape} was accepted")
"""


def test_a_sharded_weight_of_another_shape_is_refused(tmp_path):
    """A part of a smaller weight lies within the larger one of the checkpoint."""
    _ranks(tmp_path, _SHAPE, "save", 2)
    for size in (2, 1):
        _ranks(tmp_path, _SHAPE, "load", size)


_OWN = """
r = rank if saving else 99
model = nn.Linear(4, 4, bias=False)
model.weight = sharded(torch.arange(16.0).view(4, 4) if saving else torch.zeros(4, 4), not saving)
model.register_buffer("mean", torch.full((2,), float(r)))
data = Held({"position": r, "buffer": torch.full((2,), float(r)), "longer": torch.full((3 + r,), float(r))})
# Equal sets may have another order.
progress = Held({"tokens": 5 if saving else 0, "lengths": torch.arange(3) if saving else None, "names": {0, 8} if rank else {8, 0}})
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
    errors = _ranks(tmp_path, _OWN, "load", 3, fails=True)
    assert "data= has different values on ranks 0 and 1" in errors, errors[-2000:]
    # What all ranks have in common is restored to any number of them, but it may be where each was
    # in its own data.
    warned = _ranks(tmp_path, _OWN, "common", 3)
    assert warned.count("progress= had the same value on all 2 ranks of the checkpoint") == 1, warned[-2000:]


_SHARDED_BUFFER = """
model = nn.Linear(4, 2, bias=False)
model.register_buffer("mean", torch.arange(4.0) if saving else torch.zeros(4))
if not saving:
    model.weight = sharded(torch.zeros(2, 4))
    model.mean = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
ckpt = es.CheckpointManager(out, persist=1, model=model)
if saving:
    ckpt.step(1)
else:
    assert ckpt.restore() == 1
    assert model.mean.full_tensor().tolist() == [0, 1, 2, 3], model.mean
"""


def test_a_buffer_that_was_whole_is_restored_in_parts(tmp_path):
    _ranks(tmp_path, _SHARDED_BUFFER, "save", 1)
    _ranks(tmp_path, _SHARDED_BUFFER, "load", 2)


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
    errors = _ranks(tmp_path, _INDEPENDENT, "load", 1, fails=True)
    assert "model.weight has different values on ranks 0 and 1" in errors, errors[-2000:]


_COPIES = """
model = nn.Linear(4, 4, bias=False)
model.weight = sharded(torch.ones(4, 4))
free = nn.Parameter(torch.full((2,), rank + 1.0))
drifted = 1 + 1e-6 * rank
model.bias = nn.Parameter(torch.full((4,), drifted))
# More than are looked at together.
model.gains = nn.ParameterList([nn.Parameter(torch.full((2,), drifted)) for _ in range(300)])
if phase == "load":
    # Its own copy of the weights is what the module gives away.
    model.register_state_dict_post_hook(lambda m, state, *_: state.update({k: v.clone() for k, v in state.items()}))
extra = [free] if "free" in out else []
optimizer = torch.optim.SGD([*model.parameters(), *extra], lr=0.1)
ckpt = es.CheckpointManager(out, persist=1, model=model, optimizer=optimizer)
ckpt.step(1) if saving else ckpt.restore()
assert not saving or phase == "save"
if not saving:
    assert model.bias.tolist() == [1.0] * 4, model.bias
"""


def test_copies_that_have_drifted_apart_are_no_models_of_their_own(tmp_path):
    _ranks(tmp_path, _COPIES, "save", 2)
    warned = _ranks(tmp_path, _COPIES, "load", 1)
    assert "model.bias (and 300 more) differs slightly between ranks 0 and 1" in warned, warned[-2000:]


def test_a_parameter_of_no_module_is_compared_too(tmp_path):
    (tmp_path / "free").mkdir()
    _ranks(tmp_path / "free", _COPIES, "save", 2)
    errors = _ranks(tmp_path / "free", _COPIES, "load", 1, fails=True)
    assert "optimizer/values/param_302 has different values on ranks 0 and 1" in errors, errors[-2000:]


_STAGES = """
stage = rank // 2 if size == 4 else rank
inner = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))["fsdp"] if size == 4 else None
for kind, rows, said in (("alike", 4, "has different values on ranks"), ("unlike", 8, "in one shard and")):
    model = nn.Linear(4, rows if stage else 4, bias=False)
    if inner is not None:
        value = float(stage + 1) if saving else 0.0
        model.weight = sharded(torch.full((model.out_features, 4), value), mesh=inner)
    ckpt = es.CheckpointManager(f"{out}/{kind}", persist=1, model=model)
    if saving:
        ckpt.step(1)
        ckpt.close()
    elif size == 4:
        assert ckpt.restore() == 1
        assert model.weight.full_tensor().unique().tolist() == [stage + 1], model.weight
    else:
        try:
            ckpt.restore()
        except es.CheckpointError as e:
            assert said in str(e), e
        else:
            raise AssertionError(f"{kind}: {model.weight}")
"""


def test_stages_that_use_the_same_names_are_restored_only_to_the_same_ranks(tmp_path):
    _ranks(tmp_path, _STAGES, "save", 4)
    for kind in ("alike", "unlike"):
        line = [Path(sys.executable).parent / "everstep", "ckpt", "verify", tmp_path / "out" / kind]
        verdict = subprocess.run(line, capture_output=True, text=True, check=False)
        assert verdict.returncode == 0, verdict.stdout
    for size in (4, 2):
        _ranks(tmp_path, _STAGES, "load", size)


_COMPLEX = """
model = nn.Module()
model.weight = sharded(torch.ones(4, 2, dtype=torch.complex128))
ckpt = es.CheckpointManager(out, persist=1, model=model)
ckpt.step(1)
"""


def test_a_sharded_tensor_that_could_not_be_read_is_refused_when_it_is_saved(tmp_path):
    errors = _ranks(tmp_path, _COMPLEX, "save", 2, fails=True)
    assert "model.weight is a sharded tensor of torch.complex128" in errors, errors[-2000:]
