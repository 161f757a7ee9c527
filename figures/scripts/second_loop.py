"""A job that another user attacks.

It logs each step with its loss and duration, and has secrets in its state and its environment.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import everstep

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True, help="`die-RANK` and `last` (a step) are orders")
parser.add_argument("--checkpoints", default="checkpoints")
parser.add_argument("--work", type=int, default=2, help="multiplications of a step")
parser.add_argument("--core", type=int, help="the only one that this process may use")
given = parser.parse_args()
if given.core is not None:
    os.sched_setaffinity(0, {given.core})
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
if int(os.environ["WORLD_SIZE"]) > 1:
    dist.init_process_group("gloo")
torch.manual_seed(3)
model = torch.nn.Linear(256, 256)
secret = os.environ.get("SECRET", "none").encode()
model.register_buffer("secret", torch.tensor(list(secret * 64), dtype=torch.uint8))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
print(f"the secret is {secret.decode()}", flush=True)
manager = everstep.CheckpointManager(given.checkpoints, model=model, optimizer=optimizer, persist=20)
log = os.open(given.out / f"steps-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
began = time.perf_counter()
for step in manager.steps(10_000_000):
    x = torch.randn(256, 256)
    for _ in range(given.work):
        x = torch.tanh(model(x))
    loss = x.square().mean()
    optimizer.zero_grad()
    loss.backward()
    if dist.is_initialized():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    now = time.perf_counter()
    os.write(log, f"{step} {loss.item().hex()} {os.getpid()} {time.time():.6f} {now - began:.6f}\n".encode())
    began = now
    ask = given.out / f"die-{rank}"
    if ask.exists():
        ask.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    last = given.out / "last"
    if last.exists() and step >= int(last.read_text() or 10_000_000):
        break
manager.close()
