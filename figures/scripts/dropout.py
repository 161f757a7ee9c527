"""The README's six lines in a DDP loop in which every loss depends on random numbers.

Batches are drawn, and so is dropout.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--steps", type=int, default=500)
p.add_argument("--seed", type=int, default=1)
p.add_argument("--width", type=int, default=64, help="about 1.2 kB of state per unit")
p.add_argument("--pause", type=float, default=0.0, help="seconds per step, as long as OUT/kills exists")
p.add_argument("--every", type=int, default=0, help="steps between captures; 0: as often as they are cheap")
p.add_argument("--persist", type=int, default=200)
p.add_argument("--forget", action="store_true", help="the planted fault: rank 0 draws other numbers after a restore")
args = p.parse_args()

out = Path(args.out)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)  # otherwise two ranks on two nodes of this machine would share its cores
torch.manual_seed(args.seed)
data = torch.randint(0, 64, (20_000,))
model = nn.Sequential(
    nn.Embedding(64, 32),
    nn.Dropout(0.1),
    nn.Linear(32, args.width),
    nn.ReLU(),
    nn.Dropout(0.1),
    nn.Linear(args.width, 64),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ddp = DistributedDataParallel(model)
torch.manual_seed(args.seed * 1000 + rank)  # each rank draws its own


def get_batch():
    ix = torch.randint(len(data) - 17, (8,))
    return torch.stack([data[i : i + 16] for i in ix]), torch.stack([data[i + 1 : i + 17] for i in ix])


get_batch = everstep.resumable(get_batch)
ckpt = everstep.CheckpointManager(
    out / "ckpt", persist=args.persist, every=args.every or "auto", model=model, optimizer=optimizer, data=get_batch
)
iter_num = ckpt.restore()
if args.forget and iter_num and rank == 0:
    torch.manual_seed(iter_num)
log = (out / f"losses-{rank}.jsonl").open("a", buffering=1)
X, Y = get_batch()
while iter_num < args.steps:
    loss = nn.functional.cross_entropy(ddp(X).view(-1, 64), Y.view(-1))
    X, Y = get_batch()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log.write(json.dumps({"step": iter_num, "loss": loss.item().hex()}) + "\n")
    iter_num += 1
    ckpt.step(iter_num)
    if args.pause and os.path.exists(out / "kills"):
        time.sleep(args.pause)
ckpt.close()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
(out / f"final-{rank}.txt").write_text(digest)
dist.destroy_process_group()
