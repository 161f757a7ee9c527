"""Writes fixture.json next to this file: the same network in torch, with its reconstruction, loss,
and gradients. Run it once: `python fixture.py`.
"""

import json
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(11)
torch.set_default_dtype(torch.float64)
WINDOW, HIDDEN, LATENT, BETA = 8, 4, 8, 0.1


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.LSTM(1, HIDDEN)
        self.mean, self.spread = nn.Linear(HIDDEN, LATENT), nn.Linear(HIDDEN, LATENT)
        self.write = nn.LSTM(LATENT, HIDDEN)
        self.out = nn.Linear(HIDDEN, 1)
        # torch has two biases per gate; the Rust network has one.
        nn.init.zeros_(self.read.bias_hh_l0)
        nn.init.zeros_(self.write.bias_hh_l0)

    def forward(self, x: torch.Tensor, chance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, (h, _) = self.read(x.view(WINDOW, 1, 1))
        mean, spread = self.mean(h[0]), self.spread(h[0])
        latent = mean + chance * torch.exp(0.5 * spread)
        again, _ = self.write(latent.expand(WINDOW, 1, LATENT))
        out = self.out(again).view(WINDOW)
        divergence = 0.5 * (mean.square() + spread.exp() - spread - 1).sum()
        return out, 0.5 * (out - x).square().sum() + BETA * divergence


net = Network()
x = 0.5 + 0.3 * torch.sin(0.7 * torch.arange(WINDOW))
chance = torch.cos(torch.arange(LATENT, dtype=torch.float64))
parts = {
    "read.input": net.read.weight_ih_l0,
    "read.recurrent": net.read.weight_hh_l0,
    "read.bias": net.read.bias_ih_l0,
    "mean.weight": net.mean.weight,
    "mean.bias": net.mean.bias,
    "spread.weight": net.spread.weight,
    "spread.bias": net.spread.bias,
    "write.input": net.write.weight_ih_l0,
    "write.recurrent": net.write.weight_hh_l0,
    "write.bias": net.write.bias_ih_l0,
    "out.weight": net.out.weight,
    "out.bias": net.out.bias,
}
_, loss = net(x, chance)
loss.backward()
plain, _ = net(x, torch.zeros(LATENT))
found = {
    "torch": torch.__version__.split("+")[0],
    "window": x.tolist(),
    "chance": chance.tolist(),
    "beta": BETA,
    "loss": loss.item(),
    "reconstruction": plain.tolist(),
    "parameters": {name: p.detach().flatten().tolist() for name, p in parts.items()},
    "gradients": {name: p.grad.flatten().tolist() for name, p in parts.items()},
}
(Path(__file__).parent / "fixture.json").write_text(json.dumps(found) + "\n")
