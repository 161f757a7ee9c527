"""Finds the step that a script continues from if it does not report it: from its optimizer, else
from a scheduler.

An optimizer that counts its updates (all of torch's but SGD, LBFGS and Muon do) has the count in
its state, and a script that continues from a checkpoint of its own has loaded that. A scheduler
counts, too, but epochs as often as steps: it is trusted after it has advanced with a few updates,
one by one. Without either, the step is not known.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any

#: Updates with each of which a scheduler must have advanced by one.
_ALONG = 3
#: Updates after which an optimizer's own count must have advanced by the same number.
_AGAIN = 2


def _counts(optimizer: Any) -> Iterator[Any]:
    """Numbers or tensors of one element, one for each parameter or group that counts."""
    for group in optimizer.param_groups:
        yield group.get("step")
        for parameter in group["params"]:
            of = optimizer.state.get(parameter)
            if isinstance(of, Mapping):
                yield of.get("step")


def _updates(optimizer: Any) -> int | None:
    """Returns the number of updates that an optimizer has counted itself; this waits for the device
    once if the counts are there."""
    import torch

    numbers: list[float] = []
    elsewhere = []
    for count in _counts(optimizer):
        if isinstance(count, torch.Tensor):
            count = count.to_local() if hasattr(count, "to_local") else count
            if count.numel() == 1 and count.device.type == "cpu":
                numbers.append(float(count))
            elif count.numel() == 1:
                elsewhere.append(count.detach().reshape(()))
        elif isinstance(count, int | float) and not isinstance(count, bool):
            numbers.append(float(count))
    if elsewhere and elsewhere[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if elsewhere:
        numbers.append(float(torch.stack([c.to(elsewhere[0].device, torch.float64) for c in elsewhere]).max()))
    return int(max(numbers)) if numbers else None


def _schedulers(optimizer: Any) -> list[Any]:
    """Finds the schedulers of this optimizer. It does not refer to them, so all objects are
    searched, once."""
    module = sys.modules.get("torch.optim.lr_scheduler")
    base = getattr(module, "LRScheduler", None)
    if base is None:
        return []

    def inner(of: Any) -> Any:
        return getattr(of, "optimizer", of)

    found = [o for o in gc.get_objects() if issubclass(type(o), base)]
    return [s for s in found if inner(getattr(s, "optimizer", None)) is inner(optimizer)]


#: Updates after which nothing more is learned.
SETTLED = max(_ALONG + 1, _AGAIN)


class Origin:
    """The origin of one optimizer. ``search``: its schedulers may be searched for."""

    def __init__(self, search: bool) -> None:
        self.count = 0
        self._search = search
        #: Number of updates before this process; ``None``: not known, or not yet.
        self.base: int | None = None
        self._along: list[tuple[Any, int]] = []

    def updated(self, optimizer: Any) -> None:
        """Records one more update."""
        self.count += 1
        if self.count > SETTLED:
            return
        # Whatever other optimizers store there, training continues.
        with contextlib.suppress(Exception):
            self._look(optimizer)

    def _look(self, optimizer: Any) -> None:
        if self.count <= _AGAIN:
            updates = _updates(optimizer)
            base = None if updates is None else updates - self.count
            if self.count == 1:
                self.base = base if base is not None and base >= 0 else None
                if self.base is None and self._search:
                    self._along = [
                        (s, s.last_epoch)
                        for s in _schedulers(optimizer)
                        if isinstance(getattr(s, "last_epoch", None), int)
                    ]
            elif self.base is not None and base != self.base:
                self.base = None  # it counts something else
        self._along = [(s, since) for s, since in self._along if s.last_epoch == since + self.count - 1]
        if self._along and self.count == _ALONG + 1:
            # A scheduler that contains others counts all of their steps.
            self.base = max(since for _, since in self._along)
            self._along = []
