"""Steps of 20 ms, alternately with a snapshot at each and without.

Prints what ``ckpt.step`` took, and how much longer steps took: in the first blocks in total
(``first``), then in each block (``pairs``) and on average (``paired``); and how long it takes to
clone the same tensors, one after the other, which is no checkpoint yet (``clone``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import everstep

BLOCK = 25
#: Seconds of a step without the manager.
STEP = 0.02

#: Width of the blocks of ``gpt``. Four of them with Adam's state are 1.4 MB.
GPT_WIDTH = 48


def model_of(size: int, shape: str = "linear") -> nn.Module:
    """Returns a model whose parameters, with two of Adam's tensors for each, have about ``size``
    bytes.

    ``linear``: linear layers, 32 wide up to 2 MiB and 256 wide above, for as many tensors as fit
    into so few bytes. ``gpt``: transformer blocks.
    """
    if shape == "gpt":
        block = nn.TransformerEncoderLayer(GPT_WIDTH, 4, 4 * GPT_WIDTH, batch_first=True)
        blocks = max(round(size / (sum(p.numel() for p in block.parameters()) * 4 * 3)), 1)
        return nn.Sequential(
            *[nn.TransformerEncoderLayer(GPT_WIDTH, 4, 4 * GPT_WIDTH, batch_first=True) for _ in range(blocks)]
        )
    side = 32 if size <= 2 << 20 else 256
    layers = max(round(size / (side * (side + 1) * 4 * 3)), 1)
    return nn.Sequential(*[nn.Linear(side, side) for _ in range(layers)])


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the tensors of both states."""
    states = optimizer.state_dict()["state"].values()
    return [*model.state_dict().values(), *(t for s in states for t in s.values())]


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--bytes", type=int, required=True)
    p.add_argument("--shape", choices=["linear", "gpt"], default="linear")
    p.add_argument("--blocks", type=int, default=20)
    p.add_argument("--every", type=int, help="steps between snapshots; what stall_budget allows unless given")
    p.add_argument("--out", required=True)
    a = p.parse_args()
    torch.set_num_threads(1)
    model = model_of(a.bytes, a.shape)
    # Fused: the time of the update varies least, and it is part of what is compared.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    options = {"every": a.every} if a.every else {"stall_budget": 0.01}
    ckpt = everstep.CheckpointManager(
        Path(a.out) / "ckpt", model=model, optimizer=optimizer, schedule=schedule, persist=0, replicas=0, **options
    )
    ckpt.restore()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    work = torch.randn(400, 400)
    # The time of a step besides the update; known after the first blocks.
    computing = 0.9 * STEP

    def compute() -> None:
        until = time.perf_counter() + computing
        while time.perf_counter() < until:
            work @ work

    step, took, pairs, plain, first = 0, [], [], [], 0.0
    for block in range(-12, a.blocks):
        sides = []
        for snapshots in (False, True) if block % 2 else (True, False):
            spent = 0.0
            for _ in range(BLOCK):
                compute()
                began = time.perf_counter()
                optimizer.step()
                if snapshots:
                    schedule.step()
                    step += 1
                    called = time.perf_counter()
                    ckpt.step(step)
                    if block >= 0:
                        took.append(time.perf_counter() - called)
                else:
                    schedule.step()
                spent += time.perf_counter() - began
            sides.append((snapshots, spent / BLOCK))
            if not snapshots and block == -10:
                computing = max(STEP - spent / BLOCK, 0.1 * STEP)
        longer = dict(sides)[True] - dict(sides)[False]
        if block >= 0:
            plain.append(dict(sides)[False])
            pairs.append(longer)
        else:
            first += BLOCK * longer
    cloned = []
    for _ in range(2 * BLOCK):
        compute()
        optimizer.step()
        began = time.perf_counter()
        copies = [t.clone() for t in tensors_of(model, optimizer)]
        cloned.append(time.perf_counter() - began)
        del copies
    size = sum(p.numel() * 4 for p in model.parameters()) * 3
    without = statistics.mean(plain) + computing
    found = {
        "bytes": size,
        "step": without,
        "call": statistics.median(took),
        "clone": statistics.median(cloned),
        "paired": statistics.mean(pairs),
        "first": first,
        "pairs": pairs,
        "block": BLOCK,
    }
    print(json.dumps({**found, "tensors": 4 * len(list(model.parameters()))}), flush=True)
    ckpt.close()


if __name__ == "__main__":
    main()
