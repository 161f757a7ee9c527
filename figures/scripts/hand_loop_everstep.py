"""A typical hand-written loop: global random state, one batch fetched ahead."""

import os
import sys

import torch
from torch import nn

import everstep

out_dir, max_iters = sys.argv[1], int(sys.argv[2])
torch.manual_seed(1337)
data = torch.randint(0, 64, (20_000,))


def get_batch(split):
    ix = torch.randint(len(data) - 16, (8,))
    return torch.stack([data[i : i + 16] for i in ix]), torch.stack([data[i + 1 : i + 17] for i in ix])


get_batch = everstep.resumable(get_batch)


model = nn.Sequential(nn.Embedding(64, 32), nn.Dropout(0.1), nn.Linear(32, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
iter_num = 0
ckpt = everstep.CheckpointManager(os.path.join(out_dir, "ckpt"), model=model, optimizer=optimizer, data=get_batch)
iter_num = ckpt.restore()
X, Y = get_batch("train")
while iter_num < max_iters:
    logits = model(X)
    loss = nn.functional.cross_entropy(logits.view(-1, 64), Y.view(-1))
    X, Y = get_batch("train")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    iter_num += 1
    with open(os.path.join(out_dir, "losses"), "a") as file:
        file.write(f"{iter_num} {loss.item()!r}\n")
    ckpt.step(iter_num)
ckpt.close()
torch.save(model.state_dict(), os.path.join(out_dir, "final.pt"))
