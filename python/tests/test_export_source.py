"""Which checkpoint is exported or loaded through DCP: the one that was named, and of several of a
step the one of the branch that ran last."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import everstep as es
from everstep import convert


def _trained(directory: Path, *, back_to: int | None, steps: list[int], mark: int) -> None:
    """Each step's weight is its number plus the mark of its branch."""
    model = nn.Linear(1, 1, bias=False)
    ckpt = es.CheckpointManager(directory, persist=1, keep=9, model=model)
    ckpt.restore(step=back_to)
    for step in steps:
        nn.init.constant_(model.weight, step + mark)
        ckpt.step(step)
    ckpt.close()


def _exported(monkeypatch: pytest.MonkeyPatch, source: Path, out: Path, *options: str) -> float:
    """Runs what ``everstep ckpt export`` runs, and returns the weight in the file; NaN when it is
    refused."""
    monkeypatch.setattr(sys, "argv", ["ckpt", "export", str(source), str(out), "--to", "torch", *options])
    if convert.main() != 0:
        return float("nan")
    return float(torch.load(out, weights_only=True)["model"]["weight"].item())


def test_the_checkpoint_that_is_named_is_exported(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    _trained(out, back_to=None, steps=[10, 20], mark=100)
    _trained(out, back_to=10, steps=[20], mark=200)
    assert sorted(p.name for p in out.glob("step-*")) == ["step-10", "step-20", "step-20.2"]
    assert _exported(monkeypatch, out / "step-20", tmp_path / "first.pt") == 120
    assert _exported(monkeypatch, out / "step-20.2", tmp_path / "second.pt") == 220
    assert _exported(monkeypatch, out / "step-20", tmp_path / "both.pt", "--step", "20") == 120
    assert _exported(monkeypatch, out, tmp_path / "newest.pt") == 220
    capsys.readouterr()
    # Nothing else is taken in place of what is named.
    refused = _exported(monkeypatch, out / "step-20.3", tmp_path / "no.pt")
    assert refused != refused and "no complete checkpoint step-20.3" in capsys.readouterr().err
    refused = _exported(monkeypatch, out / "step-20", tmp_path / "no.pt", "--step", "10")
    assert refused != refused and "--step 10" in capsys.readouterr().err
    (out / "step-20" / "manifest.json").write_text("{")
    refused = _exported(monkeypatch, out / "step-20", tmp_path / "no.pt")
    assert refused != refused and "step-20/manifest.json" in capsys.readouterr().err
    assert not (tmp_path / "no.pt").exists()


def test_a_step_is_exported_from_the_branch_that_ran_last(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    _trained(out, back_to=None, steps=[10, 15, 20], mark=100)
    _trained(out, back_to=10, steps=[15], mark=200)
    # The user returns to the first branch.
    _trained(out, back_to=20, steps=[25], mark=100)
    model = nn.Linear(1, 1, bias=False)
    ckpt = es.CheckpointManager(out, model=model)
    ckpt.restore(step=15)
    ckpt.close()
    assert model.weight.item() == 115
    assert _exported(monkeypatch, out, tmp_path / "line.pt", "--step", "15") == 115
    # Like restore(), it takes the other one when this one is damaged, and says so.
    capsys.readouterr()
    (out / "step-15" / "manifest.json").write_text("{")
    assert _exported(monkeypatch, out, tmp_path / "other.pt", "--step", "15") == 215
    assert "skipped" in capsys.readouterr().err


def test_dcp_loads_the_checkpoint_that_is_named(tmp_path):
    from everstep.dcp import Reader, Writer

    dcp.save({"w": torch.tensor(7.0)}, storage_writer=Writer(tmp_path / "step-10"), no_dist=True)
    _trained(tmp_path, back_to=None, steps=[10], mark=100)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-10", "step-10.2"]
    into = {"w": torch.tensor(0.0)}
    dcp.load(into, storage_reader=Reader(tmp_path / "step-10"), no_dist=True)
    assert into["w"].item() == 7
    # The name as it was written, with zeros before the number, still means the same checkpoint.
    dcp.load(into, storage_reader=Reader(tmp_path / "step-00010"), no_dist=True)
    with pytest.raises(BaseException, match="was not saved through DCP"):
        dcp.load(into, storage_reader=Reader(tmp_path / "step-10.2"), no_dist=True)


def test_dcp_does_not_save_to_the_name_of_another_branch(tmp_path):
    from everstep.dcp import Writer

    with pytest.raises(es.CheckpointError, match=r"step-10\.2"):
        Writer(tmp_path / "step-10.2")
    assert not list(tmp_path.iterdir())
