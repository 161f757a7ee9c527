"""Steps that use some processor, memory and network.

For fleets whose machines are compared.
"""

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
p.add_argument("--pause", type=float, default=0.15)
args = p.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
ckpt = everstep.CheckpointManager(os.path.join(args.out, "ckpt"), model=model, optimizer=optimizer, persist=0)
ddp = DistributedDataParallel(model)
for _ in ckpt.steps(1_000_000):
    loss = ddp(torch.ones(8, 512)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(args.pause)
