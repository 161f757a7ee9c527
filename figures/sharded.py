"""The workload of the replica figures: FSDP2, in which a step changes all of each rank's shard.

Writes one line per step and rank into ``OUT/rank-R.jsonl``: step, loss, and a digest of this rank's
shard, so that the restored state can be compared bit by bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import everstep


def digest(optimizer: torch.optim.Optimizer) -> str:
    """Returns the digest of this rank's parameters and optimizer state."""
    found = hashlib.blake2b(digest_size=8)
    for group in optimizer.param_groups:
        for p in group["params"]:
            for t in (p, *(v for v in optimizer.state[p].values() if isinstance(v, torch.Tensor))):
                found.update(getattr(t, "_local_tensor", t).detach().numpy().tobytes())
    return found.hexdigest()


def model(width: int, layers: int) -> nn.Module:
    """Returns blocks of one linear layer, sharded one by one."""
    torch.manual_seed(7)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True)
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--width", type=int, default=64)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--pause", type=float, default=0.0)
    p.add_argument("--replicas", default="1", help="copies, or a code as 4+2")
    p.add_argument("--persist", type=int, default=0)
    a = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, out = dist.get_rank(), Path(a.out)
    net = model(a.width, a.layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    ckpt = everstep.CheckpointManager(
        out / "ckpt",
        model=net,
        optimizer=optimizer,
        replicas=int(a.replicas) if a.replicas.isdigit() else a.replicas,
        persist=a.persist,
    )
    with (out / f"rank-{rank}.jsonl").open("a", buffering=1) as log:
        began = True
        for step in ckpt.steps(a.steps):
            if began and step:
                log.write(
                    json.dumps(
                        {"restored": step, "generation": everstep.world().generation, "digest": digest(optimizer)}
                    )
                    + "\n"
                )
            began = False
            g = torch.Generator().manual_seed(step * 1000 + rank)
            loss = net(torch.randn(4, a.width, generator=g)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(a.pause)
            log.write(json.dumps({"step": step + 1, "loss": loss.item(), "digest": digest(optimizer)}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
