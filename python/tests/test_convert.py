"""Export and import: what comes out is what went in, and stock tools can read it."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import everstep as es
from everstep import convert
from harness.ranks import run_ranks

EVERSTEP = str(Path(sys.executable).parent / "everstep")


def _ckpt(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([EVERSTEP, "ckpt", *map(str, arguments)], capture_output=True, text=True, check=False)


def _saved(directory: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    ckpt = es.CheckpointManager(directory, persist=1, model=model, optimizer=optimizer, scheduler=scheduler)
    for step in (1, 2):
        model(torch.randn(3, 5)).sum().backward()
        optimizer.step()
        scheduler.step()
        ckpt.step(step)
    ckpt.close()
    return model, optimizer


def test_torch_reads_what_is_exported(tmp_path):
    model, optimizer = _saved(tmp_path / "out")
    done = _ckpt("export", tmp_path / "out", tmp_path / "all.pt", "--to", "torch")
    assert done.returncode == 0, done.stderr
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    other = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    other.load_state_dict(state["model"])
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    exp_avg = state["optimizer"]["state"]["0.weight"]["exp_avg"]
    assert torch.equal(exp_avg, optimizer.state[model[0].weight]["exp_avg"])
    assert state["scheduler"]["last_epoch"] == 2


def test_dcp_reads_what_is_exported_and_what_it_saved_is_imported(tmp_path):
    model, _ = _saved(tmp_path / "out")
    assert _ckpt("export", tmp_path / "out", tmp_path / "dcp", "--to", "dcp", "--step", 2).returncode == 0
    into = {"model": {k: torch.zeros_like(v) for k, v in model.state_dict().items()}}
    dcp.load(into, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert all(torch.equal(into["model"][k], v) for k, v in model.state_dict().items())
    done = _ckpt("import", tmp_path / "dcp", tmp_path / "back", "--from", "dcp")
    assert done.returncode == 0, done.stderr
    into = {"model": {k: torch.zeros_like(v) for k, v in model.state_dict().items()}}
    dcp.load(into, storage_reader=es.dcp.Reader(tmp_path / "back"), no_dist=True)
    assert all(torch.equal(into["model"][k], v) for k, v in model.state_dict().items())
    # Export it again.
    assert _ckpt("export", tmp_path / "back", tmp_path / "again.pt", "--to", "torch").returncode == 0
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert all(torch.equal(again["model"][k], v) for k, v in model.state_dict().items())


def test_safetensors_out_and_in(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    from everstep import convert, hf_format

    model, _ = _saved(tmp_path / "out")
    assert _ckpt("export", tmp_path / "out", tmp_path / "hf", "--to", "hf").returncode == 0
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights.keys() == model.state_dict().keys() and all(
        torch.equal(weights[k], v) for k, v in model.state_dict().items()
    )
    assert _ckpt("import", tmp_path / "hf", tmp_path / "back", "--from", "hf").returncode == 0
    state = convert.load(tmp_path / "back")
    assert all(torch.equal(state["model"][k], v) for k, v in model.state_dict().items())
    # Several files have an index.
    monkeypatch.setattr(hf_format, "HF_FILE_BYTES", 100)
    convert.to_hf(state, tmp_path / "many")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    found = {k: load_file(tmp_path / "many" / file)[k] for k, file in index["weight_map"].items()}
    assert len(set(index["weight_map"].values())) > 1 and all(
        torch.equal(found[k], v) for k, v in model.state_dict().items()
    )


class _Kept:
    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> object:
        return self.value

    def load_state_dict(self, value: object) -> None:
        self.value = value


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32])
def test_a_dtype_that_safetensors_lacks_is_named(tmp_path, dtype):
    weights = {"a": torch.ones(2), "b": torch.zeros(2, dtype=torch.float32).to(dtype)}
    with pytest.raises(es.CheckpointError, match=f"b is {dtype}, which safetensors cannot hold"):
        convert.to_hf({"model": weights}, tmp_path / "out", {"model": "module"})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "value", [{"whole": 5}, {"state": {}, "groups": []}, {"state": {"a": 1}, "groups": [1, 2]}], ids=str
)
def test_an_object_is_not_taken_for_an_optimizer_because_of_its_keys(tmp_path, value):

    ckpt = es.CheckpointManager(tmp_path, persist=1, model=nn.Linear(1, 1), kept=_Kept(value))
    ckpt.step(1)
    ckpt.close()
    assert convert.load(tmp_path)["kept"] == value


_STAGE = """
import os, sys, torch, torch.distributed as dist, everstep as es
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential()
model.add_module(f"layer{rank}", torch.nn.Linear(2, 2))
loose = torch.nn.Parameter(torch.tensor(5.0))
optimizer = torch.optim.SGD([*model.named_parameters(), *[("loose", loose)] * rank], lr=0.0, momentum=0.9)
ckpt = es.CheckpointManager(sys.argv[1], persist=1, model=model, optimizer=optimizer)
(model(torch.ones(1, 2)).sum() * loose).backward()
optimizer.step()
ckpt.step(1)
ckpt.close()
dist.destroy_process_group()
"""


def test_optimizer_state_of_all_pipeline_stages_is_exported(tmp_path):

    (tmp_path / "train.py").write_text(_STAGE)
    ended = run_ranks([str(tmp_path / "train.py"), str(tmp_path / "out")], 2)
    assert [r.code for r in ended] == [0, 0], ended[0].err + ended[1].err
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = convert.load(tmp_path / "out")
    names = ["layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias"]
    assert sorted(state["model"]) == sorted(names)
    # A parameter of no module, which one stage has, gives all others their full names.
    full = [*(f"model.{n}" for n in names), "param_2"]
    assert sorted(state["optimizer"]["state"]) == sorted(full)
    (group,) = state["optimizer"]["param_groups"]
    assert group["params"] == full and group["param_names"] == [*names, "loose"]
    assert all(s["momentum_buffer"].abs().sum() > 0 for s in state["optimizer"]["state"].values())
    assert {n: v.item() for n, v in state["optimizer"]["values"].items()} == {"param_2": 5.0}


def test_of_several_versions_of_the_weights_the_indexed_one_is_imported(tmp_path):
    from safetensors.torch import save_file

    files = {"model-1-of-2": ("a", 1.0), "model-2-of-2": ("b", 2.0), "pytorch_model": ("a", 7.0)}
    for file, (name, value) in files.items():
        save_file({name: torch.tensor(value)}, tmp_path / f"{file}.safetensors")
    done = _ckpt("import", tmp_path, tmp_path / "back", "--from", "hf")
    assert done.returncode == 1, done.stderr
    assert "a is in both model-1-of-2.safetensors and pytorch_model.safetensors" in done.stderr
    index = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert {k: t.item() for k, t in convert.from_hf(tmp_path)["model"].items()} == {"a": 1.0, "b": 2.0}
    for wrong in ({**index, "c": "model-2-of-2.safetensors"}, {**index, "a": "../model.safetensors"}, None):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(es.CheckpointError, match=r"index\.json"):
            convert.from_hf(tmp_path)


class _Counted(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"k": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"k": 1}


def test_weights_of_a_module_with_extra_state_are_exported_without_it(tmp_path):
    from safetensors.torch import load_file

    model = _Counted(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = es.CheckpointManager(tmp_path / "out", persist=1, model=model, optimizer=optimizer)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    ckpt.step(1)
    ckpt.close()
    done = _ckpt("export", tmp_path / "out", tmp_path / "hf", "--to", "hf")
    assert done.returncode == 0 and "model._extra_state" in done.stderr, done.stderr
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"weight", "bias"}
    # Nothing is left where there is nothing to export.
    ckpt = es.CheckpointManager(tmp_path / "none", persist=1, data=torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    ckpt.step(1)
    ckpt.close()
    done = _ckpt("export", tmp_path / "none", tmp_path / "no-hf", "--to", "hf")
    assert done.returncode == 1 and "no module" in done.stderr and not (tmp_path / "no-hf").exists(), done.stderr


def _trained(directory: Path, *, back_to: int | None, steps: range) -> None:
    model = nn.Linear(1, 1, bias=False)
    ckpt = es.CheckpointManager(directory, persist=1, keep=9, model=model)
    ckpt.restore(step=back_to)
    for step in steps:
        nn.init.constant_(model.weight, step + (100 if back_to else 0))
        ckpt.step(step)
    ckpt.close()


def test_without_a_step_what_a_restore_would_take_is_exported(tmp_path):

    _trained(tmp_path, back_to=None, steps=range(1, 6))
    _trained(tmp_path, back_to=2, steps=range(3, 5))
    assert convert.load(tmp_path)["model"]["weight"].item() == 104
    assert convert.load(tmp_path, 5)["model"]["weight"].item() == 5
    model = nn.Linear(1, 1, bias=False)
    ckpt = es.CheckpointManager(tmp_path, model=model)
    assert ckpt.restore() == 4 and model.weight.item() == 104
    ckpt.close()


def test_a_newer_checkpoint_that_is_damaged_is_named_when_an_older_one_is_exported(tmp_path):
    _saved(tmp_path / "out")
    assert _ckpt("export", tmp_path / "out", tmp_path / "dcp", "--to", "dcp").returncode == 0
    for _ in range(2):
        done = _ckpt("import", tmp_path / "dcp", tmp_path / "imported", "--from", "dcp")
        assert done.returncode == 0, done.stderr
    for name in ("out", "imported"):
        (tmp_path / name / "step-2" / "manifest.json").write_text("{")
        done = _ckpt("export", tmp_path / name, tmp_path / f"{name}.pt", "--to", "torch")
        assert done.returncode == 0, done.stderr
        assert "everstep: skipped" in done.stderr and "step-2" in done.stderr, done.stderr
        assert "using step 1" in done.stderr, done.stderr


def test_parameters_of_no_module_are_exported_with_their_values(tmp_path):
    model, loose = nn.Linear(2, 1), nn.Parameter(torch.tensor([2.0, 3.0]))
    optimizer = torch.optim.AdamW([*model.parameters(), loose], lr=0.1)
    ckpt = es.CheckpointManager(tmp_path / "out", persist=1, model=model, optimizer=optimizer)
    (model(torch.ones(1, 2)) * loose).sum().backward()
    optimizer.step()
    ckpt.step(1)
    ckpt.close()
    for to in ("torch", "dcp"):
        done = _ckpt("export", tmp_path / "out", tmp_path / to, "--to", to)
        assert done.returncode == 0 and "no module" not in done.stderr, done.stderr
        done = _ckpt("import", tmp_path / to, tmp_path / f"{to}-back", "--from", to)
        assert done.returncode == 0, done.stderr
        done = _ckpt("export", tmp_path / f"{to}-back", tmp_path / f"{to}.pt", "--to", "torch")
        assert done.returncode == 0, done.stderr
    for file in ("torch", "torch.pt", "dcp.pt"):
        state = torch.load(tmp_path / file, weights_only=True)["optimizer"]
        assert state["values"].keys() == {"param_2"} and torch.equal(state["values"]["param_2"], loose), file
        assert torch.equal(state["state"]["param_2"]["exp_avg"], optimizer.state[loose]["exp_avg"])
    done = _ckpt("export", tmp_path / "out", tmp_path / "hf", "--to", "hf")
    assert done.returncode == 0 and "belong to no module: optimizer.param_2" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "nothing", "out.pt", "--to", "torch"), "no complete checkpoint"),
        (("export", "out", "there", "--to", "torch"), "exists"),
        (("export", "out", "x.pt", "--to", "torch", "--step", "77"), "of step 77"),
        (("import", "out", "back", "--from", "dcp"), "no .metadata"),
        (("import", "nothing", "back", "--from", "hf"), "no safetensors file"),
        (("import", "there", "back", "--from", "torch"), "not a torch.save file"),
    ],
)
def test_one_sentence_for_what_cannot_be_done(tmp_path, arguments, words):
    _saved(tmp_path / "out")
    (tmp_path / "there").write_text("mine")
    names = [str(tmp_path / a) if n in (1, 2) else a for n, a in enumerate(arguments)]
    done = _ckpt(*names)
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "there").read_text() == "mine"


def test_one_sentence_for_what_cannot_be_imported(tmp_path, monkeypatch, capsys):
    from safetensors.torch import save_file

    save_file({"w": torch.ones(100)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    # torch.distributed.checkpoint gives both values the name a.b.
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "twice.pt")
    # And these keys the same path.
    torch.save({1: torch.ones(1), "1": {"b": torch.ones(1)}}, tmp_path / "alike.pt")
    cases = (("model.safetensors", "hf", "not a complete"), ("twice.pt", "torch", "a.b"), ("alike.pt", "torch", "1.b"))
    for source, of, words in cases:
        monkeypatch.setattr(sys, "argv", ["ckpt", "import", str(tmp_path / source), str(tmp_path / "to"), "--from", of])
        assert convert.main() == 1
        said = capsys.readouterr().err
        assert said.startswith("everstep: ") and words in said and source in said and said.count("\n") == 1, said
    assert not list((tmp_path / "to").glob("step-*"))
