"""Hand-made checkpoints with valid checksums.

Every reader refuses them in one sentence and uses an older checkpoint, and no code in them runs.
"""

from __future__ import annotations

import copy
import os
import subprocess
import warnings

import pytest
import torch
from conftest import EVERSTEP
from torch import nn

from everstep import CheckpointError, CheckpointManager, decoding, encoding
from everstep._internal import DamagedError
from everstep.damage import reading
from everstep.values import Values
from figures import crafted_changes, crafting

CRAFTED = {
    "long": lambda t: setattr(t, "data", t.data + b"x" * 256),
    "much longer": lambda t: setattr(t, "data", t.data + b"x" * 4096),
    "short": lambda t: setattr(t, "data", t.data[:-4]),
    "empty": lambda t: setattr(t, "data", b""),
    "smaller elements": lambda t: setattr(t, "dtype", "F16"),
    "no such elements": lambda t: setattr(t, "dtype", "F33"),
    "overflowing shape": lambda t: setattr(t, "shape", [1 << 62, 1 << 62]),
    "endless strides": lambda t: setattr(t, "shape", [1 << 40, 0, 1 << 40]),
}


def _trainer():
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    return model, torch.optim.Adam(model.parameters())


def _saved(directory, steps=2):
    """Saves steps 1, 2, … and returns the weights after each."""
    model, optimizer = _trainer()
    manager = CheckpointManager(directory, model=model, optimizer=optimizer, persist=1, keep=steps + 2)
    manager.restore()
    weights = []
    for step in range(1, steps + 1):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        manager.step(step)
        weights.append(model.weight.detach().clone())
    manager.close()
    return weights


def _restored(directory):
    model, optimizer = _trainer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CheckpointManager(
            directory, model=model, optimizer=optimizer, persist=0
        ).restore(), model.weight.detach()


def _ckpt(*arguments):
    line = [EVERSTEP, "ckpt", *map(str, arguments)]
    return subprocess.run(
        line,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "VIRTUAL_ENV": os.environ.get("VIRTUAL_ENV", os.path.dirname(os.path.dirname(EVERSTEP)))},
    )


@pytest.mark.parametrize("name", ["model.weight", "optimizer/state/model.weight/exp_avg"])
@pytest.mark.parametrize("kind", CRAFTED)
def test_a_length_that_is_not_that_of_type_and_shape(tmp_path, kind, name):
    weights = _saved(tmp_path)
    found = crafting.read(tmp_path / "step-2")
    CRAFTED[kind](next(t for t in found.shards[0].tensors if t.name == name))
    found.write(tmp_path / "step-2")
    done, restored = _restored(tmp_path)
    assert done == 1 and torch.equal(restored, weights[0]), "the older one is taken"
    checked = _ckpt("verify", tmp_path)
    assert checked.returncode == 1 and name in checked.stdout and "step 2" in checked.stdout, checked.stdout


def test_export_refuses_it_too(tmp_path):
    _saved(tmp_path)
    found = crafting.read(tmp_path / "step-2")
    CRAFTED["long"](found.shards[0].tensors[0])
    found.write(tmp_path / "step-2")
    done = _ckpt("export", tmp_path / "step-2", tmp_path / "out.pt", "--to", "torch")
    assert done.returncode == 1 and "Traceback" not in done.stderr and "bytes" in done.stderr, done.stderr
    assert not (tmp_path / "out.pt").exists()


_HOST = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."


