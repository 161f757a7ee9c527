"""The elastic workload: DDP, a DataLoader with prefetching workers, and an exact global batch on
any number of ranks.

Every rank logs which samples each step uses, so that `history` can determine what was committed. It
logs before the backward pass: once gradients are reduced, the other ranks can finish and commit the
step without this one, and a rank killed at that point could no longer write.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

SAMPLES, GLOBAL_BATCH, MICRO_BATCH, SEED = 1200, 24, 4, 11


def train(args: argparse.Namespace) -> None:
    """The training script."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    import everstep

    class Numbers(Dataset):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
            return int(index), torch.full((16,), float(index) / SAMPLES)

    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = everstep.data.ElasticDistributedSampler(Numbers(), seed=SEED)
    loader = DataLoader(
        Numbers(),
        batch_size=MICRO_BATCH,
        sampler=sampler,
        num_workers=args.workers,
        prefetch_factor=4 if args.workers else None,
    )
    ckpt = everstep.CheckpointManager(
        args.out / "ckpt", model=model, optimizer=optimizer, data=sampler, persist=args.persist
    )
    log = (args.out / f"used-{os.environ.get('EVERSTEP_GENERATION', '0')}-{os.environ['RANK']}").open("a", buffering=1)
    for step in ckpt.steps(args.steps):
        optimizer.zero_grad()
        for ids, x in ckpt.micro_batches(loader, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH):
            log.write(f"{step} {' '.join(map(str, ids.tolist()))}\n")
            model(x).pow(2).mean().backward()
        optimizer.step()
        time.sleep(args.pause)
    if dist.get_rank() == 0:
        (args.out / "finished").write_text(repr(sampler.finished))
    dist.destroy_process_group()


def history(out: Path) -> dict[int, list[int]]:
    """Returns the samples by step that the latest generation to run it has used on all its
    ranks."""
    runs: dict[int, dict[int, list[int]]] = {}
    for path in out.glob("used-*"):
        generation = int(path.name.split("-")[1])
        for line in path.read_text().splitlines():
            step, *ids = map(int, line.split())
            runs.setdefault(step, {}).setdefault(generation, []).extend(ids)
    return {step: by[max(by)] for step, by in runs.items()}


def unaccounted(out: Path, steps: int) -> int:
    """Returns the number of samples not used exactly once in their epoch or missing from a global
    batch."""
    used = history(out)
    wrong = sum(abs(len(used.get(s, [])) - GLOBAL_BATCH) for s in range(steps))
    per_epoch = SAMPLES // GLOBAL_BATCH
    for first in range(0, steps - steps % per_epoch, per_epoch):
        wrong += SAMPLES - len({sample for s in range(first, first + per_epoch) for sample in used.get(s, [])})
    return wrong


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--pause", type=float, default=0.02)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--persist", type=int, default=50)
    train(p.parse_args())
