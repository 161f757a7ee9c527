"""The training run of figure ``data-ledger``: pictures of 20 kinds, randomly shifted and dimmed.

The pictures are in the order of their kinds, as in a directory tree. DDP with dropout; an exact
global batch on any number of ranks.

Each rank logs what every step uses (samples, checksums of the augmented pictures) before the
backward pass: once gradients are reduced, the others can commit the step without this rank, and a
rank killed at that point could no longer write. Losses follow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import everstep
from everstep.data import ElasticDistributedSampler, Reproducible

#: A prime number of samples, so that no world and no batch divides an epoch.
SAMPLES, KINDS, SIDE, SEED = 1201, 20, 8, 11
GLOBAL_BATCH, MICRO_BATCH = 22, 2
#: Samples that the naive stream buffers to draw from, as file loaders do.
BUFFER = 64
NOISE = 1.0

Sample = tuple[int, Tensor, int]


class Pictures(Dataset[Sample]):
    """(number, picture of ``SIDE`` × ``SIDE``, kind).

    Another ``part`` has other pictures of the same kinds.
    """  # noqa: RUF002

    def __init__(self, part: int, augment: bool) -> None:
        kinds = torch.randn(KINDS, SIDE, SIDE, generator=torch.Generator().manual_seed(SEED))
        self.kind = [n * KINDS // SAMPLES for n in range(SAMPLES)]
        noise = torch.randn(SAMPLES, SIDE, SIDE, generator=torch.Generator().manual_seed(SEED + 1 + part))
        self.pictures = kinds[self.kind] + NOISE * noise
        self.augment = augment

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        picture = self.pictures[index]
        if self.augment:
            picture = picture.roll((random.randint(-1, 1), random.randint(-1, 1)), (0, 1)) * (0.8 + 0.4 * torch.rand(1))
        return int(index), picture, self.kind[index]


class Stream(IterableDataset[Sample]):
    """Every ``ranks``-th sample of the files in order, drawn from a buffer.

    Starts at the beginning.
    """

    def __init__(self, pictures: Pictures, rank: int, ranks: int) -> None:
        self.pictures, self.rank, self.ranks = pictures, rank, ranks

    def __iter__(self) -> Iterator[Sample]:
        held: list[Sample] = []
        for index in range(self.rank, SAMPLES, self.ranks):
            held.append(self.pictures[index])
            if len(held) >= BUFFER:
                yield held.pop(random.randrange(len(held)))
        random.shuffle(held)
        yield from held


def _naive(kind: str) -> Iterator[list[Any]]:
    """Yields batches of a loader that starts over with each process.

    Of a stream, or of an epoch whose order is drawn once.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pictures, batch = Pictures(0, augment=True), GLOBAL_BATCH // ranks
    for epoch in range(1 << 30):
        if kind == "stream":
            yield from DataLoader(Stream(pictures, rank, ranks), batch_size=batch, drop_last=True)
        else:
            sampler = DistributedSampler(pictures, ranks, rank, seed=SEED)
            sampler.set_epoch(epoch)
            yield from DataLoader(pictures, batch_size=batch, sampler=sampler, drop_last=True)


def train(args: argparse.Namespace) -> None:
    """Trains. Rank 0 writes the hashes of finished epochs and the accuracy on other pictures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    random.seed(SEED + dist.get_rank())
    net = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, KINDS))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # DDP reorders its buckets after its first pass, and three or more ranks then add gradients in
    # another order. A restart would do so, too, in the middle of the run.
    model(torch.zeros(2, SIDE, SIDE)).sum().backward()
    optimizer.zero_grad()
    sampler = ElasticDistributedSampler(Pictures(0, augment=True), seed=SEED)
    pictures = Reproducible(Pictures(0, augment=True), sampler)
    loader = DataLoader(
        pictures,
        batch_size=MICRO_BATCH,
        sampler=sampler,
        num_workers=args.workers,
        prefetch_factor=4 if args.workers else None,
    )
    data = {"data": sampler} if args.data == "everstep" else {}
    ckpt = everstep.CheckpointManager(args.out / "ckpt", model=model, optimizer=optimizer, persist=100, **data)
    batches = None if data else _naive(args.data)
    log = (args.out / f"used-{os.environ.get('EVERSTEP_GENERATION', '0')}-{os.environ['RANK']}").open("a", buffering=1)
    for step in ckpt.steps(args.steps):
        optimizer.zero_grad()
        losses = []
        for ids, x, kind in (
            ckpt.micro_batches(loader, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH)
            if batches is None
            else [next(batches)]
        ):
            crcs = [zlib.crc32(picture.numpy().tobytes()) for picture in x]
            log.write(
                json.dumps(
                    {"step": step, "ranks": dist.get_world_size(), "used": [*zip(ids.tolist(), crcs, strict=True)]}
                )
                + "\n"
            )
            loss = nn.functional.cross_entropy(model(x), kind)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        log.write(json.dumps({"step": step, "losses": [loss.hex() for loss in losses]}) + "\n")
        time.sleep(args.pause)
    if dist.get_rank() == 0 and ckpt.latest_step() == args.steps:
        net.eval()
        others = Pictures(1, augment=False)
        with torch.no_grad():
            right = (net(others.pictures).argmax(1) == torch.tensor(others.kind)).double().mean().item()
        (args.out / "result.json").write_text(
            json.dumps({"finished": list(sampler.finished.items()), "accuracy": right})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--steps", type=int, required=True)
    p.add_argument("--data", choices=["everstep", "stream", "epoch"], default="everstep")
    p.add_argument("--pause", type=float, default=0.0)
    p.add_argument("--workers", type=int, default=0)
    train(p.parse_args())
