"""Trains a small GPT with DDP on real text:
`everstep run --nproc-per-node 2 examples/gpt/train.py`.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

import text
import torch
import torch.distributed as dist
from model import GPT, Config
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import everstep


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    p.add_argument("--out", default="out/gpt")
    p.add_argument("--persist", type=int, default=20, help="steps between durable checkpoints")
    p.add_argument("--overlap", choices=["auto", "yes", "no"], default="auto")
    p.add_argument("--layers", type=int, default=Config.layers)
    p.add_argument("--width", type=int, default=Config.width)
    p.add_argument("--seed", type=int, default=1)
    return p.parse_args()


@everstep.record
def main() -> None:
    args = arguments()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    config = Config(layers=args.layers, width=args.width)
    torch.manual_seed(args.seed)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ddp = DistributedDataParallel(model)
    # DDP regroups its gradients after the first backward pass, and another grouping sums in another
    # order. Trigger this before the first step, so that a restarted run sums like the run it
    # continues.
    blank = torch.zeros(1, config.context, dtype=torch.long, device=device)
    ddp(blank, blank).backward()
    optimizer.zero_grad(set_to_none=True)
    torch.manual_seed(args.seed * 1000 + rank)  # now each rank draws its own batches and dropout
    data = text.load()

    @everstep.resumable
    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - config.context - 1, (args.batch,)).tolist()
        rows = torch.stack([data[s : s + config.context + 1] for s in starts]).long().to(device)
        return rows[:, :-1], rows[:, 1:]

    overlap = {"auto": "auto", "yes": True, "no": False}[args.overlap]
    ckpt = everstep.CheckpointManager(
        args.out, persist=args.persist, overlap=overlap, model=model, optimizer=optimizer, data=batch
    )
    Path(args.out).mkdir(parents=True, exist_ok=True)
    log = (Path(args.out) / f"losses-{rank}.jsonl").open("a")
    begun = ckpt.restore()
    if rank == 0 and begun >= args.steps:
        print(f"already complete at step {begun}; give another --out to train again", flush=True)
    for step in ckpt.steps(args.steps):
        x, y = batch()
        loss = ddp(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        log.write(json.dumps({"step": step, "loss": loss.item().hex()}) + "\n")
        log.flush()
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()
    (Path(args.out) / f"final-{rank}.txt").write_text(digest)
    if rank == 0:
        print(f"done: {args.steps} steps, parameters {digest[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
