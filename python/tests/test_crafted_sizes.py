"""Files of torch and of its DCP that claim to have more than they have: a few bytes are never
expanded to any length."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import deque

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._tensor import _rebuild_from_type_v2

import everstep.dcp
from everstep import CheckpointError, convert, hf_format
from everstep.dcp import foreign

#: More than any machine has.
HUGE = 1 << 50


def _repeated(size: int) -> torch.Tensor:
    return torch.as_strided(torch.ones(1), (size,), (0,))


def _nested(levels: int) -> list[object]:
    found: list[object] = [1]
    for _ in range(levels):
        found = [found, found]
    return found


def _laughing() -> object:
    found = _nested(30)
    return {"kept": {"deep": found, "tensors": (torch.ones(2),)}}


def _many(count: int) -> object:
    tensor = torch.ones(1 << 20)
    return {str(n): tensor for n in range(count)}


@pytest.mark.parametrize(
    "state",
    [
        {"model": {"w": _repeated(HUGE)}},
        {"model": {f"w{n}": _repeated(1 << 20) for n in range(20)}},
        _many(60),
        _laughing(),
    ],
    ids=["one", "several", "occurrences", "lists"],
)
def test_a_torch_file_whose_values_are_much_larger_is_refused(tmp_path, state):
    torch.save(state, tmp_path / "all.pt")
    with pytest.raises(CheckpointError, match="would take more than 32 times") as found:
        convert.from_torch(tmp_path / "all.pt")
    assert "in your own program" in str(found.value)


def test_tensors_that_repeat_their_elements_are_imported_if_they_are_small(tmp_path):
    state = {"model": {"mean": _repeated(1 << 20), "sparse": torch.eye(3).to_sparse()}, "tied": _many(8)}
    torch.save(state, tmp_path / "all.pt")
    found = convert.from_torch(tmp_path / "all.pt")
    assert torch.equal(found["model"]["mean"], state["model"]["mean"]) and len(found["tied"]) == 8


def test_a_compressed_torch_file_is_refused(tmp_path):
    packed = io.BytesIO()
    torch.save({"w": torch.zeros(1 << 20)}, packed)
    with (
        zipfile.ZipFile(packed) as plain,
        zipfile.ZipFile(tmp_path / "all.pt", "w", zipfile.ZIP_DEFLATED) as file,
    ):
        for name in plain.namelist():
            file.writestr(name, plain.read(name))
    assert (tmp_path / "all.pt").stat().st_size < 1 << 16 and torch.load(tmp_path / "all.pt")["w"].numel() == 1 << 20
    with pytest.raises(CheckpointError, match="compresses none"):
        convert.from_torch(tmp_path / "all.pt")


def _dcp_saved(directory, state):
    dcp.save(state, checkpoint_id=str(directory), no_dist=True)
    return pickle.loads((directory / ".metadata").read_bytes())


@pytest.mark.parametrize("kind", ["repeated", "sparse", "meta"])
def test_a_part_of_a_tensor_without_its_bytes_is_damage(tmp_path, kind):
    metadata = _dcp_saved(tmp_path, {"w": torch.ones(4)})
    value = {
        "repeated": _repeated,
        "sparse": lambda size: torch.sparse_coo_tensor([[0]], [1.0], (size,)),
        "meta": lambda size: torch.empty(size, device="meta"),
    }[kind]
    for size in (100, HUGE):
        torch.save(value(size), tmp_path / "other.distcp")
        (info,) = metadata.storage_data.values()
        info.relative_path, info.offset, info.length = "other.distcp", 0, (tmp_path / "other.distcp").stat().st_size
        (entry,) = metadata.state_dict_metadata.values()
        entry.size = entry.chunks[0].sizes = torch.Size([size])
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=r"fewer bytes than its shape needs|would take more"):
            foreign.load(tmp_path)


def test_items_that_share_their_bytes_are_damage(tmp_path):
    metadata = _dcp_saved(tmp_path, {"a": torch.ones(4000), "b": torch.ones(4000)})
    (first, info), (other, _) = metadata.storage_data.items()
    metadata.storage_data[other] = info
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert foreign.load(tmp_path)["b"].sum() == 4000, "the file has room for both"
    for name in ("c", "d", "e"):
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata["a"]
        metadata.storage_data[type(first)(name, first.offset)] = info
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="more than the file has"):
        foreign.load(tmp_path)


def test_a_name_that_is_a_tuple_of_tuples_is_not_written_out(tmp_path):
    """Each level doubles the text, and adds a few bytes to the file."""
    metadata = _dcp_saved(tmp_path, {"w": torch.ones(4)})
    name: object = ()
    for _ in range(12):
        name = (name, name)
    metadata.planner_data = _Pairs(name)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    with pytest.raises(CheckpointError, match="expected str, found tuple"):
        foreign.load(tmp_path)


class _Pairs:
    """Is pickled as an OrderedDict of one item, which is not made here: it would hash its key."""

    def __init__(self, key: object) -> None:
        self._key = key

    def __reduce__(self) -> tuple[object, ...]:
        from collections import OrderedDict

        return OrderedDict, (), None, None, iter([(self._key, 5)])


class _Call:
    """Is unpickled by a call."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> object:
        return self.call


