"""The zero-line tier: steps of scripts that never import everstep, seen through torch's optimizer hooks.

Installed by what the launcher puts on the path, when ``torch.optim`` is imported. Every
``optimizer.step()`` of any optimizer is seen (``torch.optim.optimizer.register_optimizer_step_post_hook``).
A script that tells its steps itself (:class:`everstep.CheckpointManager`, ``heartbeat(step)``) is
believed instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from . import imports
from . import worker as _worker
from .origin import SETTLED, Origin

#: Optimizers whose schedulers are looked for; there are scripts with one optimizer for each parameter.
_SEARCHES = 3


class _Watcher:
    """Counts updates. With several optimizers a step is an update of the one that has had the most."""

    def __init__(self) -> None:
        self.origins: dict[int, Origin] = {}
        self.watched = False

    def _base(self, most: int) -> int | None:
        """Updates before this process, of those optimizers that make one at each step; ``None``: not known."""
        # The others may be one step behind, in the middle of a step.
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
            worker.goes_on_from(self._base(most))
        if most > worker.updates:
            worker.updates = most
            worker.seen((worker.origin or 0) + most)
        if not self.watched:
            self.watched = True
            if worker.board.get("Role") == 0:
                # Names are not known here. Sharding changes shapes, but not how many parameters there are.
                worker.board.set("Role", sum(len(g["params"]) for g in optimizer.param_groups))
            _worker.watch_gradients(optimizer)


def install(*, warm_safe: bool, changed: Mapping[str, str | None] | None = None) -> None:
    """Starts to watch. ``warm_safe``: a process that imports torch ahead can become this one. ``changed``:
    variables that torch reads when it
    is imported and that the script had changed by then; ``None`` as a value: it had removed them."""
    worker = _worker.current()
    if worker.board is None:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if not warm_safe or not imports.note_changed(os.environ.get("EVERSTEP_BOARD", ""), changed or {}):
        worker.board.set("WarmUnsafe", 1)
    worker.board.set("ZeroLine", 1)
    watcher = _Watcher()
    register_optimizer_step_post_hook(watcher.after)
