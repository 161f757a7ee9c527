"""Only optimizer steps, to measure what watching them costs the training thread."""

import os
import sys
import time

import torch

steps = int(sys.argv[1])
parameter = torch.zeros(1, requires_grad=True)
parameter.grad = torch.zeros(1)
optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=False)
for _ in range(300):
    optimizer.step()
if "--mark" in sys.argv:
    os.write(1, f"pid {os.getpid()}\n".encode())
    time.sleep(float(sys.argv[3]))
best = []
for _ in range(10):
    began = time.perf_counter_ns()
    for _ in range(steps // 10):
        optimizer.step()
    best.append((time.perf_counter_ns() - began) / (steps // 10) / 1000)
os.write(1, f"us {sorted(best)[len(best) // 2]:.3f}\n".encode())