@pytest.mark.parametrize(
    "what",
    [
        _Call(bytearray, HUGE),
        _Call(bytearray, torch.tensor(1 << 20)),
        _Call(torch.Tensor, 4),
        _Call(torch.FloatTensor, 1 << 20),
        _Call(torch.UntypedStorage, HUGE),
        _Call(_rebuild_from_type_v2, torch.Tensor, torch.Tensor, (1 << 14,), {}),
        _Call(_rebuild_from_type_v2, bytearray, bytearray, (HUGE,), {}),
        _Call(_rebuild_from_type_v2, _rebuild_from_type_v2, torch.Tensor, (bytearray, bytearray, (HUGE,), {}), {}),
    ],
    ids=[
        "bytearray",
        "bytearray of a tensor",
        "Tensor",
        "FloatTensor",
        "UntypedStorage",
        "a given Tensor",
        "a given bytearray",
        "twice given",
    ],
)
def test_calls_for_memory_are_damage(tmp_path, what):
    """torch.load(weights_only=True) makes them: of any size, or with whatever lay there before."""
    torch.save({"inside": [what]}, tmp_path / "all.pt")
    with pytest.raises(CheckpointError, match=r"which torch\.save does not write"):
        convert.from_torch(tmp_path / "all.pt")


def test_plain_values_are_no_calls_for_memory(tmp_path):
    state = {"a": bytearray(b"abc"), "b": {1, 2}, "c": 3 + 4j, "d": torch.float32, "e": torch.Size([1]), "f": 1 << 70}
    torch.save(state, tmp_path / "all.pt")
    assert convert.from_torch(tmp_path / "all.pt") == state


def test_tensors_with_attributes_are_no_calls_for_memory(tmp_path):
    """torch.save writes them as a call of a function that is given another one."""
    for tensor in (torch.ones(3), nn.Parameter(torch.ones(3)), torch.eye(3).to_sparse(), torch.ones(3, device="meta")):
        tensor.note = "mine"
        torch.save({"w": tensor}, tmp_path / "all.pt")
        found = convert.from_torch(tmp_path / "all.pt")["w"]
        assert found.note == "mine" and type(found) is type(tensor) and found.shape == tensor.shape