@pytest.mark.parametrize("where", ["value", "room"])
@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(_HOST)])
@pytest.mark.parametrize("agent", [False, True], ids=["without an agent", "with an agent"])
def test_a_lack_of_memory_is_no_damage(tmp_path, monkeypatch, where, error, agent):
    """A good step is neither skipped for an older one nor reported to the agent as unreadable."""
    weights = _saved(tmp_path)

    def lacking(*_, **__):
        raise error

    failed: list[int] = []
    model, optimizer = _trainer()
    manager = CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=0)
    monkeypatch.setattr(manager._tier, "in_memory", agent)
    monkeypatch.setattr(manager._tier, "failed", failed.append)
    with monkeypatch.context() as short, warnings.catch_warnings():
        warnings.simplefilter("error")
        short.setattr(*((decoding._Decoder, "value") if where == "value" else (torch, "empty")), lacking)
        with pytest.raises(CheckpointError, match="not enough memory to read") as found:
            manager.restore()
    assert not isinstance(found.value, DamagedError) and not failed and str(tmp_path / "step-2") in str(found.value)
    monkeypatch.undo()
    done, restored = _restored(tmp_path)
    assert done == 2 and torch.equal(restored, weights[1])


def test_a_lack_of_memory_when_a_checkpoint_is_opened_is_no_damage(tmp_path, monkeypatch):
    _saved(tmp_path)

    def lacking(*_):
        with reading("a table"):
            raise MemoryError

    monkeypatch.setattr(Values, "places", lacking)
    with pytest.raises(CheckpointError, match="not enough memory to read") as found:
        _restored(tmp_path)
    assert not isinstance(found.value, DamagedError)


@pytest.mark.parametrize("error", [MemoryError("4 TiB"), torch.OutOfMemoryError("CUDA"), RuntimeError(_HOST)])
def test_a_lack_of_memory_while_an_object_loads_its_state_is_no_damage(tmp_path, monkeypatch, error):
    """It ended the process with an error that did not say what to do."""
    _saved(tmp_path)

    def lacking(*_):
        raise error

    model, optimizer = _trainer()
    monkeypatch.setattr(torch.optim.Adam, "load_state_dict", lacking)
    manager = CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=0)
    with pytest.raises(CheckpointError, match="free host or GPU memory") as found:
        manager.restore()
    assert not isinstance(found.value, DamagedError) and str(tmp_path / "step-2") in str(found.value)


def test_a_shape_with_more_than_the_files_have_is_damage(tmp_path):
    """No memory is enough for a tensor of which the shards claim to have parts."""
    weights = _saved(tmp_path)
    found = crafted_changes.parts(crafting.read(tmp_path / "step-2"))
    at = [t.name for t in found.shards[0].tensors].index("optimizer/state/model.weight/exp_avg")
    for shard in found.shards:
        words = shard.metadata["everstep.places"].split()
        row = next(i for i in range(0, len(words), 7) if int(words[i], 16) == at)
        words[row + 3] = f"{1 << 44:x}"
        shard.metadata["everstep.places"] = " ".join(words)
    found.write(tmp_path / "step-2")
    done, restored = _restored(tmp_path)
    assert done == 1 and torch.equal(restored, weights[0])


@pytest.mark.parametrize("length", [999, 1000])
def test_lists_that_are_longer_than_the_value_are_damage(monkeypatch, length):
    """msgpack allocates a list of the length that it claims to have."""
    data = b"\xc1\xdc" + length.to_bytes(2, "big") + bytes(999)

    def lacking(*_, **__):
        raise MemoryError

    monkeypatch.setattr(decoding.msgpack, "unpackb", lacking)
    with pytest.raises(CheckpointError) as found:
        decoding.decode(data, lambda _: None)
    assert isinstance(found.value, DamagedError) == (length == 1000)


@pytest.mark.parametrize("kind", ["device", "fifo", "shard link", "shard fifo"])
def test_links_and_fifos_are_no_checkpoints(tmp_path, kind):
    weights = _saved(tmp_path)
    manifest, shard = tmp_path / "step-2" / "manifest.json", tmp_path / "step-2" / "rank-0.safetensors"
    path = shard if "shard" in kind else manifest
    path.rename(tmp_path / "elsewhere")
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "shard link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path)
    # Neither command waits, nor reads without end.
    checked = _ckpt("verify", tmp_path)
    assert checked.returncode == 1 and "regular file" in checked.stdout, checked.stdout + checked.stderr
    done, restored = _restored(tmp_path)
    assert done == 1 and torch.equal(restored, weights[0])
    # The checkpoint directory itself may be a link: where it is, is the user's choice.
    (tmp_path / "link").symlink_to(tmp_path)
    assert _restored(tmp_path / "link")[0] == 1


