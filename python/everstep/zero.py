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


class _Watcher:
    """Counts updates. With several optimizers a step is an update of the one that has had the most."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.step = 0
        self.watched = False

    def after(self, optimizer: Any, *_: Any) -> None:
        worker = _worker.current()
        if worker.board is None:
            return
        count = self.counts.get(id(optimizer), 0) + 1
        self.counts[id(optimizer)] = count
        if count > self.step:
            self.step = count
            worker.seen(count)
        if not self.watched:
            self.watched = True
            if worker.board.get("Role") == 0:
                # Names are not known here. Sharding changes shapes, but not how many parameters there are.
                worker.board.set("Role", sum(len(g["params"]) for g in optimizer.param_groups))
            _worker.watch_gradients(optimizer)


def install(*, warm_safe: bool, changed: Mapping[str, str | None] | None = None) -> None:
    """Starts to watch. ``warm_safe``: a process that imports torch ahead can become this one. ``changed``: variables that torch reads when it
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
