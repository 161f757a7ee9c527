"""Export to DCP, torch and Hugging Face safetensors, and import, keep a checkpoint's bits.

Bit for bit, including the optimizer if the format has one. Stock tools read the exports: a process
without everstep, with torch's and safetensors' own loaders.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import everstep as es
from everstep import convert
from figures.bound import Bound
from figures.snapshot_blocking import EVERSTEP

#: Reads an export with stock tools and stores what it found.
STOCK = """
import sys, torch
sys.modules["everstep"] = None
kind, source, out = sys.argv[1:]
if kind == "torch":
    state = torch.load(source, weights_only=True)
elif kind == "dcp":
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    dcp_to_torch_save(source, out + ".all")
    state = torch.load(out + ".all", weights_only=True)
else:
    from pathlib import Path
    from safetensors.torch import load_file
    state = {"model": {k: v for f in sorted(Path(source).glob("*.safetensors")) for k, v in load_file(f).items()}}
torch.save(state, out)
"""
KINDS = ("torch", "dcp", "hf")


class Net(nn.Module):
    """Odd sizes, several dtypes, a buffer, tied weights, a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 24)
        self.norm = nn.BatchNorm1d(24)
        self.low = nn.Linear(24, 17, dtype=torch.bfloat16)
        self.head = nn.Linear(24, 101, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("seen", torch.arange(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(x)) * self.scale.float()
        return self.head(h).square().mean() + self.low(h.bfloat16()).float().square().mean()


def _train(out: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    ckpt = es.CheckpointManager(out, persist=5, model=net, optimizer=optimizer)
    for step in range(1, 11):
        optimizer.zero_grad()
        net(torch.randint(0, 101, (8,))).backward()
        optimizer.step()
        ckpt.step(step)
    ckpt.close()
    return net, optimizer


def _ckpt(*arguments: object) -> None:
    subprocess.run([EVERSTEP, "ckpt", *map(str, arguments)], check=True, capture_output=True, timeout=300)


def _flat(value: Any, at: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{at}/{key}").items()}
    return {at: value} if isinstance(value, torch.Tensor) else {}


def _wrong(right: dict[str, torch.Tensor], found: Any) -> int:
    """Returns the number of tensors that are missing or differ in a bit, a dtype or a shape."""
    got = _flat(found)

    def bits(t: torch.Tensor) -> bytes:
        return bytes(t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()) if t.numel() else b""

    def same(a: torch.Tensor, b: torch.Tensor | None) -> bool:
        return b is not None and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)

    return sum(not same(value, got.get(name)) for name, value in right.items())


def measure(soak: bool) -> Iterator[Bound]:
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        net, optimizer = _train(home / "run")
        names = {id(p): n for n, p in net.named_parameters()}
        states = {names[id(p)]: dict(v) for p, v in optimizer.state.items()}
        model = _flat({"model": dict(net.state_dict())})
        everything = model | _flat({"optimizer": {"state": states}})
        for kind in KINDS:
            right = model if kind == "hf" else everything
            source = home / kind
            _ckpt("export", home / "run", source, "--to", kind)
            out = home / f"{kind}.read"
            subprocess.run(
                [sys.executable, "-c", STOCK, kind, str(source), str(out)], check=True, capture_output=True, timeout=300
            )
            yield Bound(
                f"{kind}-stock",
                _wrong(right, torch.load(out, weights_only=True)),
                f"of {len(right)} tensors wrong, read without everstep",
                "=",
                0,
            )
            _ckpt("import", source, home / f"{kind}-back", "--from", kind)
            yield Bound(
                f"{kind}-back",
                _wrong(right, convert.load(home / f"{kind}-back")),
                f"of {len(right)} tensors wrong after import",
                "=",
                0,
            )
