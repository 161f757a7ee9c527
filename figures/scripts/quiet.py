"""A healthy run that is very irregular.

Its steps vary by 40 %, it stalls, it runs unannounced evaluations, and its first step takes long.
"""

from __future__ import annotations

import argparse
import os
import random
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import everstep

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--base", type=float, required=True)
p.add_argument("--steps", type=int, required=True)
args = p.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ckpt = everstep.CheckpointManager(
    os.path.join(args.out, "ckpt"), model=model, optimizer=optimizer, persist=500, replicated=True
)
ddp = DistributedDataParallel(model)
# The same on all ranks, except for each one's jitter.
plan, own = random.Random(1), random.Random(100 + rank)
marks = plan.sample(range(50, args.steps - 50), 15)
stalls, evaluations = set(marks[:10]), marks[10:]


def compute(seconds: float) -> None:
    """Uses processor time in library calls."""
    until = time.monotonic() + seconds
    a = torch.ones(128, 128)
    while time.monotonic() < until:
        a = (a @ a).clamp(0, 1)


for step in ckpt.steps(args.steps):
    if step == 0:
        time.sleep(50 * args.base)
    if step in stalls:
        # Half of them wait, half of them compute.
        (time.sleep if step % 2 else compute)(10 * args.base)
    if step in evaluations:
        which = evaluations.index(step)
        if which == 0:
            # One library call without the interpreter: enough products of a size of which one takes
            # a fiftieth of the time.
            n, wanted = 500, 30 * args.base
            while True:
                a, began = torch.eye(n), time.monotonic()
                _ = torch.linalg.matrix_power(a, 3)
                if (took := (time.monotonic() - began) / 2) > wanted / 50:
                    break
                n = int(n * 1.2)
            # A power of 2^k takes k products.
            _ = torch.linalg.matrix_power(a, 2 ** min(int(wanted / took), 60))
        elif which == 1:
            time.sleep(30 * args.base)
        else:
            compute(30 * args.base)
    seconds = args.base * own.uniform(0.6, 1.4)
    compute(seconds * 0.2)
    time.sleep(seconds * 0.8)
    loss = ddp(torch.ones(8, 64)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
