"""The place of this process in the job, as its environment or its process group describes it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The place of this worker in the job; outside ``everstep run``, as the environment describes
    it, else its place in torch's process group, else that of a single rank."""

    job: str
    generation: int
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    node: str


def number(name: str, default: int) -> int:
    """Returns the integer in an environment variable, or ``default`` if it has none."""
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default


def place_in_group() -> tuple[int, int]:
    """Returns the rank and the number of ranks in torch's process group; ``(0, 1)`` if there is
    none. Ranks that were spawned, or started by mpirun, have no variables that say so."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def world() -> World:
    """Returns the place of this worker in the world of its generation."""
    rank, world_size = (0, 1) if "RANK" in os.environ else place_in_group()
    return World(
        job=os.environ.get("EVERSTEP_JOB", ""),
        generation=number("EVERSTEP_GENERATION", 0),
        attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
        rank=number("RANK", rank),
        world_size=number("WORLD_SIZE", world_size),
        local_rank=number("EVERSTEP_LOCAL_RANK", number("LOCAL_RANK", 0)),
        node=os.environ.get("EVERSTEP_NODE", ""),
    )
