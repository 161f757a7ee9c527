"""The place of this process in the job, as its environment describes it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The place of this worker in the job; outside ``everstep run``, as the environment describes
    it, else that of a single rank."""

    job: str
    generation: int
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    node: str
    is_spare: bool = False


def number(name: str, default: int) -> int:
    """Returns the integer in an environment variable, or ``default`` if it has none."""
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default


def world() -> World:
    """Returns the place of this worker in the world of its generation."""
    return World(
        job=os.environ.get("EVERSTEP_JOB", ""),
        generation=number("EVERSTEP_GENERATION", 0),
        attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
        rank=number("RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_rank=number("EVERSTEP_LOCAL_RANK", number("LOCAL_RANK", 0)),
        node=os.environ.get("EVERSTEP_NODE", ""),
    )
