"""Ranks that find different checkpoints when they load through DCP: all read the same one, or all
raise, and none waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import everstep as es
from harness.ranks import run_ranks

# Rank 1's directory is a copy with fewer checkpoints, as a stale listing would have it.
_BEGIN = """
import os, shutil, sys
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
import everstep as es
dist.init_process_group("gloo")
rank, out = dist.get_rank(), sys.argv[1]
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)

def sharded(tensor, dim):
    # distribute_tensor() would be a collective.
    part = tensor.chunk(2, dim)[rank].contiguous()
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=tensor.shape, stride=tensor.stride())

def save(step, dim, **more):
    state = {"w": sharded(whole + 1000 * step, dim), "n": step, **more}
    dcp.save(state, storage_writer=es.dcp.Writer(f"{out}/step-{step}"))

def view(*steps):
    # What this rank sees.
    path = f"{out}-{rank}-{'-'.join(map(str, steps))}"
    os.makedirs(path)
    for step in steps:
        shutil.copytree(f"{out}/step-{step}", f"{path}/step-{step}")
    return path

def load(path, dim=1, **options):
    state = {"w": sharded(torch.zeros_like(whole), dim), "n": 0}
    dcp.load(state, storage_reader=es.dcp.Reader(path), **options)
    expected = sharded(whole + 1000 * state["n"], dim)
    assert torch.equal(state["w"].to_local(), expected.to_local()), (rank, state)
    return state["n"]

def error(path, **options):
    try:
        load(path, **options)
    except BaseException as e:
        return str(e)
    raise AssertionError("loaded")
"""


def _ranks(tmp_path: Path, script: str) -> list[str]:
    (tmp_path / "script.py").write_text(_BEGIN + script + "\ndist.barrier()\nos._exit(0)  # See test_reshard.py.\n")
    ended = run_ranks([str(tmp_path / "script.py"), str(tmp_path / "out")], 2)
    assert [r.code for r in ended] == [0, 0], "\n".join(r.err for r in ended)[-3000:]
    return [r.err for r in ended]


def test_all_ranks_load_the_newest_checkpoint_that_every_rank_finds(tmp_path):
    errors = _ranks(
        tmp_path,
        """
save(1, 0)
save(2, 1)  # cut in another way
for dim in (0, 1):
    mine = view(1, 2) if rank == 0 else view(1)
    assert load(mine, dim) == 1, rank
    mine = view(1) if rank == 0 else view(1, 2)
    assert load(mine, dim) == 1, rank
    shutil.rmtree(f"{out}-{rank}-1")
    shutil.rmtree(f"{out}-{rank}-1-2")
# Whoever loads alone, or in a group of its own, needs nobody.
assert load(view(1, 2), no_dist=True) == 2 if rank == 0 else True
groups = [dist.new_group([r]) for r in range(2)]
assert load(view(2) if rank == 0 else view(1), process_group=groups[rank]) == 2 - rank
# A named step is the one that is loaded.
assert load(f"{out}/step-2") == 2
""",
    )
    assert "the newest is step-2 on rank 0, step-1 on rank 1; loading step-1" in errors[0], errors[0]
    assert "loading step-1" not in errors[1], errors[1]


def test_where_no_checkpoint_suits_all_ranks_all_raise(tmp_path):
    _ranks(
        tmp_path,
        """
save(1, 0)
save(2, 0)
save(3, 0, more=torch.zeros(3))
nothing_in_common = error(view(2) if rank == 0 else view(1))
assert "can be read by every rank (the newest: step-2 on rank 0, step-1 on rank 1)" in nothing_in_common, nothing_in_common
other_values = error(view(1, 3) if rank == 0 else f"{out}-1-1")
assert "which has other values; load again" in other_values, other_values
nothing = error(f"{out}-0-2" if rank == 0 else view())
assert "it holds none" in nothing, nothing

class Drops(dcp.DefaultLoadPlanner):
    def create_global_plan(self, plans):
        return [type(p)(p.items) for p in plans]

dropped = error(out, planner=Drops())
assert "the planner drops a plan's storage_data" in dropped, dropped
""",
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_newer_checkpoint_that_is_damaged_is_named(tmp_path):
    for step in (1, 2):
        dcp.save({"w": torch.full((3,), float(step))}, storage_writer=es.dcp.Writer(tmp_path))
    (tmp_path / "step-2" / "manifest.json").write_text("{")
    state = {"w": torch.zeros(3)}
    with pytest.warns(UserWarning, match=r"skipped .*step-2.*; loading step-1"):
        dcp.load(state, storage_reader=es.dcp.Reader(tmp_path))
    assert torch.equal(state["w"], torch.ones(3))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_reader_that_fails_is_not_asked_again(tmp_path, monkeypatch):
    """DCP would load without collectives on the rank where the second attempt succeeds, while the
    others wait in theirs."""
    from everstep.dcp import reader

    dcp.save({"w": torch.ones(3)}, storage_writer=es.dcp.Writer(tmp_path))
    listing, calls = reader.list_checkpoints, []

    def fails_once(root):
        calls.append(root)
        return listing(root) if len(calls) > 1 else []

    monkeypatch.setattr(reader, "list_checkpoints", fails_once)
    with pytest.raises(BaseException, match="it holds none"):
        dcp.load({"w": torch.zeros(3)}, storage_reader=es.dcp.Reader(tmp_path))
    assert len(calls) == 1
