"""A small job of several ranks that logs each step of each rank, with its loss to the last bit."""

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import everstep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--out", type=Path, required=True, help="directory of the step log; it is never part of the trouble"
    )
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument(
        "--balloon", type=int, default=0, help="MiB that rank 1 uses after half of the steps, in its first start"
    )
    parser.add_argument(
        "--wrong", choices=["skips", "hangs", "differs"], help="for control arms: what the job does wrong"
    )
    given = parser.parse_args()
    rank, first = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(rank)
    manager = everstep.CheckpointManager(given.checkpoints, model=model, optimizer=optimizer, persist=5)
    log = os.open(given.out / f"steps-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    held = []
    for step in manager.steps(given.steps):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        value = loss.item() + (1.0 if given.wrong == "differs" and step == 7 else 0.0)
        if not (given.wrong == "skips" and step == 7):
            os.write(log, f"{step} {value.hex()} {os.getpid()}\n".encode())
        if given.wrong == "hangs" and step == 7:
            time.sleep(10_000)
        if given.balloon and rank == 1 and first and step == given.steps // 2:
            held.extend(b"x" * (1 << 20) for _ in range(given.balloon))
        time.sleep(given.pause)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    (given.out / f"final-{rank}").write_text(digest)
    print(f"rank {rank} done", flush=True)
    manager.close()
    sys.stdout.flush()


main()
