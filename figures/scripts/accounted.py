"""A run whose time is known.

Steps of equal length, one evaluation, one wait for data, and a line per step with its times.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import everstep

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--steps", type=int, required=True)
p.add_argument("--pause", type=float, default=0.15)
p.add_argument("--eval-at", type=int, required=True)
p.add_argument("--eval", type=float, required=True)
p.add_argument("--stall-at", type=int, required=True)
p.add_argument("--stall", type=float, required=True)
args = p.parse_args()


class Slow(Dataset[torch.Tensor]):
    """Loads the item ``stall_at`` slowly."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == args.stall_at:
            time.sleep(args.stall)
        return torch.ones(64)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ckpt = everstep.CheckpointManager(os.path.join(args.out, "ckpt"), model=model, optimizer=optimizer, persist=10)
ddp = DistributedDataParallel(model)
log = open(os.path.join(args.out, f"log-{rank}"), "a", buffering=1)  # noqa: SIM115
batches = None
for step in ckpt.steps(args.steps):
    # The position in the data follows the step. After a restart, the slow item is skipped, so it is
    # slow only once.
    if batches is None:
        order = range(step + (args.stall_at + 1 if step > args.stall_at else 0), 1_000_000)
        batches = iter(DataLoader(Slow(), batch_size=1, sampler=order))
    log.write(f"begin {step} {time.time():.6f}\n")
    began = time.time()
    batch = next(batches)
    log.write(f"data {step} {time.time() - began:.6f}\n")
    if step == args.eval_at:
        with everstep.section("eval"):
            time.sleep(args.eval)
    time.sleep(args.pause)
    loss = ddp(batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log.write(f"end {step} {time.time():.6f}\n")
dist.destroy_process_group()
