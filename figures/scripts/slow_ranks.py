"""A data-parallel loop whose ranks compute for about ``--base`` seconds per step.

Each has its own jitter, and one rank may become slow.
"""

from __future__ import annotations

import argparse
import os
import random
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

p = argparse.ArgumentParser()
p.add_argument("--out", required=True, help="directory of one log per rank: step, time")
p.add_argument("--steps", type=int, required=True)
p.add_argument("--base", type=float, default=0.1)
p.add_argument("--slow-from", type=int, default=-1, help="step from which rank 1 computes --times as long")
p.add_argument("--times", type=float, default=2.0)
p.add_argument("--seed", type=int, default=100, help="seed of the jitter; each rank adds its number")
args = p.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
jitter = random.Random(args.seed + rank)
a = torch.ones(128, 128)
took = []
for _ in range(20):
    began = time.perf_counter()
    for _ in range(20):
        a = (a @ a).clamp(0, 1)
    took.append((time.perf_counter() - began) / 20)
# What the machine can do. All ranks use the same value: otherwise a rank that was interrupted here
# would do less work per step, and the others would really be slow.
least = torch.tensor(min(took), dtype=torch.float64)
dist.all_reduce(least, op=dist.ReduceOp.MIN)
each = least.item()

with open(os.path.join(args.out, f"steps-{rank}"), "a", buffering=1) as log:
    for step in range(args.steps):
        slow = rank == 1 and 0 <= args.slow_from <= step
        # An amount of work, not of time: it takes longer on a busy machine.
        for _ in range(int(args.base / each * jitter.uniform(0.7, 1.3) * (args.times if slow else 1))):
            a = (a @ a).clamp(0, 1)
        loss = ddp(torch.ones(8, 64)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.write(f"{step} {time.time()}\n")
