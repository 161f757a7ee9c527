"""Runs ranks without a launcher, with the environment variables that torch.distributed reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cluster import free_port


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int
    out: str
    err: str


def run_ranks(line: Sequence[str], size: int, timeout: float = 120, cwd: Path | None = None, **env: str) -> list[Ended]:
    """Runs ``line`` as ``size`` ranks until all have ended. None is left when this returns.

    Raises:
        subprocess.TimeoutExpired: if one has not ended after ``timeout`` seconds.
    """
    common = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        **env,
    }
    ranks = [
        subprocess.Popen(
            line,
            cwd=cwd,
            env={**common, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(size)
    ]
    try:
        return [Ended(r.returncode, out, err) for r in ranks for out, err in [r.communicate(timeout=timeout)]]
    finally:
        for r in ranks:
            r.kill()


_BEGIN = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
import everstep as es
out, phase = sys.argv[1:3]
saving = phase == "save"
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
"""
_END = """
dist.barrier()
dist.destroy_process_group()
# fully_shard over gloo aborts in torch's own destructors now and then.
sys.stdout.flush()
os._exit(0)
"""


def run_phase(directory: Path, script: str, phase: str, size: int, *, fails: bool = False) -> str:
    """Runs a script as ``size`` ranks, with the arguments ``directory/out`` and ``phase``. It begins
    with ``out``, ``phase``, ``saving``, a process group, ``rank``, ``size`` and ``mesh``.

    Returns what the ranks wrote to standard error. All of them are expected to fail, or none.
    """
    path = directory / "train.py"
    path.write_text(_BEGIN + script + _END)
    ended = run_ranks([sys.executable, str(path), str(directory / "out"), phase], size)
    errors = "\n".join(r.err for r in ended)
    assert all((r.code != 0) is fails for r in ended), errors[-3000:]
    return errors
