"""Saves and restores in an object store, one process after the other.

A line ``save STEP URL`` or ``restore URL`` on standard input forks a process that has already
imported torch. Its pid and then its results go to standard output as lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from typing import Any

import torch
from torch import nn

import everstep as es

#: Elements of the two tensors: several parts of 8 MiB, and a few bytes.
LARGE, SMALL = (int(os.environ.get("LARGE_MB", "20")) << 20) // 4, 7


class State(nn.Module):
    """Two tensors with the number of the step in every element."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.empty(LARGE))
        self.small = nn.Parameter(torch.empty(SMALL))

    @torch.no_grad()
    def fill(self, step: int) -> None:
        self.large.copy_(torch.arange(LARGE, dtype=torch.float32).remainder_(8191).add_(step))
        self.small.fill_(step)

    @torch.no_grad()
    def holds(self, step: int) -> bool:
        expected = State()
        expected.fill(step)
        return all(torch.equal(a, b) for a, b in zip(self.parameters(), expected.parameters(), strict=True))


def _run(command: str, *arguments: str) -> dict[str, Any]:
    state = State()
    if command == "save":
        step, url = int(arguments[0]), arguments[1]
        state.fill(step)
        ckpt = es.CheckpointManager(url, persist=1, keep=2, model=state)
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        ckpt.step(step)
        ckpt.close()
        return {"saved": step, "seconds": time.perf_counter() - began}
    ckpt = es.CheckpointManager(arguments[0], persist=0, model=state)
    began = time.perf_counter()
    step = ckpt.restore()
    return {"step": step, "exact": step == 0 or state.holds(step), "seconds": time.perf_counter() - began}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            try:
                print(json.dumps({"pid": os.getpid()}), flush=True)
                print(json.dumps(_run(*line.split())), flush=True)
            except BaseException as e:  # noqa: BLE001
                print(
                    json.dumps({"error": f"{type(e).__name__}: {e}", "trace": traceback.format_exc()[-1500:]}),
                    flush=True,
                )
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"ended": status}), flush=True)


if __name__ == "__main__":
    main()
