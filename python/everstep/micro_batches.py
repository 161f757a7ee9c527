"""Micro-batches of a step: an exact global batch on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .batch_shares import BatchPlan, batch_plan


class MicroBatches:
    """The loader in use and what it was planned for; one per manager."""

    def __init__(self, objects: dict[str, Any]) -> None:
        modules = [o for o in objects.values() if isinstance(o, nn.Module)]
        self._parameters = [p for m in modules for p in m.parameters()]
        self._wrapped = [m for m in (_ddp(module) for module in modules) if m is not None]
        self._loader: Any = None
        self._batches: Iterator[Any] | None = None
        self.plan: BatchPlan | None = None

    def of_step(self, loader: Iterable[Any], plan: BatchPlan) -> Iterator[Any]:
        """Yields this rank's micro-batches of the next step. After the last one, the gradients are
        those of the mean over the global batch."""
        self._open(loader, plan)
        for i in range(plan.micro_steps):
            # Gradients are reduced once per step, so that ranks may have different numbers of
            # micro-batches.
            for module in self._wrapped:
                module.require_backward_grad_sync = i + 1 == plan.micro_steps
            yield self._next(loader)
        self._weigh(plan)
        sampler: Any = getattr(loader, "sampler", None)
        if hasattr(sampler, "advance"):
            sampler.advance(plan.global_batch_size)

    def _open(self, loader: Iterable[Any], plan: BatchPlan) -> None:
        if self._loader is loader and self.plan == plan:
            return
        world = (
            torch.distributed.get_world_size()
            if torch.distributed.is_available() and torch.distributed.is_initialized()
            else 1
        )
        if world > 1 and not plan.equal and not self._wrapped:
            raise TypeError(
                "ranks have different numbers of micro-batches: pass the DDP module itself to CheckpointManager (model=ddp_model), "
                "so that gradients are exchanged once per step"
            )
        batch_size = getattr(loader, "batch_size", None)
        if batch_size not in (None, plan.micro_batch_size):
            raise ValueError(
                f"the loader makes batches of {batch_size}, the micro-batch is {plan.micro_batch_size}: give them the same size"
            )
        sampler: Any = getattr(loader, "sampler", None)
        if hasattr(sampler, "follow"):
            sampler.follow(plan)
        self._loader, self.plan = loader, plan
        self._batches = _begin(loader)

    def _next(self, loader: Iterable[Any]) -> Any:
        assert self._batches is not None
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = _begin(loader)
            return next(self._batches)

    def _weigh(self, plan: BatchPlan) -> None:
        """Sums of micro-batch means become the mean over the global batch."""
        if plan.loss_scale == 1.0:
            return
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if gradients:
            with torch.no_grad():
                torch._foreach_mul_(gradients, plan.loss_scale)


def _begin(loader: Iterable[Any]) -> Iterator[Any]:
    """Begins a loop over the loader. A DataLoader draws a seed when a loop begins: a restart in the
    middle of an epoch would draw once more than an undisturbed run, and random numbers (dropout)
    would differ from then on."""
    with torch.random.fork_rng(devices=[]):
        return iter(loader)


def _ddp(module: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Returns the DDP wrapper of a module, also inside that of torch.compile."""
    inner: Any = module
    while inner is not None:
        if isinstance(inner, nn.parallel.DistributedDataParallel):
            return inner
        inner = getattr(inner, "_orig_mod", None)
    return None


__all__ = ["MicroBatches", "batch_plan"]