def test_two_ranks_in_one_file(tmp_path):
    _saved(tmp_path)
    found = crafting.read(tmp_path / "step-2")
    entry = found.manifest["shards"][0]
    crafting.write_manifest(
        tmp_path / "step-2", {**found.manifest, "world_size": 2, "shards": [entry, {**entry, "rank": 1}]}
    )
    assert _restored(tmp_path)[0] == 1


@pytest.mark.parametrize("blob", ["extra", "rng", "optimizer", "layout"])
def test_a_value_that_cannot_be_decoded(tmp_path, blob):
    """The search for an older checkpoint must survive any decoding error.

    KeyError, IndexError, UnicodeDecodeError and RecursionError used to end it.
    """
    weights = _saved(tmp_path)
    found = crafting.read(tmp_path / "step-2")
    value = found.shards[0].blob(blob)
    for new in (
        value.data[:-1],
        b"\xa2\xff\xfe",
        b"\x91\x05",
        b"\xc7\x04\x06none",
        b"\x91" * 900 + b"\xc7\x04\x06none",
    ):
        value.data, value.shape = new, [len(new)]
        found.write(tmp_path / "step-2")
        done, restored = _restored(tmp_path)
        assert done == 1 and torch.equal(restored, weights[0]), new


def _replaced(name, data):
    def change(shard):
        value = shard.blob(name)
        value.data, value.shape = data, [len(data)]

    return change


def _without(name):
    return lambda shard: shard.tensors.remove(shard.blob(name))


#: Checksums notice none of these.
UNDECODABLE = [
    _replaced("extra", b"\x91"),
    _replaced("extra", encoding.encode([1])),
    _replaced("rng", encoding.encode({"python": 5})),
    _replaced("optimizer", encoding.encode([5])),
    _replaced("optimizer", encoding.encode({"state": {"model.weight": 1}, "groups": []})),
    _replaced("optimizer", b"\xc1\x81\x12\xa4none"),
    _replaced("layout", b"\xc1\xff"),
    _replaced("layout", encoding.encode({"rank": 3, "world_size": 4, "replicated": False})),
    _without("rng"),
    _without("optimizer"),
]


def test_verify_refuses_what_restore_refuses(tmp_path):
    """`ckpt verify` used to compare only checksums and accepted all of these."""
    _saved(tmp_path, len(UNDECODABLE) + 1)
    for step, change in enumerate(UNDECODABLE, 2):
        found = crafting.read(tmp_path / f"step-{step}")
        change(found.shards[0])
        found.write(tmp_path / f"step-{step}")
        with pytest.raises(CheckpointError):
            _restore_only(tmp_path, step)
    _restore_only(tmp_path, 1)
    checked = _ckpt("verify", tmp_path)
    assert checked.returncode == 1 and f"1 shards are good, {len(UNDECODABLE)} are damaged" in checked.stdout, (
        checked.stdout + checked.stderr
    )
    assert all(f"step {step} disk" in checked.stdout for step in range(2, len(UNDECODABLE) + 2)), checked.stdout


def _by_ranks(checkpoint, ranks):
    """Rewrites a checkpoint of one rank as one of several ranks with the same state."""
    found = crafting.read(checkpoint)
    (first,) = found.shards
    found.manifest["world_size"] = ranks
    found.shards = []
    for rank in range(ranks):
        shard = copy.deepcopy(first)
        shard.entry.update(rank=rank, file=f"rank-{rank}.safetensors")
        shard.metadata["rank"] = str(rank)
        if any(t.name == crafting.BLOB + "layout" for t in shard.tensors):
            layout = decoding.decode(shard.blob("layout").data, lambda name: None)
            _replaced("layout", encoding.encode({**layout, "rank": rank, "world_size": ranks}))(shard)
        found.shards.append(shard)
    return found


