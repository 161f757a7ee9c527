"""Batch functions in loops that prefetch: after a restart, the current batch comes first.

This holds whatever else the loop does with batches.
"""

from __future__ import annotations

import copy
import functools
import random
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import everstep as es

STEPS, BEFORE = 8, 5


class Data:
    def __init__(self) -> None:
        self.rows = torch.arange(1000.0)


class Script:
    """A loop that can be ended after any step. Records what it used, by step."""

    def __init__(self, directory: Any, fn: Callable[..., Tensor] | None = None) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.data = Data()
        self.get = es.resumable(fn or (lambda *_, **__: self.data.rows[torch.randint(0, 1000, (4,))].view(4, 1)))
        self.model = nn.Linear(1, 1)
        self.ema = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-9)
        self.ckpt = es.CheckpointManager(
            directory, model=self.model, ema=self.ema, optimizer=self.optimizer, data=self.get, persist=1
        )
        self.used: dict[int, list[float]] = {}

    def update(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def prefetch(
    s: Script,
    last: int,
    *args: Any,
    forward: Callable[..., Any] | None = None,
    between: Callable[[Tensor], Any] | None = None,
) -> None:
    step = s.ckpt.restore()
    batch = s.get(*args)
    while step < last:
        s.used[step] = batch.view(-1).tolist()
        loss = (forward or s.model)(batch).sum()
        old, batch = batch, s.get(*args)
        s.update(loss)
        if between is not None:
            between(old)
        step += 1
        s.ckpt.step(step)


def _evaluated(s: Script) -> None:
    with torch.no_grad():
        for split in ("train", "val"):
            s.model(s.get(split))


def deep(s: Script, last: int) -> None:
    step = s.ckpt.restore()
    ahead = deque([s.get(), s.get()])
    while step < last:
        batch = ahead.popleft()
        s.used[step] = batch.view(-1).tolist()
        loss = s.model(batch).sum()
        ahead.append(s.get())
        s.update(loss)
        step += 1
        s.ckpt.step(step)


def slices(s: Script, last: int) -> None:
    """Each batch is a view of the whole data."""
    rows = s.data.rows.view(-1, 1)

    def window() -> Tensor:
        at = int(torch.randint(0, 996, ()))
        return rows[at : at + 4]

    s.get.fn = window
    deep(s, last)


LOOPS: dict[str, Callable[[Script, int], None]] = {
    "plain": lambda s, last: prefetch(s, last, "train"),
    "an object as argument": lambda s, last: prefetch(s, last, s.data),
    "an array as argument": lambda s, last: prefetch(s, last, np.arange(5000)),
    "recomputed in backward": lambda s, last: prefetch(
        s, last, forward=lambda x: torch.utils.checkpoint.checkpoint(s.model, x, use_reentrant=False)
    ),
    "the old batch evaluated": lambda s, last: prefetch(s, last, between=lambda old: s.model(old.detach())),
    "evaluated before the step ends": lambda s, last: prefetch(s, last, "train", between=lambda _: _evaluated(s)),
    "two models on one batch": lambda s, last: prefetch(s, last, between=lambda old: (s.model(old), s.ema(old))),
    "a part of the batch": lambda s, last: prefetch(s, last, forward=lambda x: s.model(x[:2])),
    "moved by the loop": lambda s, last: prefetch(s, last, forward=lambda x: s.model(x.clone())),
    "validated on data of its own": lambda s, last: prefetch(s, last, between=lambda _: s.model(torch.zeros(4, 1))),
    "validated on data of its own, with arguments that differ": lambda s, last: prefetch(
        s, last, object(), between=lambda _: s.model(torch.zeros(4, 1))
    ),
    "two ahead": deep,
    "slices of one tensor, two ahead": slices,
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_the_batches_in_hand_come_first(tmp_path, loop):
    used = []
    for name, last in (("whole", STEPS), ("ended", BEFORE), ("ended", STEPS)):
        script = Script(tmp_path / name)
        loop(script, last)
        script.ckpt.close()
        used.append(script.used)
    whole, before, after = used
    assert min(after) == BEFORE
    assert {**before, **after} == whole


def test_batches_that_cannot_be_told_apart_are_said(tmp_path):
    s = Script(tmp_path)
    s.ckpt.restore()
    ahead = [s.get(), s.get()]
    with pytest.warns(UserWarning, match="used none of the 2 outstanding batches"):
        s.model(ahead[0] * 1.0)


def test_a_batch_that_is_not_asked_for_again_is_said(tmp_path):
    s = Script(tmp_path)
    prefetch(s, 2, "train")
    s.ckpt.close()
    again = Script(tmp_path)
    step = again.ckpt.restore()
    again.update(again.model(again.get("other")).sum())
    with pytest.warns(UserWarning, match="not called with the arguments of a batch that was outstanding.*train"):
        again.ckpt.step(step + 1)


def test_a_loop_that_fetches_what_it_uses_is_quiet(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for last in (3, 6):
            s = Script(tmp_path)
            step = s.ckpt.restore()
            while step < last:
                s.update(s.model(s.get("train").to(torch.float64).float()).sum())
                step += 1
                s.ckpt.step(step)
            s.ckpt.close()


def _per_sample_gradients(s: Script, x: Tensor) -> Tensor:
    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(s.model, params, (row,)).sum()

    params = {name: p.detach() for name, p in s.model.named_parameters()}
    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    assert all(len(g) == len(x) for g in grads.values())
    return s.model(x)


def test_wrapped_tensors_are_the_batch_that_they_wrap(tmp_path):
    """torch.func passes wrappers to the forward pass, whose memory cannot be asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        used = []
        for name, last in (("whole", STEPS), ("ended", BEFORE), ("ended", STEPS)):
            s = Script(tmp_path / name)
            prefetch(s, last, forward=functools.partial(_per_sample_gradients, s))
            s.ckpt.close()
            used.append(s.used)
    whole, before, after = used
    assert {**before, **after} == whole


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_pass_through(tmp_path):
    s = Script(tmp_path, lambda: torch.nested.nested_tensor([torch.ones(2, 1), torch.ones(3, 1)]))
    s.ckpt.restore()
    s.update(s.model(s.get()).values().sum())
    s.ckpt.step(1)


@pytest.mark.parametrize(
    "argument",
    [
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
    ],
    ids=["bfloat16", "conjugated", "sparse"],
)
def test_arguments_that_numpy_does_not_have(tmp_path, argument):
    used = []
    for name, last in (("whole", STEPS), ("ended", BEFORE), ("ended", STEPS)):
        script = Script(tmp_path / name)
        prefetch(script, last, argument)
        script.ckpt.close()
        used.append(script.used)
    whole, before, after = used
    assert {**before, **after} == whole
