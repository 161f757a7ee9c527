"""Checkpoints that somebody has made by hand, with the right checksums: refused in one sentence by every reader, an older one is taken,
and nothing of them runs."""

from __future__ import annotations

import os
import subprocess
import warnings

import pytest
import torch
from conftest import EVERSTEP
from torch import nn

from everstep import CheckpointError, CheckpointManager
from figures import crafting
from figures.crafting import BLOB

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


def _saved(directory):
    """Steps 1 and 2; the weights after each."""
    model, optimizer = _trainer()
    manager = CheckpointManager(directory, model=model, optimizer=optimizer, persist=1, keep=4)
    manager.restore()
    weights = []
    for step in (1, 2):
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
        return CheckpointManager(directory, model=model, optimizer=optimizer, persist=0).restore(), model.weight.detach()


def _ckpt(*arguments):
    line = [EVERSTEP, "ckpt", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "VIRTUAL_ENV": os.environ.get("VIRTUAL_ENV", os.path.dirname(os.path.dirname(EVERSTEP)))})


@pytest.mark.parametrize("name", ["model.weight", "optimizer/weight/exp_avg"])
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
    # Neither waits, nor reads without end.
    checked = _ckpt("verify", tmp_path)
    assert checked.returncode == 1 and "regular file" in checked.stdout, checked.stdout + checked.stderr
    done, restored = _restored(tmp_path)
    assert done == 1 and torch.equal(restored, weights[0])
    # Where checkpoints are kept is the user's choice.
    (tmp_path / "link").symlink_to(tmp_path)
    assert _restored(tmp_path / "link")[0] == 1


def test_two_ranks_in_one_file(tmp_path):
    _saved(tmp_path)
    found = crafting.read(tmp_path / "step-2")
    entry = found.manifest["shards"][0]
    crafting.write_manifest(tmp_path / "step-2", {**found.manifest, "world_size": 2, "shards": [entry, {**entry, "rank": 1}]})
    assert _restored(tmp_path)[0] == 1
