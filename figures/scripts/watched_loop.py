"""Steps with everything that is watched: a batch from a data loader, a section, an update.

Measures what watching costs the training thread.
"""

import contextlib
import os
import sys
import time

import torch
from torch.utils.data import DataLoader

steps = int(sys.argv[1])
if "--plain" in sys.argv:
    section = contextlib.nullcontext
else:
    from everstep import section
parameter = torch.zeros(1, requires_grad=True)
parameter.grad = torch.zeros(1)
optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=False)
batches = iter(DataLoader(range(1_000_000_000), batch_size=None, sampler=range(1_000_000_000)))


def run(count: int) -> float:
    began = time.perf_counter_ns()
    for _ in range(count):
        next(batches)
        with section("eval"):
            pass
        optimizer.step()
    return (time.perf_counter_ns() - began) / count / 1000


run(300)
tenths = sorted(run(steps // 10) for _ in range(10))
os.write(1, f"us {tenths[5]:.3f}\n".encode())
