"""A script with its own log: each rank logs every step that it has done, and in which generation.

Without ``--everstep``, it never imports everstep. With ``--save``, it continues from its own
checkpoints.
"""

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--steps", type=int, default=300)
p.add_argument("--pause", type=float, default=0.01)
p.add_argument("--optimizer", choices=("adam", "momentum", "scheduler", "epochs", "plain"), default="adam")
p.add_argument("--save", type=int, default=0, help="steps between checkpoints of its own")
p.add_argument("--everstep", action="store_true")
p.add_argument(
    "--die",
    action="append",
    default=[],
    help="GENERATION:RANK:STEP[:SIGNAL]: that rank gets the signal (SIGKILL) when it has done that step",
)
p.add_argument("--hold", help="GENERATION:STEP: goes on after that step when there is a file named go")
args = p.parse_args()

rank, generation = int(os.environ["RANK"]), os.environ["EVERSTEP_GENERATION"]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 4))
if args.optimizer == "adam":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if args.optimizer == "momentum" else 0.0)
every = {"scheduler": 1, "epochs": 25}.get(args.optimizer, 0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0) if every else None
log = os.open(os.path.join(args.out, f"log-{rank}"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
path = os.path.join(args.out, "own.pt")


def update(step):
    """Makes step number ``step``, counted from 1.

    A rank that is to die after the previous step dies first, when that step is completely over.
    """
    for one in args.die:
        at, _, number = one.partition(f"{generation}:{rank}:{step - 1}")
        if not at and number in ("", ":19"):
            os.kill(os.getpid(), int(number[1:] or signal.SIGKILL))
    optimizer.zero_grad()
    model(torch.randn(8, 16)).pow(2).mean().backward()
    time.sleep(args.pause)
    optimizer.step()
    os.write(log, f"{generation} {step}\n".encode())
    if scheduler and step % every == 0:
        scheduler.step()
    while args.hold == f"{generation}:{step}" and not os.path.exists(os.path.join(args.out, "go")):
        time.sleep(0.02)


def save(step):
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "scheduler": scheduler.state_dict()} if scheduler else state, path + ".new")
    os.replace(path + ".new", path)


def load():
    if not args.save or not os.path.exists(path):
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if scheduler:
        scheduler.load_state_dict(state["scheduler"])
    return state["step"]


if args.everstep:
    import everstep

    ckpt = everstep.CheckpointManager(os.path.join(args.out, "ckpt"), model=model, optimizer=optimizer)
    for step in ckpt.steps(args.steps):
        update(step + 1)
else:
    for step in range(load() + 1, args.steps + 1):
        update(step)
        if args.save and rank == 0 and step % args.save == 0:
            save(step)
dist.destroy_process_group()
