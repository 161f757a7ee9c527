"""One process that saves the same state in several ways, alternating. Prints one JSON line per
save.

A few hundred tensors: bf16 parameters, and three fp32 tensors of optimizer state for each. Measures
how long a training loop waits if the weight update follows at once, with nothing to hide behind.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import everstep

TENSORS = 80


def state(size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a module and its optimizer, ``size`` bytes in all."""
    per = size // TENSORS // (2 + 3 * 4) // 64 * 64
    module = nn.ParameterList([torch.rand(per).to(torch.bfloat16) for _ in range(TENSORS)])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for p in module.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(1.0),
            **{k: torch.rand(per) for k in ("master", "exp_avg", "exp_avg_sq")},
        }
    return module, optimizer


def tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns all tensors by name, as a plain state dict."""
    found = {f"model.{k}": v for k, v in module.state_dict().items()}
    for i, s in enumerate(optimizer.state.values()):
        found.update({f"optimizer.{i}.{k}": v for k, v in s.items()})
    return found


class Memcpy:
    """The lower limit: copies the same bytes into warm shared memory, with two threads and nothing
    else."""

    def __init__(self, parts: dict[str, torch.Tensor]) -> None:
        self.size = sum(t.numel() * t.element_size() for t in parts.values())
        path = Path("/dev/shm") / f"memcpy-{os.getpid()}"
        with path.open("w+b") as f:
            f.truncate(self.size)
            self.map = mmap.mmap(f.fileno(), self.size)
        path.unlink()
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.pieces: list[list[tuple[int, int, int]]] = [[], []]
        offset = 0
        for t in parts.values():
            n = t.numel() * t.element_size()
            self.pieces[0 if offset < self.size // 2 else 1].append((self.at + offset, t.data_ptr(), n))
            offset += n
        self()

    def __call__(self) -> None:
        def run(pieces: list[tuple[int, int, int]]) -> None:
            for to, source, n in pieces:
                ctypes.memmove(to, source, n)

        other = threading.Thread(target=run, args=(self.pieces[1],))
        other.start()
        run(self.pieces[0])
        other.join()


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--bytes", type=int, required=True)
    p.add_argument("--modes", required=True)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--out", required=True)
    a = p.parse_args()
    dist.init_process_group("gloo")
    module, optimizer = state(a.bytes)
    parts = tensors(module, optimizer)
    size = sum(t.numel() * t.element_size() for t in parts.values())
    memcpy = Memcpy(parts)
    out = Path(a.out)
    ckpt = everstep.CheckpointManager(out / "everstep", model=module, optimizer=optimizer, persist=0, replicas=0)
    ckpt.restore()
    steps = 0

    def ours() -> None:
        nonlocal steps
        steps += 1
        ckpt.step(steps)
        optimizer.step()  # no gradients: only the fence

    def asynchronous(kind: str) -> Callable[[], Callable[[], None]]:
        options = (
            {"async_checkpointer_type": dcp.state_dict_saver.AsyncCheckpointerType.PROCESS} if kind == "process" else {}
        )

        def save() -> Callable[[], None]:
            target = tempfile.mkdtemp(dir=out)
            future = dcp.async_save(parts, checkpoint_id=target, **options)

            def settle() -> None:
                future.result()
                shutil.rmtree(target)

            return settle

        return save

    def torch_save() -> Callable[[], None]:
        path = out / "torch.pt"
        with path.open("wb") as f:
            torch.save(parts, f)
            f.flush()
            os.fsync(f.fileno())
        return path.unlink

    modes: dict[str, Callable[[], Callable[[], None] | None]] = {
        "memcpy": memcpy,
        "everstep": ours,
        "dcp-default": asynchronous("thread"),
        "dcp-process": asynchronous("process"),
        "torch-save": torch_save,
    }
    wanted = a.modes.split(",")
    for round_ in range(-1, a.rounds):
        for mode in wanted:
            began = time.perf_counter()
            settle = modes[mode]()
            took = time.perf_counter() - began
            if settle is not None:
                settle()
            if round_ >= 0:
                print(json.dumps({"mode": mode, "seconds": took, "bytes": size}), flush=True)
            time.sleep(0.2)
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
