"""Export says what it leaves out, and whose state it takes."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import everstep as es
from everstep import convert
from harness.ranks import run_ranks


class _Encoder(nn.Linear):
    """Has entries in its state that are not tensors, like a quantized layer."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}scheme": "int8", f"{prefix}bits": 8, f"{prefix}dtype": torch.qint8})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in ("scheme", "bits", "dtype"):
            state_dict.pop(prefix + key)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _export(monkeypatch: pytest.MonkeyPatch, source: Path, out: Path, to: str) -> list[str]:
    """Runs what ``everstep ckpt export`` runs, and returns the warnings."""
    monkeypatch.setattr(sys, "argv", ["ckpt", "export", str(source), str(out), "--to", to])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert convert.main() == 0
    return [str(w.message) for w in found]


def test_a_module_with_entries_that_are_not_tensors_is_exported(tmp_path, monkeypatch):
    encoder, head = _Encoder(2, 3), nn.Linear(3, 1)
    ckpt = es.CheckpointManager(tmp_path / "out", persist=1, encoder=encoder, head=head)
    ckpt.step(1)
    ckpt.close()
    said = _export(monkeypatch, tmp_path / "out", tmp_path / "hf", "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights.keys() == {"encoder.weight", "encoder.bias", "head.weight", "head.bias"}
    assert torch.equal(weights["encoder.weight"], encoder.weight)
    assert any(all(f"encoder.{key}" in text for key in ("scheme", "bits", "dtype")) for text in said), said


def test_what_is_not_known_to_be_a_module_is_named_when_it_is_left_out(tmp_path, monkeypatch):
    model, optimizer = {"w": torch.ones(2)}, {"state": {0: {"m": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    ema = {"decay": 0.9, "shadow": {"w": torch.ones(2)}}
    state = {"model": model, "optimizer": optimizer, "ema": ema, "steps": torch.tensor(5), "epoch": 3}
    dcp.save(state, storage_writer=es.dcp.Writer(tmp_path / "out"), no_dist=True)
    said = _export(monkeypatch, tmp_path / "out", tmp_path / "hf", "hf")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"w"}
    (text,) = [text for text in said if text.startswith("not exported")]
    assert text.endswith(": ema, steps"), text


_EACH = """
import sys, torch, torch.distributed as dist, everstep as es
dist.init_process_group("gloo")
rank = dist.get_rank()
class Sampler:
    position = 3 + rank
    def state_dict(self): return {"position": self.position}
    def load_state_dict(self, state): self.position = state["position"]
class Alike(Sampler):
    position = 3
class Module(torch.nn.Module):
    def get_extra_state(self): return {"seen": 5 + rank}
    def set_extra_state(self, state): pass
model = torch.nn.Linear(1, 1)
if sys.argv[2] == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
ckpt = es.CheckpointManager(
    sys.argv[1], persist=1, replicated=sys.argv[2] == "ddp", model=model, data=Sampler(), same=Alike(), seen=Module()
)
ckpt.step(1)
ckpt.close()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("wrapped", ["ddp", "plain"])
def test_state_that_differs_between_ranks_is_named_when_that_of_one_is_taken(tmp_path, wrapped):
    (tmp_path / "train.py").write_text(_EACH)
    ended = run_ranks([str(tmp_path / "train.py"), str(tmp_path / "out"), wrapped], 2)
    assert [r.code for r in ended] == [0, 0], ended[0].err + ended[1].err
    with pytest.warns(UserWarning, match="exporting rank 0's") as found:
        state = convert.load(tmp_path / "out")
    assert state["data"] == {"position": 3} and state["seen"]["_extra_state"] == {"seen": 5}
    said = " ".join(str(w.message) for w in found)
    assert "data" in said and "seen._extra_state" in said and "same" not in said, said
