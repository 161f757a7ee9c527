"""The zero-line tier: steps of scripts that never import everstep, observed through torch's
optimizer hooks.

The launcher's ``sitecustomize`` installs it when ``torch.optim`` is imported. It observes every
``optimizer.step()`` of any optimizer (``torch.optim.optimizer.register_optimizer_step_post_hook``).
If a script reports its steps itself (:class:`everstep.CheckpointManager`, ``heartbeat(step)``),
those are used instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from . import imports
from . import worker as _worker
from .origin import SETTLED, Origin

#: Limit on the optimizers whose schedulers are searched for: some scripts have one optimizer for
#: each parameter.
_SEARCHES = 3


class _Watcher:
    """Counts updates. With several optimizers, the one with the most updates counts the steps."""

    def __init__(self) -> None:
        self.origins: dict[int, Origin] = {}
        self.watched = False

    def _base(self, most: int) -> int | None:
        """Returns the number of updates before this process of the optimizers that update at each
        step; ``None``: not known."""
        # In the middle of a step, the others may be one update behind.
        bases = [o.base for o in self.origins.values() if o.count >= most - 1]
        return max((b for b in bases if b is not None), default=None)

    def after(self, optimizer: Any, *_: Any) -> None:
        worker = _worker.current()
        if worker.board is None:
            return
        origin = self.origins.get(id(optimizer))
        if origin is None:
            origin = self.origins[id(optimizer)] = Origin(search=len(self.origins) < _SEARCHES)
        origin.updated(optimizer)
        most = max(worker.updates, origin.count)
        if origin.count <= SETTLED + 1:
            worker.continue_from(self._base(most))
        if most > worker.updates:
            worker.updates = most
            worker.observed((worker.origin or 0) + most)
        if not self.watched:
            self.watched = True
            if worker.board.role == 0:
                # Names are not known here. Sharding changes shapes, but not the number of
                # parameters.
                worker.board.role = sum(len(g["params"]) for g in optimizer.param_groups)
            _worker.watch_gradients(optimizer)


def install(*, warm_safe: bool, changed: Mapping[str, str | None] | None = None) -> None:
    """Installs the hook.

    Args:
        warm_safe: a process that imports torch ahead can become this one.
        changed: variables that torch reads when it is imported and that the script had changed by
            then; a value of ``None``: removed.
    """
    worker = _worker.current()
    if worker.board is None:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if not warm_safe or not imports.note_changed(os.environ.get("EVERSTEP_BOARD", ""), changed or {}):
        worker.board.forbid_warm_start()
    worker.board.zero_line = True
    watcher = _Watcher()
    register_optimizer_step_post_hook(watcher.after)
