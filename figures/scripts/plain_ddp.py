"""An ordinary DDP script, independent of its launcher.

Model, optimizer, loop, and a checkpoint per step if requested.
"""

import argparse
import itertools
import os
import time

FIRST_LINE = time.time()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

IMPORTED = time.time()


def started() -> float:
    """Returns when this process began, in seconds since 1970."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        ticks = int(stat.read().rsplit(") ", 1)[1].split()[19])
        return time.time() - float(uptime.read().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")


p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=300)
p.add_argument("--until", help="go on after the last of --steps until this file exists")
p.add_argument("--pause", type=float, default=0.02)
p.add_argument("--slow-rank", type=int, default=-1)
p.add_argument("--slow-from", type=int, default=60)
p.add_argument("--out")
p.add_argument("--save", action="store_true")
args = p.parse_args()

if int(os.environ["WORLD_SIZE"]) > 1:
    dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
if dist.is_initialized():
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
first = 0
path = os.path.join(args.out, f"ckpt-{rank}.pt") if args.out else ""
if args.save and os.path.exists(path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
if dist.is_initialized():
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, first)
    first = min(steps)
log = open(os.path.join(args.out, f"log-{rank}"), "a", buffering=1) if args.out else None  # noqa: SIM115
if log:
    log.write(f"start {started():.3f} {FIRST_LINE:.3f} {IMPORTED:.3f} {os.getpid()}\n")


def ends_at(step: int) -> bool:
    """Returns whether the training ends before this step; every rank gets the same answer."""
    if step < args.steps or not args.until:
        return step >= args.steps
    ends = [os.path.exists(args.until)]
    if dist.is_initialized():
        dist.broadcast_object_list(ends)
    return ends[0]


for step in itertools.takewhile(lambda step: not ends_at(step), itertools.count(first)):
    if rank == args.slow_rank and step >= args.slow_from:
        time.sleep(0.1)
    loss = model(torch.randn(8, 64)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if args.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, path + ".new")
        os.replace(path + ".new", path)
    if log:
        log.write(f"step {step + 1} {time.time():.3f}\n")
    time.sleep(args.pause)
if dist.is_initialized():
    dist.destroy_process_group()
