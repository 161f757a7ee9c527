"""Snapshots of a model on a GPU.

Next to a bare copy into pinned memory, and at every step of a training loop. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import nn

import everstep


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True)
    p.add_argument("--width", type=int, default=4096)
    p.add_argument("--layers", type=int, default=20)
    p.add_argument("--batch", type=int, default=16384)
    p.add_argument("--steps", type=int, default=40)
    a = p.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(3)
    # 20 x 3 matrices of 4096 x 4096: 1.0 billion parameters.
    net = nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(a.width, a.width), nn.GELU(), nn.Linear(a.width, a.width), nn.Linear(a.width, a.width)
            )
            for _ in range(a.layers)
        )
    )
    net = net.to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    x = torch.randn(a.batch, a.width, device=device, dtype=torch.bfloat16)
    ckpt = everstep.CheckpointManager(a.out, model=net, optimizer=optimizer, persist=0, replicas=0)
    ckpt.restore()

    def train() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    parts = [*net.parameters(), *(t for s in optimizer.state.values() for t in s.values() if t.device.type == "cuda")]
    size = sum(t.numel() * t.element_size() for t in parts)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    step = 0
    for round_ in range(6):
        torch.cuda.synchronize()
        began, at = time.perf_counter(), 0
        for t in parts:
            n = t.numel() * t.element_size()
            pinned[at : at + n].copy_(t.detach().reshape(-1).view(torch.uint8), non_blocking=True)
            at += n
        torch.cuda.synchronize()
        bare = time.perf_counter() - began
        step += 1
        began = time.perf_counter()
        ckpt.step(step)
        torch.cuda.synchronize()
        copied = time.perf_counter() - began
        ckpt.wait()
        if round_:
            print(
                json.dumps({"bare": bare, "copied": copied, "sealed": time.perf_counter() - began, "bytes": size}),
                flush=True,
            )
    del pinned
    for round_ in range(4):
        for arm in ("without", "with"):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(a.steps):
                train()
                step += 1
                if arm == "with":
                    ckpt.step(step)
                else:
                    everstep.heartbeat(step)
            torch.cuda.synchronize()
            took = (time.perf_counter() - began) / a.steps
            ckpt.wait()
            if round_:
                print(json.dumps({"arm": arm, "step": took}), flush=True)
    ckpt.close()


if __name__ == "__main__":
    main()
