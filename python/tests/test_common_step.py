"""Ranks that cannot read the same checkpoints: they go on from what all can read, or not at all."""

from __future__ import annotations

import shutil

import pytest

from harness.ranks import run_ranks

_SCRIPT = r"""
import os, sys
import torch, torch.distributed as dist
import everstep as es
rank, total, persist = int(os.environ["RANK"]), int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = es.CheckpointManager(
    sys.argv[3 + rank], persist=persist, keep=9, replicated=False, model=model, optimizer=optimizer
)
done = ckpt.restore()
print(f"restored {done}\n", end="", flush=True)  # in one write, also with PYTHONUNBUFFERED
for step in range(done + 1, total + 1):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if persist:
        ckpt.step(step)
        if step % persist == 0:
            ckpt.wait()
ckpt.close()
dist.destroy_process_group()
"""


@pytest.fixture
def ranks(tmp_path, script, everstep):
    """Runs the script on two ranks, under the agent or not, until ``total`` steps. Returns whether
    that succeeded, and its output."""
    path = script(_SCRIPT)

    def run(agent, total, persist, *directories):
        arguments = [str(total), str(persist), *(str(d) for d in directories or (tmp_path / "out",) * 2)]
        if agent:
            ended = everstep("run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "0", path, *arguments)
            return ended.returncode == 0, ended.stdout, ended.stderr
        ended = run_ranks([path, *arguments], 2, timeout=100)
        return all(r.code == 0 for r in ended), "".join(r.out for r in ended), "".join(r.err for r in ended)

    return run


def _damage_header(path):
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("agent", [False, True])
def test_a_rank_that_cannot_read_the_newest_steps_takes_all_back_to_an_older_one(tmp_path, ranks, agent):
    ok, _, err = ranks(agent, 20, 5)
    assert ok, err
    for step in (15, 20):
        _damage_header(tmp_path / "out" / f"step-{step}" / "rank-1.safetensors")
    ok, out, err = ranks(agent, 0, 5)
    assert ok, err
    assert out.split() == ["restored", "10"] * 2, (out, err)


@pytest.mark.parametrize("agent", [False, True])
def test_nobody_starts_over_where_only_one_rank_finds_checkpoints(tmp_path, ranks, agent):
    """The listing of one node may be stale."""
    ok, _, err = ranks(agent, 10, 5)
    assert ok, err
    (tmp_path / "empty").mkdir()
    ok, out, err = ranks(agent, 0, 0, tmp_path / "out", tmp_path / "empty")
    assert not ok and "restored" not in out, out
    assert "starting from scratch would hide them" in err and "all nodes see the same files" in err, err


@pytest.mark.parametrize("agent", [False, True])
def test_nobody_starts_over_where_no_checkpoint_is_good_on_all_ranks(tmp_path, ranks, agent):
    ok, _, err = ranks(agent, 10, 5)
    assert ok, err
    _damage_header(tmp_path / "out" / "step-10" / "rank-1.safetensors")
    shutil.copy(tmp_path / "out" / "step-10" / "rank-1.safetensors", tmp_path / "out" / "step-5" / "rank-1.safetensors")
    ok, out, err = ranks(agent, 0, 5)
    assert not ok and "restored" not in out, out
    assert "starting from scratch would hide them" in err, err
