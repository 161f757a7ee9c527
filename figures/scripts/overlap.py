"""FSDP2 steps with real collectives and timed waits for computing (a GPU leaves the CPU idle).

A checkpoint is made at every step, in several ways that alternate every few steps. Rank 0 writes
one line per step into ``OUT/steps.jsonl``.

Every way but ``none`` has each step at the other node before the next one is over:

* ``ours``: sent in the profiled idle spans
* ``unpipelined``: in the idle spans with one buffer: a part is received, verified and confirmed
  before the next is sent
* ``unpaced``: sent at once, concurrently with the collectives
* ``blocking``: sent at once while the training waits
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import everstep
from everstep import network

ARMS = ("none", "ours", "unpaced", "none", "ours", "unpipelined", "none", "ours", "blocking")
#: Iterations before the first arm, for the profile.
WARM = 30


class Compute(torch.autograd.Function):
    """Waits forward, and twice as long backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Block(nn.Module):
    """A linear layer that takes as long as it would on the device."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Compute.apply(torch.tanh(self.linear(x)), self.seconds)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True)
    p.add_argument("--width", type=int, default=1408)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--seconds", type=float, default=0.085)
    p.add_argument("--rounds", type=int, default=4)
    p.add_argument("--block", type=int, default=4)
    a = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = nn.Sequential(*(Block(a.width, a.seconds) for _ in range(a.layers)))
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    ckpt = everstep.CheckpointManager(Path(a.out) / "ckpt", model=net, optimizer=optimizer, persist=0, overlap=True)
    ckpt.restore()
    data = torch.randn(2, a.width)
    board = everstep.worker.current().board
    plan = ["ours"] * WARM + [arm for _ in range(a.rounds) for arm in ARMS for _ in range(a.block)]
    lines = []
    for step, arm in enumerate(plan):
        watch = ckpt._tier._network
        if step and arm != plan[step - 1]:
            ckpt.wait("peer")
            watch.set_open(arm in ("unpaced", "blocking"))
            board.one_buffer = arm == "unpipelined"
            dist.barrier()
        began = time.perf_counter()
        net(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = time.perf_counter()
        if arm == "none":
            everstep.heartbeat(step + 1)
            network.iteration(watch)
        else:
            # The previous step must be at the other node by now.
            ckpt.wait("peer")
            ckpt.step(step + 1)
            if arm == "blocking":
                ckpt.wait("peer")
        ended = time.perf_counter()
        size = sum(
            t.numel() * 4
            for g in optimizer.param_groups
            for p in g["params"]
            for t in (p._local_tensor, p._local_tensor, p._local_tensor)
        )
        at_peer = (ckpt.latest_step("peer") or 0) - step
        lines.append({"arm": arm, "step": step + 1, "seconds": ended - began, "trained": trained - began, "bytes": size, "behind": -at_peer,
                      "profile": watch.profile() if step == WARM else None})  # fmt: skip
    if dist.get_rank() == 0:
        with (Path(a.out) / "steps.jsonl").open("w") as log:
            log.writelines(json.dumps(line) + "\n" for line in lines)
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
