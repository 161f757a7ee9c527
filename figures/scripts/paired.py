"""A training loop on one core (or on a device), in blocks of a few steps.

A block has a checkpoint in its first step, made in one of several modes, or none. Prints one JSON
line per block: its time, and the processor time of everything that belongs to it until the
checkpoint is durable.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import everstep
from figures.scripts.savers import state, tensors

TICK = os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()


def family() -> float:
    """Returns the processor seconds of the launcher of this process and of everything below it."""
    root = os.getpid()
    while "everstep" in Path(f"/proc/{(up := int(_stat(root)[1]))}/comm").read_text():
        root = up
    table: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                table[int(entry.name)] = _stat(int(entry.name))
    mine, grown = {root}, True
    while grown:
        more = {p for p, s in table.items() if int(s[1]) in mine} - mine
        mine |= more
        grown = bool(more)
    return sum(int(x) for p in mine if p in table for x in table[p][11:15]) / TICK


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("--bytes", type=int, default=10**9)
    p.add_argument("--modes", required=True)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument(
        "--device",
        action="store_true",
        help="a step's computing is a wait, as for a device, which leaves the processor idle",
    )
    p.add_argument("--out", required=True)
    return p.parse_args()


def _report(mode: str, took: float, cpu: float, until: float) -> None:
    print(json.dumps({"mode": mode, "seconds": took, "cpu": cpu, "until": until}), flush=True)


def main() -> None:
    a = _arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, optimizer = state(a.bytes)
    parts, out = tensors(module, optimizer), Path(a.out)
    ckpt = everstep.CheckpointManager(
        out / "everstep", model=module, optimizer=optimizer, persist=1, replicas=0, overlap=True
    )
    ckpt.restore()
    x = torch.rand(1024, 1024)
    done = 0

    def compute() -> None:
        if a.device:
            time.sleep(0.25)
            return
        for _ in range(12):
            x.matmul(x)

    def ours(overlap: bool, wait: bool) -> Callable[[], Callable[[], None]]:
        def save() -> Callable[[], None]:
            ckpt._overlap = overlap
            ckpt.step(done + 1)
            if wait:
                ckpt.wait("disk")
            return lambda: ckpt.wait("disk")

        return save

    def asynchronous(**options: object) -> Callable[[], Callable[[], None]]:
        def save() -> Callable[[], None]:
            target = tempfile.mkdtemp(dir=out)
            future = dcp.async_save(parts, checkpoint_id=target, **options)

            def settle() -> None:
                getattr(future, "upload_completion", future).result()
                shutil.rmtree(target)

            return settle

        return save

    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    modes: dict[str, Callable[[], Callable[[], None]]] = {
        "none": lambda: lambda: None,
        "everstep": ours(True, False),
        "persist-pipelined": ours(False, False),
        "synchronous": ours(False, True),
        "dcp-thread": asynchronous(),
        "dcp-stager": asynchronous(async_stager=stager),
        "dcp-process": asynchronous(async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS),
    }
    for round_ in range(-1, a.rounds):
        for mode in a.modes.split(","):
            cpu, began = family(), time.perf_counter()
            for i in range(a.steps):
                compute()
                optimizer.step()
                done += 1
                if i == 0:
                    settle = modes[mode]()
                else:
                    everstep.heartbeat()
            took = time.perf_counter() - began
            settle()
            if round_ >= 0:
                _report(mode, took, family() - cpu, time.perf_counter() - began)
            time.sleep(0.3)
    ckpt._persist = 0
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
