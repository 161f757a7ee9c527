"""Runs ranks without a launcher, with the environment variables that torch.distributed reads."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cluster import free_port
from harness.warm_python import Start, WarmPython, run_cold


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int
    out: str
    err: str


def run_ranks(
    line: Sequence[str], size: int, timeout: float = 120, cwd: Path | None = None, *, warm: bool = True, **env: str
) -> list[Ended]:
    """Runs a script with its arguments as ``size`` ranks until all have ended. None is left when
    this returns. ``warm`` ones are forked from a process that has imported torch.

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
    envs = [{**common, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(size)]
    with tempfile.TemporaryDirectory() as scratch:
        streams = [(f"{scratch}/{r}.out", f"{scratch}/{r}.err") for r in range(size)]
        starts = [Start(line, e, str(cwd or Path.cwd()), *s) for e, s in zip(envs, streams, strict=True)]
        codes = _warm_python().run(starts, timeout) if warm else run_cold(starts, timeout)
        return [Ended(code, *(Path(s).read_text() for s in pair)) for code, pair in zip(codes, streams, strict=True)]


@functools.cache
def _warm_python() -> WarmPython:
    return WarmPython()


def spent() -> float:
    """Returns the processor time of all ranks, in seconds, and of what they are forked from."""
    return _warm_python().spent if _warm_python.cache_info().currsize else 0.0


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
    """Runs a script as ``size`` ranks, with the arguments ``directory/out`` and ``phase``. It
    begins with ``out``, ``phase``, ``saving``, a process group, ``rank``, ``size`` and ``mesh``.

    Returns what the ranks wrote to standard error. All of them are expected to fail, or none.
    """
    path = directory / "train.py"
    path.write_text(_BEGIN + script + _END)
    ended = run_ranks([str(path), str(directory / "out"), phase], size)
    errors = "\n".join(r.err for r in ended)
    assert all((r.code != 0) is fails for r in ended), errors[-3000:]
    return errors
