"""A short training without everstep, which ends in a given way.

A hand-written loop like nanoGPT's, or a Trainer. Each completed step is a line ``LIFE STEP`` in
``OUT/step-RANK``. A rank whose script has ended writes its pid into ``OUT/over-LIFE-RANK``.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

p = argparse.ArgumentParser()
p.add_argument("--shape", choices=["loop", "trainer"], required=True)
p.add_argument("--end", required=True)
p.add_argument("--out", type=Path, required=True)
p.add_argument("--steps", type=int, default=12)
p.add_argument("--victim", type=int, default=1, help="the rank that it happens to")
p.add_argument("--at", type=int, default=6, help="the step in which it happens, where it happens in the middle")
p.add_argument("--lives", type=int, default=1, help="and in how many lives")
p.add_argument("--delay", type=float, default=0.2, help="seconds between the ends of different ranks")
args = p.parse_args()

dist.init_process_group("gloo")
rank, size, life = dist.get_rank(), dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
others = [other for other in range(size) if other != rank]


def completed(step: int) -> None:
    with (args.out / f"step-{rank}").open("a") as file:
        file.write(f"{life} {step}\n")


def over() -> None:
    part = args.out / f"over-{life}-{rank}.part"
    part.write_text(str(os.getpid()))
    part.rename(part.with_suffix(""))


def others_are_gone() -> None:
    """Waits until all other ranks' scripts and processes have ended."""
    for other in others:
        note = args.out / f"over-{life}-{other}"
        while not note.exists() or Path(f"/proc/{note.read_text()}").exists():
            time.sleep(0.01)
    time.sleep(args.delay)


def signalled(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def fails(error: Exception) -> None:
    raise error


#: How a rank leaves the world, whatever Python would do.
BLOWS: dict[str, Callable[[], None]] = {
    "abort": os.abort,
    "segfault": signalled(signal.SIGSEGV),
    "kill": signalled(signal.SIGKILL),
    "os-exit": lambda: os._exit(3),
    "exception": lambda: fails(OSError("no space left for the report")),
}
where, _, blow = args.end.partition(":")
mine = rank == args.victim


def before_a_step(step: int) -> None:
    """Makes all but one rank leave in the middle of the training."""
    if where == "left" and not mine and step == args.at + 1:
        over()
        os._exit(0)


def before_the_update(step: int) -> None:
    """Fails in the middle of a step, after its gradients are reduced; the next ones need all
    ranks."""
    if where == "middle" and mine and step == args.at and life < args.lives:
        BLOWS[blow]()
    if where == "left" and mine and step == args.at:
        others_are_gone()
        BLOWS[blow]()


def the_end() -> None:
    """Ends in the given way after the last step."""
    if where == "late" and mine:
        others_are_gone()
        BLOWS[blow]()
    if where == "first" and mine:
        BLOWS[blow]()
    if where in ("first", "slow") and not mine:
        time.sleep(args.delay)
    if where == "shutdown" and mine:
        atexit.register(BLOWS[blow])
        atexit.register(time.sleep, args.delay)
    if where == "shutdown-late" and mine:
        atexit.register(BLOWS[blow])
        atexit.register(others_are_gone)
    if where == "everywhere":
        fails(OSError("no space left for the report"))
    if where == "refused":
        sys.exit(3)


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 16)
    return x, x.sum(1, keepdim=True)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A loop shaped like nanoGPT's train.py."""
    iter_num, best = 0, float("inf")
    X, Y = batch()
    while True:
        if iter_num % 5 == 0 and rank == 0:
            with torch.no_grad():
                loss = float(nn.functional.mse_loss(model.module(X), Y))
            if loss < best:
                best = loss
                torch.save({"model": model.module.state_dict(), "iter_num": iter_num}, args.out / "ckpt.pt")
        if iter_num == args.steps:
            break
        before_a_step(iter_num + 1)
        nn.functional.mse_loss(model(X), Y).backward()
        X, Y = batch()
        before_the_update(iter_num + 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1
        completed(iter_num)
    dist.destroy_process_group()


class Trainer:
    """A trainer like those of libraries.

    It has callbacks, an evaluation and a history, and rank 0 saves the model at the end.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, callbacks: list[Callable[[int], None]]
    ) -> None:
        self.model, self.optimizer, self.callbacks = model, optimizer, callbacks
        self.schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=args.steps)
        self.history: list[dict[str, float]] = []

    def train(self) -> None:
        self.model.train()
        for step in range(1, args.steps + 1):
            before_a_step(step)
            self.optimizer.zero_grad()
            loss = self._loss(*batch())
            loss.backward()
            before_the_update(step)
            self.optimizer.step()
            self.schedule.step()
            self.history.append({"step": step, "loss": loss.item()})
            for callback in self.callbacks:
                callback(step)
        self.save()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(x), y)

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        mean = torch.stack([self._loss(*batch()) for _ in range(4)]).mean()
        dist.all_reduce(mean)
        return float(mean) / size

    def save(self) -> None:
        if rank == 0:
            torch.save(self.model.state_dict(), args.out / "model.pt")
            torch.save(self.history, args.out / "history.pt")
        dist.barrier()


torch.manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if args.shape == "loop":
    loop(model, optimizer)
else:
    trainer = Trainer(model, optimizer, [completed])
    trainer.train()
    trainer.evaluate()
the_end()
over()
