"""A run that fails as told by a file.

``OUT/fail-NODE-LOCALRANK`` names a failure, which happens once. Its time is written to
``OUT/failed-NODE-LOCALRANK``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import everstep

ERRORS: dict[str, Exception] = {
    "script-error": ValueError("expected 32 samples, not 31"),
    "cuda-out-of-memory": RuntimeError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"
    ),
    "gpu-memory": RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    "cuda-illegal-access": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "disk-full": OSError(28, "No space left on device", "out/step-40"),
    "numerics": FloatingPointError("loss is nan at this step"),
    "nvlink": RuntimeError("CUDA error: uncorrectable NVLink error detected during the execution"),
    "data-damaged": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
}

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--steps", type=int, default=1_000_000)
p.add_argument("--pause", type=float, default=0.05)
args = p.parse_args()
out = Path(args.out)

dist.init_process_group("gloo")
rank = dist.get_rank()
# By node, not by rank, because ranks move when a node is excluded.
name = f"{os.environ['EVERSTEP_NODE']}-{os.environ['LOCAL_RANK']}"
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ckpt = everstep.CheckpointManager(out / "ckpt", model=model, optimizer=optimizer, persist=25, replicated=True)
ddp = DistributedDataParallel(model)
trigger = out / f"fail-{name}"
for _ in ckpt.steps(args.steps):
    # It exists and is not empty.
    if trigger.exists() and (kind := trigger.read_text()):
        trigger.unlink()
        (out / f"failed-{name}").write_text(f"{time.time()}")
        if kind in ERRORS:
            raise ERRORS[kind]
        if kind == "exit":
            sys.exit(3)
        if kind == "gil":
            re.match(r"(a+)+$", "a" * 64 + "b")
        if kind == "c":
            # A read from a pipe without a writer, which continues after a signal.
            ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
        while kind == "line":
            pass
    loss = ddp(torch.ones(8, 64)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(args.pause)
with contextlib.suppress(Exception):
    dist.destroy_process_group()
