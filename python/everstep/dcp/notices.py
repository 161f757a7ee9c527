"""What ranks tell each other beside DCP's collectives, through torch's store: the thread of the
previous save may be in the middle of one, and what fails on one rank must reach those that wait."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from .._internal import CheckpointError

#: Limit on the characters of an error that other ranks report.
ERROR_MAX = 1000
#: Seconds between the first two looks for a notice, and between later ones at most.
LOOK, LOOK_MAX = 0.01, 0.2
_PREFIX = "everstep/dcp/"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def put(key: str, text: str) -> None:
    """Sets a notice. When this returns, every rank finds it."""
    store = _store()
    store.set(_PREFIX + key, text)
    # The store does not confirm what is set, but answers this after it.
    store.check([_PREFIX + key])


def get(key: str) -> str:
    """Waits for a notice that its rank is about to set."""
    text: str = _store().get(_PREFIX + key).decode()
    return text


def find(key: str) -> str | None:
    """Returns a notice; ``None`` if nobody has set it."""
    return get(key) if _store().check([_PREFIX + key]) else None


def wait(key: str, seconds: float) -> str | None:
    """Waits for a notice, which may take long: the store serves other threads meanwhile."""
    until, pause = time.monotonic() + seconds, LOOK
    while (text := find(key)) is None and time.monotonic() < until:
        time.sleep(pause)
        pause = longer(pause)
    return text


def longer(pause: float) -> float:
    """Returns the pause after this one: what takes long is looked for less often."""
    return min(1.5 * pause, LOOK_MAX)


def of_all(key: str) -> list[str]:
    """Returns the notices ``key/RANK`` of all ranks, which are about to set them."""
    return [get(f"{key}/{rank}") for rank in range(dist.get_world_size())]


def in_one_line(error: Exception) -> str:
    """Returns an error in one line."""
    text = " ".join(str(error).split())[:ERROR_MAX]
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"
