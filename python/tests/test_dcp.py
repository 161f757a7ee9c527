"""torch.distributed.checkpoint through everstep: what DCP's users do, bit for bit, and what DCP
loses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import everstep as es
from everstep.dcp import pieces, shares
from harness.ranks import run_ranks


def _state() -> dict[str, object]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "nested": {
            "list": [torch.arange(5), {"deep": torch.ones(2, 2, dtype=torch.bfloat16)}],
            "step": 17,
            "text": "x",
            "none": None,
        },
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "odd": torch.arange(6.0).to(torch.complex128),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
    }


def _flat(value: object, at: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{at}/{key}").items()}
    if isinstance(value, list):
        return {k: v for i, inner in enumerate(value) for k, v in _flat(inner, f"{at}/{i}").items()}
    return {at: value}


def _same(a: object, b: object) -> None:
    left, right = _flat(a), _flat(b)
    assert left.keys() == right.keys()
    for name, value in left.items():
        other = right[name]
        if isinstance(value, torch.Tensor):
            assert isinstance(other, torch.Tensor) and value.dtype == other.dtype and torch.equal(value, other), name
        else:
            assert value == other, name


def _blank(value: object) -> object:
    if isinstance(value, dict):
        return {k: _blank(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_blank(v) for v in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["save", "async"])
def test_what_was_saved_comes_back(tmp_path, kind):
    state = _state()
    writer = es.dcp.Writer(tmp_path / "out")
    if kind == "save":
        dcp.save(state, storage_writer=writer)
    else:
        dcp.async_save(state, storage_writer=writer, no_dist=True).result()
    back = _blank(state)
    dcp.load(back, storage_reader=es.dcp.Reader(tmp_path / "out"))
    _same(state, back)
    assert (tmp_path / "out" / "step-1" / "manifest.json").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["save", "async"])
def test_conjugated_and_negated_views_are_saved_and_loaded_by_value(tmp_path, kind):
    numbers = torch.randn(4, dtype=torch.complex64)
    state = {"conjugated": numbers.conj(), "negated": torch._neg_view(torch.ones(3)), "imaginary": numbers.conj().imag}
    writer = es.dcp.Writer(tmp_path / "out")
    if kind == "save":
        dcp.save(state, storage_writer=writer)
    else:
        dcp.async_save(state, storage_writer=writer, no_dist=True).result()
    plain = {
        "conjugated": torch.zeros(4, dtype=torch.complex64),
        "negated": torch.zeros(3),
        "imaginary": torch.zeros(4),
    }
    views = {
        "conjugated": torch.zeros(4, dtype=torch.complex64).conj(),
        "negated": torch._neg_view(torch.zeros(3)),
        "imaginary": torch.zeros(4, dtype=torch.complex64).conj().imag,
    }
    for back in (plain, views):
        dcp.load(back, storage_reader=es.dcp.Reader(tmp_path / "out"))
        for name, value in state.items():
            assert torch.equal(back[name].resolve_conj().resolve_neg(), value.resolve_conj().resolve_neg()), name


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(CheckpointException, match=r"embedding has layout torch\.sparse_coo"):
        dcp.save({"embedding": torch.eye(3).to_sparse()}, storage_writer=es.dcp.Writer(tmp_path))


@pytest.mark.filterwarnings("ignore")
def test_state_may_change_as_soon_as_async_save_has_returned_and_steps_never_mix(tmp_path):
    writer = es.dcp.Writer(tmp_path)
    tensors = {f"t{i}": torch.full((100_000,), 0.0) for i in range(32)}
    futures = []
    for step in range(1, 5):
        for t in tensors.values():
            t.fill_(step)
        futures.append(dcp.async_save(tensors, storage_writer=writer, no_dist=True))
    for t in tensors.values():
        t.fill_(-1)
    for future in futures:
        future.result()
    for step in range(1, 5):
        back = {name: torch.zeros(100_000) for name in tensors}
        dcp.load(back, storage_reader=es.dcp.Reader(tmp_path / f"step-{step}"))
        assert all((t == step).all() for t in back.values()), step


@pytest.mark.filterwarnings("ignore")
def test_a_model_and_its_optimizer_by_dcps_helpers(tmp_path):
    def train(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()

    def build():
        model = nn.Linear(4, 3)
        return model, torch.optim.AdamW(model.parameters())

    one, one_optimizer = build()
    train(one, one_optimizer)
    model_state, optimizer_state = get_state_dict(one, one_optimizer)
    dcp.save(
        {"m": model_state, "o": optimizer_state},
        checkpoint_id=str(tmp_path / "step-9"),
        storage_writer=es.dcp.Writer(tmp_path),
    )
    other, other_optimizer = build()
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    into = {"m": model_state, "o": optimizer_state}
    dcp.load(into, checkpoint_id=str(tmp_path / "step-9"), storage_reader=es.dcp.Reader(tmp_path))
    set_state_dict(other, other_optimizer, model_state_dict=into["m"], optim_state_dict=into["o"])
    train(one, one_optimizer)
    train(other, other_optimizer)
    assert torch.equal(one.weight, other.weight)


@pytest.mark.filterwarnings("ignore")
def test_damage_is_an_error_and_not_a_value(tmp_path):
    dcp.save({"w": torch.arange(400_000.0)}, storage_writer=es.dcp.Writer(tmp_path))
    shard = next((tmp_path / "step-1").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(BaseException, match="damaged"):
        dcp.load({"w": torch.zeros(400_000)}, storage_reader=es.dcp.Reader(tmp_path))


@pytest.mark.filterwarnings("ignore")
def test_what_is_no_checkpoint_of_ours_is_told(tmp_path):
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=str(tmp_path / "theirs"))
    for path, words in ((tmp_path / "theirs", "FileSystemReader"), (tmp_path / "nothing", "no directory")):
        with pytest.raises(BaseException, match=words):
            dcp.load({"w": torch.zeros(3)}, storage_reader=es.dcp.Reader(path))
    model = nn.Linear(2, 2)
    ckpt = es.CheckpointManager(tmp_path / "ours", model=model, persist=1)
    ckpt.step(1)
    ckpt.close()
    with pytest.raises(BaseException, match="CheckpointManager"):
        dcp.load({"w": torch.zeros(3)}, storage_reader=es.dcp.Reader(tmp_path / "ours"))
    with pytest.raises(BaseException, match="for another directory"):
        dcp.async_save(
            {"w": torch.zeros(3)},
            checkpoint_id=str(tmp_path / "b"),
            storage_writer=es.dcp.Writer(tmp_path / "a"),
            no_dist=True,
        ).result()


def test_what_ranks_hold_alike_is_saved_once_in_even_shares():
    held = [{f"w{i}": 100 + i for i in range(40)} for _ in range(4)]
    held[2]["own"] = 5
    dealt = shares.deal(held)
    assert sorted(n for share in dealt for n in share) == sorted(held[2])
    assert "own" in dealt[2]
    loads = [sum(held[2][n] for n in share) for share in dealt]
    assert max(loads) - min(loads) <= 140


def test_names_are_unique_among_blocks():
    part = torch.zeros(2, 3)
    names = {pieces.Piece("w", part, (4, 3), (at, 0)).name for at in (0, 2)} | {
        pieces.Piece("w", part, (2, 3), (0, 0)).name
    }
    assert len(names) == 3


_SHARDED = """
import json, os, sys
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import everstep as es
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
out, what, layout = sys.argv[1:]
shape = (2, size // 2) if size % 2 == 0 else (1, size)
mesh = init_device_mesh("cpu", shape)
kinds = {
    "rows": (Replicate(), Shard(0)), "columns": (Replicate(), Shard(1)),
    "both": (Shard(0), Shard(1)), "all": (Replicate(), Replicate()),
}
whole = torch.arange(17 * 23, dtype=torch.float32).reshape(17, 23)
sharded = distribute_tensor(whole if what != "load" else torch.zeros_like(whole), mesh, kinds[layout])
state = {
    "w": sharded,
    "plain": torch.full((5,), 3.0) if what != "load" else torch.zeros(5),
    "list": [1, "two"] if what != "load" else [0, ""],
}
if what == "load":
    dcp.load(state, storage_reader=es.dcp.Reader(out))
    assert torch.equal(state["w"].full_tensor(), whole), rank
    assert (state["plain"] == 3).all() and state["list"] == [1, "two"]
elif what == "save":
    dcp.save(state, storage_writer=es.dcp.Writer(out))
elif what == "die":
    future = dcp.async_save(state, storage_writer=es.dcp.Writer(out))
    with torch.no_grad():
        sharded.to_local().fill_(-1)
        state["plain"].fill_(-1)
    # When it has returned on both; a barrier would meet the collectives of DCP's thread.
    store = dist.distributed_c10d._get_default_store()
    store.get("returned") if rank == 0 else store.set("returned", "")
    os._exit(7)
dist.destroy_process_group()
os._exit(0)  # See test_reshard.py.
"""


def _ranks(tmp_path: Path, size: int, *arguments: str) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(_SHARDED)
    ended = run_ranks([str(script), *arguments], size)
    assert [r.code for r in ended] == [0] * size, "\n".join(r.err for r in ended)[-3000:]


def test_saved_by_four_ranks_and_loaded_by_others(tmp_path):
    out = str(tmp_path / "out")
    _ranks(tmp_path, 4, out, "save", "both")
    # Nothing is stored twice.
    manifest = json.loads((tmp_path / "out" / "step-1" / "manifest.json").read_text())["manifest"]
    assert manifest["world_size"] == 4
    _ranks(tmp_path, 2, out, "load", "columns")
    _ranks(tmp_path, 3, out, "load", "rows")
    _ranks(tmp_path, 1, out, "load", "all")


def test_killed_right_after_async_save_has_returned(tmp_path, env):
    script = tmp_path / "sharded.py"
    script.write_text(_SHARDED)
    out = str(tmp_path / "out")
    line = [
        str(Path(sys.executable).parent / "everstep"),
        "run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "0",
    ]
    subprocess.run(
        [*line, str(script), out, "die", "rows"],
        env={**env, "GLOO_SOCKET_IFNAME": "lo"},
        timeout=120,
        check=False,
        capture_output=True,
    )
    _ranks(tmp_path, 2, out, "load", "columns")


_TWO_DIRECTORIES = """
import os, sys, torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
import everstep as es
dist.init_process_group("gloo")
out = sys.argv[1]
a, b, taken = (es.dcp.Writer(f"{out}/{name}") for name in ("a", "b", "a/step-30"))
saves = []
for number, writer in enumerate((a, a, b, taken, b, a), 1):
    if writer is taken and dist.get_rank() == 0:
        os.makedirs(f"{out}/a/step-30/mine")
    save = dcp.save if number > 4 else dcp.async_save
    saves.append(save({f"w{i}": torch.full((200_000,), float(number)) for i in range(4)}, storage_writer=writer))
for number, future in enumerate(saves[:4], 1):
    wrong = future.exception()
    assert ("step-30 already exists" in str(wrong)) if number == 4 else wrong is None, (number, wrong)
dist.barrier()
os._exit(0)
"""


@pytest.mark.filterwarnings("ignore")
def test_each_directory_gets_its_own_saves_under_everstep_run(tmp_path, everstep):
    script = tmp_path / "two.py"
    script.write_text(_TWO_DIRECTORIES)
    ended = everstep(
        "run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "0",
        str(script),
        str(tmp_path / "out"),
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    for name, saved in (("a", {1: 1, 2: 2, 32: 6}), ("b", {3: 3, 31: 5})):
        directory = tmp_path / "out" / name
        assert {p.parent.name for p in directory.glob("step-*/manifest.json") if ".tmp" not in p.parent.name} == {
            f"step-{step}" for step in saved
        }
        for step, number in saved.items():
            back = {f"w{i}": torch.zeros(200_000) for i in range(4)}
            dcp.load(back, storage_reader=es.dcp.Reader(directory / f"step-{step}"), no_dist=True)
            assert all((t == number).all() for t in back.values()), (name, step)


_NEW_WRITER_EACH_TIME = """
import sys, time, torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
import everstep as es
dist.init_process_group("gloo")
for i in range(1, 4):
    if dist.get_rank() == 0:
        time.sleep(0.3)  # the others agree on a number before this one has said it again
    dcp.save({f"w{r}": torch.full((9,), float(i)) for r in range(2)}, storage_writer=es.dcp.Writer(sys.argv[1]))
"""


@pytest.mark.filterwarnings("ignore")
def test_a_new_writer_for_each_save_numbers_them_alike_on_all_ranks(tmp_path):
    script = tmp_path / "anew.py"
    script.write_text(_NEW_WRITER_EACH_TIME)
    ended = run_ranks([str(script), str(tmp_path / "out")], 2)
    assert [r.code for r in ended] == [0, 0], "\n".join(r.err for r in ended)[-3000:]
    for step in (1, 2, 3):
        back = {f"w{r}": torch.zeros(9) for r in range(2)}
        dcp.load(back, storage_reader=es.dcp.Reader(tmp_path / "out" / f"step-{step}"), no_dist=True)
        assert all((t == step).all() for t in back.values()), step
