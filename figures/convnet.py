"""A second model for the figures: a small convolutional network.

It has batch norm (buffers that change outside the optimizer), an exponential moving average,
momentum and a learning-rate schedule.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import re
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--out", required=True)
    p.add_argument("--overlap", action="store_true")
    p.add_argument("--plain", action="store_true", help="without everstep, for the peer beside us")
    p.add_argument("--spin", choices=["gil", "line"], help="rank 1 stops making progress at --spin-at, once")
    p.add_argument("--spin-at", type=int, default=20)
    p.add_argument("--pause", type=float, default=0.0)
    return p.parse_args()


def spin(kind: str, out: Path) -> None:
    (out / "spun").write_text(str(time.time()))
    if kind == "gil":
        re.match(r"(a+)+$", "a" * 64 + "b")  # backtracks forever and never releases the interpreter
    while True:
        pass


def main() -> None:
    args = arguments()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.LazyLinear(10),
    )  # fmt: skip
    model(torch.zeros(2, 1, 16, 16))
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    ddp = DistributedDataParallel(model)
    torch.manual_seed(100 + rank)
    log = (out / f"losses-{rank}.jsonl").open("a")

    def train(step: int) -> None:
        x = torch.randn(16, 1, 16, 16)
        y = x.mean((1, 2, 3)).mul(40).long().remainder(10)
        loss: Tensor = F.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for a, b in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(b, 0.1)
        log.write(json.dumps({"step": step, "loss": loss.item().hex()}) + "\n")
        log.flush()
        if args.spin and rank == 1 and step == args.spin_at and not (out / "spun").exists():
            spin(args.spin, out)
        if args.pause:
            time.sleep(args.pause)

    if args.plain:
        for step in range(args.steps):
            train(step)
            (out / f"at-{rank}").write_text(str(step))
    else:
        import everstep

        ckpt = everstep.CheckpointManager(
            out, persist=50, overlap=args.overlap, model=model, optimizer=optimizer, schedule=schedule, average=average
        )
        for step in ckpt.steps(args.steps):
            train(step)
    state = [*model.state_dict().values(), *average.state_dict().values()]
    digest = hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in state)).hexdigest()
    (out / f"final-{rank}.txt").write_text(digest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