def _flip(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_verify_reads_the_values_of_good_shards_beside_a_damaged_one(tmp_path):
    """`ckpt verify` used to count such shards as good without a look at their values."""
    _saved(tmp_path, 1)
    found = _by_ranks(tmp_path / "step-1", 3)
    # A manifest may name the ranks in any order.
    found.shards.reverse()
    found.write(tmp_path / "step-1")
    checked = _ckpt("verify", tmp_path)
    assert checked.stdout == "3 shards are good, 0 are damaged\n", checked.stdout + checked.stderr
    UNDECODABLE[0](next(s for s in found.shards if s.entry["rank"] == 2))
    found.write(tmp_path / "step-1")
    _flip(tmp_path / "step-1" / "rank-0.safetensors")
    checked = _ckpt("verify", tmp_path)
    *bad, total = checked.stdout.splitlines()
    assert checked.returncode == 1 and total == "1 shards are good, 2 are damaged", checked.stdout + checked.stderr
    assert [rank for line in bad for rank in range(3) if f": rank {rank}: " in line] == [0, 2], bad


def test_verify_says_which_values_it_cannot_read_beside_a_damaged_shard(tmp_path):
    """Values that DCP has saved are named by the tables of all shards together."""
    import torch.distributed.checkpoint as dcp

    import everstep.dcp

    dcp.save({"weight": torch.arange(6.0)}, storage_writer=everstep.dcp.Writer(tmp_path / "out"), no_dist=True)
    step = tmp_path / "out" / "step-1"
    _by_ranks(step, 2).write(step)
    assert _ckpt("verify", tmp_path / "out").stdout == "2 shards are good, 0 are damaged\n"
    _flip(step / "rank-0.safetensors")
    checked = _ckpt("verify", tmp_path / "out")
    bad, unread, total = checked.stdout.splitlines()
    assert checked.returncode == 1 and ": rank 0: " in bad, checked.stdout
    assert ": rank 1: bytes good, values not checked" in unread, checked.stdout
    assert total == "0 shards are good, 1 are damaged, the values of 1 were not checked"


def _restore_only(directory, step):
    model, optimizer = _trainer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CheckpointManager(directory, model=model, optimizer=optimizer, persist=0).restore(step)


@pytest.mark.parametrize(
    "change",
    [
        ("[2, 3]", "[3, 3]"),
        ('"float32"', '"float33"'),
        ('"version": 1', '"version": 2'),
        ('["weight"]', "[[]]"),
        ('["weight"]', '["weight", "0"]'),
    ],
)
def test_verify_reads_the_tables_of_dcp(tmp_path, change):
    import torch.distributed.checkpoint as dcp

    import everstep.dcp

    state = {"weight": torch.arange(6.0).view(2, 3), "object": _Payload(tmp_path / "ran")}
    dcp.save(state, storage_writer=everstep.dcp.Writer(tmp_path / "out"), no_dist=True)
    assert _ckpt("verify", tmp_path / "out").returncode == 0, "what is pickled is the user's choice, and is not run"
    found = crafting.read(tmp_path / "out" / "step-1")
    table = found.shards[0].blob("dcp")
    assert change[0].encode() in table.data
    table.data = table.data.replace(*(c.encode() for c in change))
    table.shape = [len(table.data)]
    found.write(tmp_path / "out" / "step-1")
    checked = _ckpt("verify", tmp_path / "out")
    assert checked.returncode == 1 and "step 1 disk" in checked.stdout and not (tmp_path / "ran").exists(), (
        checked.stdout + checked.stderr
    )


def test_an_object_of_another_kind_is_another_model(tmp_path):
    _saved(tmp_path)
    model, optimizer = _trainer()
    with pytest.raises(CheckpointError, match="kind 'optimizer'"):
        CheckpointManager(
            tmp_path, model=model, optimizer=torch.optim.lr_scheduler.StepLR(optimizer, 1), persist=0
        ).restore()


class _Payload:
    """Runs code when it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def _dcp_saved(directory):
    import torch.distributed.checkpoint as dcp

    state = {
        "model": {"weight": torch.arange(6.0).view(2, 3)},
        "step": 7,
        "list": [torch.ones(2), "a"],
        "half": torch.ones(3).half(),
    }
    dcp.save(state, checkpoint_id=str(directory), no_dist=True)
    return state


def _convert(monkeypatch, capsys, *arguments):
    """Runs the command in this process, as `everstep ckpt` does.

    Returns the exit code and stderr.
    """
    from everstep import convert

    monkeypatch.setattr("sys.argv", ["everstep", *map(str, arguments)])
    code = convert.main()
    return code, capsys.readouterr().err


def test_import_of_a_plain_checkpoint(tmp_path, monkeypatch, capsys):
    state = _dcp_saved(tmp_path / "plain")
    assert _convert(monkeypatch, capsys, "import", tmp_path / "plain", tmp_path / "out", "--from", "dcp")[0] == 0
    assert _convert(monkeypatch, capsys, "export", tmp_path / "out", tmp_path / "all.pt", "--to", "torch")[0] == 0
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(found["model"]["weight"], state["model"]["weight"]) and found["step"] == 7
    assert (
        torch.equal(found["list"][0], torch.ones(2))
        and found["list"][1] == "a"
        and found["half"].dtype == torch.float16
    )


@pytest.mark.parametrize("where", ["metadata", "planner data", "object"])
def test_import_runs_nothing(tmp_path, monkeypatch, capsys, where):
    import pickle

    _dcp_saved(tmp_path / "plain")
    canary, path = tmp_path / "ran", tmp_path / "plain" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    if where == "object":
        (index,) = (i for i in metadata.storage_data if i.fqn == "step")
        data = tmp_path / "plain" / "evil.distcp"
        torch.save(_Payload(canary), data)
        info = metadata.storage_data[index]
        info.relative_path, info.offset, info.length = data.name, 0, data.stat().st_size
        path.write_bytes(pickle.dumps(metadata))
    elif where == "planner data":
        metadata.planner_data["step"] = _Payload(canary)
        path.write_bytes(pickle.dumps(metadata))
    else:
        path.write_bytes(pickle.dumps(_Payload(canary)))
    code, said = _convert(monkeypatch, capsys, "import", tmp_path / "plain", tmp_path / "out", "--from", "dcp")
    assert code == 1 and not canary.exists() and "in a program of your own" in said, said


def test_export_and_load_run_nothing(tmp_path, monkeypatch, capsys):
    import torch.distributed.checkpoint as dcp

    import everstep.dcp

    state = {"weight": torch.ones(3), "object": _Payload(tmp_path / "ran")}
    dcp.save(state, storage_writer=everstep.dcp.Writer(tmp_path / "out"), no_dist=True)
    code, said = _convert(monkeypatch, capsys, "export", tmp_path / "out", tmp_path / "all.pt", "--to", "torch")
    assert code == 1 and "allow_pickle=True" in said and not (tmp_path / "ran").exists(), said
    with pytest.raises(BaseException, match="allow_pickle=True"):
        dcp.load(
            {"weight": torch.zeros(3), "object": None},
            storage_reader=everstep.dcp.Reader(tmp_path / "out"),
            no_dist=True,
        )
    assert not (tmp_path / "ran").exists()


def test_parts_of_a_foreign_checkpoint_are_all_of_it(tmp_path, monkeypatch, capsys):
    import pickle

    _dcp_saved(tmp_path / "plain")
    path = tmp_path / "plain" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["model.weight"].size = torch.Size([3, 3])
    path.write_bytes(pickle.dumps(metadata))
    code, said = _convert(monkeypatch, capsys, "import", tmp_path / "plain", tmp_path / "out", "--from", "dcp")
    assert code == 1 and "not all of it" in said, said