def test_a_file_of_an_old_torch_is_refused_with_what_to_do(tmp_path):
    """It may name storages that it does not contain, which torch leaves as they were allocated."""
    torch.save({"w": torch.ones(2)}, tmp_path / "all.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"load it with torch\.load and save it again"):
        convert.from_torch(tmp_path / "all.pt")


def test_the_values_of_a_whole_directory_share_what_they_may_take(tmp_path):
    """Each item of a checkpoint of DCP was allowed as much as a whole file."""
    state = {f"o{n}": (torch.ones(1).expand(1 << 22),) for n in range(10)}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    with pytest.raises(CheckpointError, match="would take more than 32 times"):
        foreign.load(tmp_path / "dcp")


def test_strings_that_occur_many_times_count(tmp_path):
    text = "x" * (1 << 20)
    torch.save({f"k{n}": text for n in range(200)}, tmp_path / "all.pt")
    with pytest.raises(CheckpointError, match="would take more than 32 times"):
        convert.from_torch(tmp_path / "all.pt")


def _imported(source, out, monkeypatch):
    monkeypatch.setattr("sys.argv", ["everstep", "import", str(source), str(out), "--from", "torch"])
    assert convert.main() == 0
    return convert.load(out)


def test_attributes_of_tensors_are_not_believed(tmp_path, monkeypatch):
    """torch's planner asks a tensor for its place in a larger one."""
    tensor = torch.arange(4.0)
    tensor.global_shape, tensor.global_offsets = (4,), ((2,), (0,))
    tensor.local_offsets, tensor.local_sizes = ((0,), (2,)), ((2,), (2,))
    torch.save({"model": {"w": tensor}}, tmp_path / "all.pt")
    found = _imported(tmp_path / "all.pt", tmp_path / "out", monkeypatch)
    assert found["model"]["w"].tolist() == [0, 1, 2, 3]


def test_an_import_says_what_torch_does_not_save(tmp_path, monkeypatch):
    """The state of plain SGD is an empty dict, without which an optimizer does not load it. An
    entry for it would make torch's planner look for other names than those in the checkpoint."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    torch.save({"optimizer": optimizer.state_dict(), "scaler": {}}, tmp_path / "all.pt")
    with pytest.warns(UserWarning, match=r"does not save empty dicts, so optimizer\.state, scaler will be missing"):
        found = _imported(tmp_path / "all.pt", tmp_path / "out", monkeypatch)
    optimizer.load_state_dict({**found["optimizer"], "state": {}})
    target = {"optimizer": optimizer.state_dict(), "scaler": {}}
    target["optimizer"]["param_groups"][0]["lr"] = 0.1
    dcp.load(target, storage_reader=everstep.dcp.Reader(tmp_path / "out"), no_dist=True)
    assert target["optimizer"]["param_groups"][0]["lr"] == 0.5


def test_what_only_a_pickle_restores_is_not_damaged(tmp_path):
    """Items that are added to anything but a list."""
    state = {"buffer": deque([1, 2]), "w": torch.ones(1)}
    dcp.save(state, storage_writer=everstep.dcp.Writer(tmp_path / "out"), no_dist=True)
    with pytest.raises(CheckpointError, match=r"holds collections\.deque.*allow_pickle=True"):
        convert.load(tmp_path / "out")
    target = {"buffer": deque(), "w": torch.zeros(1)}
    reader = everstep.dcp.Reader(tmp_path / "out", allow_pickle=True)
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert target["buffer"] == deque([1, 2])


def test_lists_that_occur_in_each_other_are_exported_once_or_not_at_all(tmp_path):
    """torch's planner looks at each occurrence, and so did everstep: neither would have ended."""
    state = {"model": {"w": torch.ones(1)}, "extra": {"x": _nested(60)}}
    with pytest.raises(CheckpointError, match="occur in each other so often"):
        convert.to_dcp(state, tmp_path / "dcp")
    convert.to_torch(state, tmp_path / "all.pt")
    with pytest.warns(UserWarning, match="not known to be modules: data"):
        hf_format.to_hf({**state, "data": [_nested(60), torch.ones(1)]}, tmp_path / "hf")


def test_lists_that_occur_often_are_exported(tmp_path, recwarn):
    numbers = [*range(100_000)]
    state = {"model": {"w": torch.ones(1)}, "x": {str(n): numbers for n in range(20)}, "extra": {}}
    convert.to_dcp(state, tmp_path / "dcp")
    assert not [w for w in recwarn if "will be missing" in str(w.message)], "a step without values of its own"
    assert convert.from_dcp(tmp_path / "dcp") == {name: state[name] for name in ("model", "x")}
