"""everstep keeps large PyTorch training runs stepping.

Under ``everstep run`` these calls talk to the node's agent; everywhere else they are cheap no-ops,
except :class:`CheckpointManager`, which then writes to disk. torch is imported when first needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._internal import AgentError, CheckpointError, EverstepError, __version__
from .batch_shares import BatchPlan, batch_plan
from .worker import heartbeat, record, report_error, section, should_stop
from .world import World, world

if TYPE_CHECKING:
    from . import data, dcp
    from .batches import resumable
    from .checkpoint import CheckpointManager
    from .outcome import Outcome

__all__ = [
    "AgentError",
    "BatchPlan",
    "CheckpointError",
    "CheckpointManager",
    "EverstepError",
    "Outcome",
    "World",
    "__version__",
    "batch_plan",
    "data",
    "dcp",
    "heartbeat",
    "record",
    "report_error",
    "resumable",
    "section",
    "should_stop",
    "world",
]


def __getattr__(name: str) -> Any:
    if name in ("CheckpointManager", "Outcome"):
        from . import checkpoint

        return getattr(checkpoint, name)
    if name in ("data", "dcp"):
        import importlib

        return importlib.import_module(f".{name}", __name__)
    if name == "resumable":
        from .batches import resumable

        return resumable
    raise AttributeError(f"module 'everstep' has no attribute {name!r}")
