"""Steps with some hundred milliseconds of each rank's own work, for comparing ranks."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import everstep

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--work", type=float, default=0.3)
args = p.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
ckpt = everstep.CheckpointManager(os.path.join(args.out, "ckpt"), model=model, optimizer=optimizer, persist=0)
ddp = DistributedDataParallel(model)
a = torch.ones(160, 160)
for _ in ckpt.steps(1_000_000):
    # A fixed amount of processor time, however long it takes to get it.
    until = time.thread_time() + args.work
    while time.thread_time() < until:
        a = (a @ a).clamp(0, 1)
    loss = ddp(torch.ones(8, 64)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
