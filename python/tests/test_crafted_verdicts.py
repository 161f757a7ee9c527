"""Crafted checkpoints of which ``restore()`` and ``everstep ckpt verify`` used to give different
verdicts."""

from __future__ import annotations

import copy
import json
import os
import subprocess

import msgpack
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import EVERSTEP
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import everstep.dcp
from everstep import CheckpointError, CheckpointManager, blob_format, convert, decoding, encoding
from everstep.data import ElasticDistributedSampler
from figures import crafted_changes, crafting

EXP_AVG = "optimizer/state/model.weight/exp_avg"


def _trainer():
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    return model, torch.optim.Adam(model.parameters())


@pytest.fixture
def crafted(tmp_path):
    """The only step of ``tmp_path / "out"``, taken apart."""
    model, optimizer = _trainer()
    manager = CheckpointManager(tmp_path / "out", model=model, optimizer=optimizer, persist=1)
    manager.restore()
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    manager.step(1)
    manager.close()
    return crafting.read(tmp_path / "out" / "step-1")


def _restore(directory):
    model, optimizer = _trainer()
    return CheckpointManager(directory, model=model, optimizer=optimizer, persist=0).restore(1)


def _verify(directory):
    env = {**os.environ, "VIRTUAL_ENV": os.environ.get("VIRTUAL_ENV", os.path.dirname(os.path.dirname(EVERSTEP)))}
    line = [EVERSTEP, "ckpt", "verify", str(directory)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode in (0, 1) and "shards are good" in done.stdout, done.stdout + done.stderr
    return done.stdout if done.returncode else "good"


def _of_no_optimizer(shard):
    """Removes the record of the objects' kinds, and what an optimizer's state is known by."""
    shard.tensors.remove(shard.blob("layout"))
    blob = shard.blob("optimizer")
    value = decoding.decode(blob.data, lambda name: None, finish=False)
    blob.data = encoding.encode({"state": {}, "names": 1})
    assert "groups" in value
    blob.shape = [len(blob.data)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_value_that_is_not_known_to_be_of_an_optimizer_is_not_damaged(tmp_path, crafted, ranks):
    """Earlier checkpoints do not record kinds. `restore()` said that such a value was damaged."""
    if ranks == 2:
        crafted = crafted_changes.parts(crafted)
    _of_no_optimizer(crafted.shards[0])
    crafted.write(tmp_path / "out" / "step-1")
    assert _verify(tmp_path / "out") == "good"
    with pytest.raises(
        CheckpointError, match="optimizer= is of kind 'other' in the checkpoint, but of kind 'optimizer'"
    ):
        _restore(tmp_path / "out")


def test_a_value_that_a_rank_lacks_is_not_read_from_it(tmp_path, crafted):
    """The record of kinds is each rank's own, and another rank may have one."""
    crafted = crafted_changes.parts(crafted)
    first = crafted.shards[0]
    first.tensors.remove(first.blob("layout"))
    crafted.write(tmp_path / "out" / "step-1")
    assert _verify(tmp_path / "out") == "good"
    assert _restore(tmp_path / "out") == 1


def test_a_part_of_a_tensor_whose_rest_no_rank_has_is_damage(tmp_path, crafted):
    """`restore()` read it as if it was the whole, as the optimizer's state is not compared with the
    places of its parameters."""
    shard = crafted.shards[0]
    number = next(n for n, t in enumerate(shard.tensors) if t.name == EXP_AVG)
    shard.metadata["everstep.places"] = f"{number:x} 0 2 20 10 10 0"
    crafted.write(tmp_path / "out" / "step-1")
    assert EXP_AVG in _verify(tmp_path / "out")
    with pytest.warns(UserWarning, match="the only rank's shard has"), pytest.raises(CheckpointError):
        _restore(tmp_path / "out")


def _with(blob, **changes):
    """Returns a change of a value of the step."""

    def change(shard):
        line = shard.blob(blob)
        value = msgpack.unpackb(line.data[1:], strict_map_key=False)
        line.data = b"\xc1" + msgpack.packb({**value, **changes})
        line.shape = [len(line.data)]

    return change


def _with_table(shard):
    """Adds a table of DCP that lists everything in the shard."""
    dtypes = {"F32": "float32", "U8": "uint8"}
    rows = [
        [t.name, f"v{n}", dtypes[t.dtype], t.shape, [0] * len(t.shape), t.shape] for n, t in enumerate(shard.tensors)
    ]
    table = json.dumps({"version": 1, "pieces": rows, "objects": [], "mappings": {}}).encode()
    shard.tensors.append(crafting.Tensor(crafting.BLOB + "dcp", "U8", [len(table)], table))


TENSOR = {blob_format.TENSOR: "model.weight"}
OTHERS = {blob_format.TENSOR: EXP_AVG}
#: What restore() accepted, or ended with another error than CheckpointError, though it is not what
#: everstep writes.
UNNOTICED = {
    "a weight as an extra value": _with("extra", mine=TENSOR),
    "a tensor of another object": _with("extra", mine=OTHERS),
    "a weight as a value of the optimizer": _with("optimizer", values={"model.weight": None}),
    "a table of DCP": _with_table,
    "a kind without a value": _with("layout", kinds={"model": "module", "optimizer": "optimizer", "ghost": "other"}),
    "a kind whose name is not text": _with(
        "layout",
        kinds={
            blob_format.PAIRS: [
                "model",
                "module",
                "optimizer",
                "optimizer",
                {blob_format.TEXT: b"\xed\xa0\x80"},
                "other",
            ]
        },
    ),
    "names that are an array": _with("optimizer", names={blob_format.ARRAY: ["<i8", bytes(16), [2], False]}),
    "a shape that is no number": _with("optimizer", shapes={"model.weight": [{blob_format.BIG_INT: b"\1" * 2000}]}),
}


@pytest.mark.parametrize("what", UNNOTICED)
def test_what_everstep_does_not_write_is_damage_for_both(tmp_path, crafted, what):
    UNNOTICED[what](crafted.shards[0])
    crafted.write(tmp_path / "out" / "step-1")
    assert "step 1 disk" in _verify(tmp_path / "out")
    with pytest.warns(UserWarning, match="skipping a checkpoint"), pytest.raises(CheckpointError):
        _restore(tmp_path / "out")


class _Mean:
    """A state that is one tensor."""

    def __init__(self, value):
        self.value = torch.tensor(value)

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


def test_a_state_that_is_one_tensor_is_an_objects_own(tmp_path):
    manager = CheckpointManager(tmp_path / "out", mean=_Mean(2.0), persist=1)
    manager.restore()
    manager.step(1)
    manager.close()
    mean = _Mean(0.0)
    assert _verify(tmp_path / "out") == "good"
    assert CheckpointManager(tmp_path / "out", mean=mean, persist=0).restore() == 1 and mean.value == 2.0


def test_a_sampler_is_not_put_outside_of_its_dataset():
    sampler = ElasticDistributedSampler(range(10), seed=1)
    state = sampler.state_dict()
    for change in ({"epoch": []}, {"consumed": 10}, {"epoch": -1}):
        with pytest.raises(CheckpointError):
            sampler.load_state_dict({**state, **change})
    sampler.load_state_dict({**state, "epoch": torch.tensor(0).numpy()[()], "consumed": 3})


STATE = {"list": [torch.ones(2), "a", {"b": 2.5}], "step": 7}


def _dcp_saved(directory, **options):
    dcp.save(copy.copy(STATE), storage_writer=everstep.dcp.Writer(directory), no_dist=True, **options)


def test_a_table_that_does_not_name_a_value_is_damage(tmp_path):
    """Nobody would have missed it until the state was loaded."""
    _dcp_saved(tmp_path / "out")
    found = crafting.read(tmp_path / "out" / "step-1")
    table = found.shards[0].blob("dcp")
    assert b'"list.1", ' in table.data
    table.data = table.data.replace(b'"list.1", ', b"", 1)
    table.shape = [len(table.data)]
    found.write(tmp_path / "out" / "step-1")
    assert "has __everstep__/dcp/list.1, which the table does not list" in _verify(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"has __everstep__/dcp/list\.1, which the table does not list"):
        convert.load(tmp_path / "out")


class _Without(DefaultSavePlanner):
    """Leaves a value out."""

    def __init__(self, name):
        super().__init__()
        self._name = name

    def create_local_plan(self):
        self.state_dict.pop(self._name)
        return super().create_local_plan()


@pytest.mark.parametrize("left_out", ["list.0", "list.1"])
def test_a_list_that_was_saved_with_a_gap_is_not_exported(tmp_path, left_out):
    """Torch ended with "Missing key in checkpoint state_dict: list.1.", or took what stands for a
    value for the value."""
    _dcp_saved(tmp_path / "out", planner=_Without(left_out))
    assert _verify(tmp_path / "out") == "good"
    gap = left_out[-1]
    with pytest.raises(
        CheckpointError, match=f"list.{gap} is not in the checkpoint, which has other items of its list"
    ):
        convert.load(tmp_path / "out")
    state = {"list": copy.deepcopy(STATE["list"]), "step": 0}
    state["list"][int(gap)] = None
    with pytest.raises(dcp.api.CheckpointException, match=f"Missing key in checkpoint state_dict: {left_out}"):
        dcp.load(state, storage_reader=everstep.dcp.Reader(tmp_path / "out"), no_dist=True)
    some = {"step": 0}
    dcp.load(some, storage_reader=everstep.dcp.Reader(tmp_path / "out"), no_dist=True)
    assert some == {"step": 7}


def _with_path(directory, name, path):
    """Gives an item of the list another name and path."""
    found = crafting.read(directory / "step-1")
    shard = found.shards[0]
    table = shard.blob("dcp")
    assert b'"list.1"' in table.data and b'["list", 1]' in table.data
    table.data = table.data.replace(b'"list.1"', f'"{name}"'.encode()).replace(b'["list", 1]', path.encode())
    table.shape = [len(table.data)]
    next(t for t in shard.tensors if t.name.endswith("/list.1")).name = f"{crafting.BLOB}dcp/{name}"
    found.write(directory / "step-1")


@pytest.mark.parametrize(("name", "path"), [("list.-1", '["list", -1]'), ("5", "[5]")])
def test_a_path_that_no_value_has_is_damage(tmp_path, name, path):
    """A negative index would overwrite another item."""
    _dcp_saved(tmp_path / "out")
    _with_path(tmp_path / "out", name, path)
    assert "an invalid path" in _verify(tmp_path / "out")
    with pytest.raises(CheckpointError, match="an invalid path"):
        convert.load(tmp_path / "out")


@pytest.mark.parametrize(("name", "path"), [("list.x", '["list", "x"]'), ("list.0.a", '["list", 0, "a"]')])
def test_paths_that_contradict_each_other_are_damage(tmp_path, name, path):
    """Torch ended with an error of its own."""
    _dcp_saved(tmp_path / "out")
    _with_path(tmp_path / "out", name, path)
    assert "contradicts another path" in _verify(tmp_path / "out")
    with pytest.raises(CheckpointError, match="contradicts another path"):
        convert.load(tmp_path / "out")


def test_a_list_is_not_longer_than_its_items(tmp_path):
    """Torch made a list of that length."""
    _dcp_saved(tmp_path / "out")
    _with_path(tmp_path / "out", "list.99999999", '["list", 99999999]')
    with pytest.raises(CheckpointError, match="is not in the checkpoint, which has other items of its list"):
        convert.load(tmp_path / "out")


def test_several_rows_of_one_part_are_damage(tmp_path):
    """Each would be copied: a few bytes of a table for any amount of memory."""
    _dcp_saved(tmp_path / "out")
    found = crafting.read(tmp_path / "out" / "step-1")
    table = found.shards[0].blob("dcp")
    said = json.loads(table.data)
    (row,) = said["pieces"]
    said["pieces"] += [[row[0], f"w{n}", *row[2:]] for n in range(3)]
    said["mappings"] |= {f"w{n}": [f"w{n}"] for n in range(3)}
    table.data = json.dumps(said).encode()
    table.shape = [len(table.data)]
    found.write(tmp_path / "out" / "step-1")
    assert "two parts of tensors have the same bytes" in _verify(tmp_path / "out")
    with pytest.raises(CheckpointError, match="two parts of tensors have the same bytes"):
        convert.load(tmp_path / "out")


def test_dicts_that_are_empty_in_a_list_are_exported(tmp_path):
    """torch does not save them. In place of the list, the export ended with an error of torch's."""
    state = {"x": [1, {}, 2], "y": [{}, None], "z": [{}] * 1000 + [1]}
    dcp.save(state, storage_writer=everstep.dcp.Writer(tmp_path / "out"), no_dist=True)
    assert _verify(tmp_path / "out") == "good"
    assert convert.load(tmp_path / "out") == state


@pytest.mark.parametrize("name", ["rng", "extra", "layout", "dcp", "mine"])
def test_a_tensor_does_not_have_a_name_of_everstep(tmp_path, name):
    """No reader took such a checkpoint."""
    state = {f"{crafting.BLOB}{name}": torch.ones(1)}
    with pytest.raises(dcp.api.CheckpointException, match="begins with __everstep__/, which is everstep's own"):
        dcp.save(state, storage_writer=everstep.dcp.Writer(tmp_path / "out"), no_dist=True)
    state = {f"{crafting.BLOB}{name}": 5}
    dcp.save(state, storage_writer=everstep.dcp.Writer(tmp_path / "out"), no_dist=True)
    assert _verify(tmp_path / "out") == "good" and convert.load(tmp_path / "out") == state


def test_a_state_that_is_nested_more_deeply_than_any_reader_takes_is_not_saved(tmp_path):
    state = {"x": torch.ones(1)}
    for _ in range(70):
        state = {"x": state}
    with pytest.raises(dcp.api.CheckpointException, match="nested more than 64 levels deep"):
        dcp.save(state, storage_writer=everstep.dcp.Writer(tmp_path / "out"), no_dist=True)


def test_a_generator_of_a_device_that_is_missing_here_is_not_damaged(tmp_path, crafted):
    """A checkpoint of a machine with GPUs was called damaged on one without, and an older one was
    restored."""
    blob = crafted.shards[0].blob("extra")
    blob.data = encoding.encode({"noise": torch.Generator()}).replace(b"\xa3cpu", b"\xa3xpu")
    assert b"xpu" in blob.data
    blob.shape = [len(blob.data)]
    crafted.write(tmp_path / "out" / "step-1")
    assert "values not checked" in _verify(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"a torch.Generator on xpu, which is not available here"):
        _restore(tmp_path / "out")


def test_a_field_of_an_optimizer_that_this_version_does_not_know_is_refused(tmp_path, crafted):
    """It was ignored: a parameter kept the value that it had before."""
    blob = crafted.shards[0].blob("optimizer")
    value = decoding.decode(blob.data, lambda name: None, finish=False)
    blob.data = encoding.encode({**value, "params": {}})
    blob.shape = [len(blob.data)]
    crafted.write(tmp_path / "out" / "step-1")
    assert "'params', which this everstep does not know" in _verify(tmp_path / "out")
    with pytest.raises(CheckpointError, match="install the version that wrote it"):
        _restore(tmp_path / "out")
