"""What users of torch.distributed.checkpoint do, through everstep or DCP's own storage, on two
ranks.

* ``patterns``: save, async_save, nested state, DCP's state-dict helpers, several shardings, other
  ranks' views; one JSON line each
* ``die``: the process is killed right after async_save has returned
* ``mix``: a second async_save while the first one uploads
* ``load``: prints the values, which show whether the directory contains one step, and which
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import everstep

TENSORS = 32


def _writer(path: Path, peer: bool) -> Any:
    return dcp.FileSystemWriter(str(path)) if peer else everstep.dcp.Writer(path)


def _reader(path: Path, peer: bool) -> Any:
    return dcp.FileSystemReader(str(path)) if peer else everstep.dcp.Reader(path)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(itertools.starmap(_equal, zip(a, b, strict=True)))
    if isinstance(a, DTensor):
        return bool(torch.equal(a.full_tensor(), b.full_tensor()))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and bool(torch.equal(a, b))
    return bool(a == b)


def _blank(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _blank(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_blank(v) for v in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)() if value is not None else None


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 16) * (dist.get_rank() + 1)).square().mean().backward()
    optimizer.step()


def _trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model: nn.Module = nn.Sequential(nn.Linear(16, 33), nn.LayerNorm(33), nn.Linear(33, 2))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        _step(model, optimizer)
    return model, optimizer


def _states() -> dict[str, Any]:
    mesh, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    whole = torch.randn(19, 6, generator=torch.Generator().manual_seed(1))
    states: dict[str, Any] = {
        f"dtensor-{n}": {"w": distribute_tensor(whole.to(dtype), m, p)}
        for n, (m, p, dtype) in enumerate(
            [
                (mesh, (Shard(0),), torch.float32),
                (mesh, (Shard(1),), torch.bfloat16),
                (mesh, (Replicate(),), torch.float64),
                (square, (Shard(0), Shard(1)), torch.float32),
                (square, (Shard(0), Shard(0)), torch.float32),
                (square, (Replicate(), Shard(0)), torch.int64),
            ]
        )
    }
    states["nested"] = {
        "a": [torch.arange(5), {"b": torch.ones(2, 2, dtype=torch.bool)}],
        "n": 17,
        "s": "x",
        "f": 0.5,
        "none": None,
    }
    states["odd"] = {
        "complex": torch.arange(6.0).to(torch.complex128),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "view": torch.arange(12.0).reshape(3, 4).t(),
    }
    for kind in ("ddp", "fsdp2"):
        model, optimizer = _trained(kind)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        states[f"helpers-{kind}"] = {"model": model_state, "optimizer": optimizer_state}
    return states


def _patterns(out: Path, peer: bool) -> None:
    for name, state in _states().items():
        for how in ("save", "async"):
            path = out / f"{name}-{how}"
            if how == "save":
                dcp.save(state, storage_writer=_writer(path, peer))
            else:
                dcp.async_save(state, storage_writer=_writer(path, peer)).result()
            dist.barrier()
            back = _blank(state)
            dcp.load(back, storage_reader=_reader(path, peer))
            _say(f"{name}-{how}", _equal(state, back))
    # Training continues as if nothing had happened.
    for kind in ("ddp", "fsdp2"):
        model, optimizer = _trained(kind)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"m": model_state, "o": optimizer_state}, storage_writer=_writer(out / f"resume-{kind}", peer))
        dist.barrier()
        _step(model, optimizer)
        expected = get_state_dict(model, optimizer)[0]
        other, other_optimizer = _trained(kind)
        _step(other, other_optimizer)
        model_state, optimizer_state = get_state_dict(other, other_optimizer)
        into = {"m": model_state, "o": optimizer_state}
        dcp.load(into, storage_reader=_reader(out / f"resume-{kind}", peer))
        set_state_dict(other, other_optimizer, model_state_dict=into["m"], optim_state_dict=into["o"])
        _step(other, other_optimizer)
        _say(f"resume-{kind}", _equal(expected, get_state_dict(other, other_optimizer)[0]))


def _say(pattern: str, good: bool) -> None:
    everywhere = torch.tensor(int(good))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        print(json.dumps({"pattern": pattern, "good": bool(everywhere.item())}), flush=True)


def _tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((500_000,), value) for i in range(TENSORS)}


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("what", choices=["patterns", "die", "mix", "load"])
    p.add_argument("out", type=Path)
    p.add_argument("--peer", action="store_true")
    a = p.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    if a.what == "patterns":
        _patterns(a.out, a.peer)
    elif a.what == "die":
        state = _tensors(1)
        dcp.async_save(state, storage_writer=_writer(a.out, a.peer))
        for t in state.values():
            t.fill_(-1)
        # Wait until it has returned on both. A barrier would meet the collectives of DCP's thread.
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.get("returned")
        else:
            store.set("returned", "")
        os.kill(os.getpid(), signal.SIGKILL)
    elif a.what == "mix":
        state = _tensors(1)
        # As DCP's documentation recommends: staging memory is allocated once.
        options: dict[str, Any] = {}
        if a.peer:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            options["async_stager"] = DefaultStager(StagingOptions(False, False, False, False))
        writer = None if a.peer else everstep.dcp.Writer(a.out)
        futures = []
        for step in (1, 2):
            for t in state.values():
                t.fill_(step)
            future = dcp.async_save(state, storage_writer=writer or _writer(a.out / f"step-{step}", True), **options)
            futures.append(getattr(future, "upload_completion", future))
        for t in state.values():
            t.fill_(-1)
        for future in futures:
            future.result()
    else:
        state = _tensors(0)
        dcp.load(state, storage_reader=_reader(a.out, a.peer))
        values = [sorted({*t.tolist()}) for t in state.values()]
        if dist.get_rank() == 0:
            print(json.dumps({"values": values}), flush=True)
    dist.destroy_process_group()
    # DTensor over gloo aborts in torch's own destructors now and then, even with DCP's own writer.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
