"""DDP on several ranks. From time to time, one bit of one rank's parameters changes between two
steps.

Rank 0 writes the changes to ``OUT/flips.jsonl``: ``{"step", "rank"}`` with the last step that was
complete when it happened.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep


def flip(model: nn.Module, rng: random.Random) -> None:
    """Flips one bit of one element of one parameter, in its mantissa or sign.

    With an infinity, all ranks would have NaN a step later.
    """
    parameter = rng.choice(list(model.parameters()))
    bits = parameter.detach().view(-1).view(torch.int32)
    bits[rng.randrange(bits.numel())] ^= rng.choice([*(1 << n for n in range(23)), -(1 << 31)])


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--clean", type=int, default=5000, help="steps before the first flip")
    p.add_argument("--flips", type=int, default=50)
    p.add_argument("--between", type=int, default=40, help="steps from one to the next")
    p.add_argument("--pause", type=float, default=0.002)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ckpt = everstep.CheckpointManager(a.out / "ckpt", model=model, optimizer=optimizer, persist=0)
    ckpt.restore()
    rng = random.Random(a.seed)
    torch.manual_seed(rank)
    done = []
    for step in range(1, a.clean + a.flips * a.between + 1):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        ckpt.step(step)
        at = (step - a.clean) % a.between
        if step >= a.clean and at == 0 and len(done) < a.flips:
            victim = rng.randrange(size)
            # The same draws on all ranks, whichever is hit.
            copy = random.Random(rng.randrange(1 << 30))
            if rank == victim:
                flip(net, copy)
            done.append({"step": step, "rank": victim})
        elif done and at == a.between // 2:
            # All become like rank 0 again, including the optimizer state.
            for t in [*net.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]:
                dist.broadcast(t, 0)
        time.sleep(a.pause)
    if rank == 0:
        (a.out / "flips.jsonl").write_text("".join(json.dumps(d) + "\n" for d in done))
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
