"""Ranks of figure ``reshard``: forked from one process that has imported torch, one layout after
another.

``reshard_ranks.py PAIRS SCRATCH``: PAIRS is JSON ``[[save layout, load layout, seed], …]``. Prints
a line of findings per pair.

Layouts: ``ddp:N``, ``fsdp1:N``, ``fsdp2:N``, ``hsdp:RxS``, ``tp:N``, ``fsdp2+tp:DxT``, ``pp:S``,
``pp+ddp:SxD``, ``plain:1``.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import everstep as es
from everstep.state import local

BLOCKS, STEPS = 2, 2


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Layers by number, so that a pipeline stage has some of them under the same names."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        layers = [nn.Linear(11, width), *(Block(width, hidden) for _ in range(BLOCKS)), nn.Linear(width, 3)]
        self.layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(layers)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Job:
    """One rank of a training run of some layout."""

    def __init__(self, layout: str, width: int, hidden: int, seed: int) -> None:
        kind, _, sizes = layout.partition(":")
        self.kind, self.dims = kind, [int(n) for n in sizes.split("x")]
        torch.manual_seed(seed)
        net = Net(width, hidden)
        self.stage: PipelineStage | None = None
        self.model: nn.Module = getattr(self, f"_{kind.replace('+', '_')}")(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def _plain(self, net: Net) -> nn.Module:
        return net

    def _ddp(self, net: Net) -> nn.Module:
        return nn.parallel.DistributedDataParallel(net)

    def _fsdp1(self, net: Net) -> nn.Module:
        cpu = torch.device("cpu")
        for n in range(1, BLOCKS + 1):
            net.layers[str(n)] = FullyShardedDataParallel(net.layers[str(n)], use_orig_params=True, device_id=cpu)
        return FullyShardedDataParallel(net, use_orig_params=True, device_id=cpu)

    def _sharded(self, net: Net, mesh: Any) -> nn.Module:
        for n in range(1, BLOCKS + 1):
            fully_shard(net.layers[str(n)], mesh=mesh)
        return fully_shard(net, mesh=mesh)

    def _fsdp2(self, net: Net) -> nn.Module:
        return self._sharded(net, init_device_mesh("cpu", (self.dims[0],)))

    def _hsdp(self, net: Net) -> nn.Module:
        return self._sharded(net, init_device_mesh("cpu", tuple(self.dims), mesh_dim_names=("replicate", "shard")))

    def _parallel(self, net: Net, mesh: Any) -> Net:
        for n in range(1, BLOCKS + 1):
            parallelize_module(net.layers[str(n)], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return net

    def _tp(self, net: Net) -> nn.Module:
        return self._parallel(net, init_device_mesh("cpu", (self.dims[0],)))

    def _fsdp2_tp(self, net: Net) -> nn.Module:
        mesh = init_device_mesh("cpu", tuple(self.dims), mesh_dim_names=("dp", "tp"))
        return self._sharded(self._parallel(net, mesh["tp"]), mesh["dp"])

    def _cut(self, net: Net, stages: int, stage: int) -> Net:
        names = list(net.layers)
        for n, name in enumerate(names):
            if n * stages // len(names) != stage:
                del net.layers[name]
        return net

    def _pp(self, net: Net) -> nn.Module:
        rank, stages = dist.get_rank(), self.dims[0]
        self._cut(net, stages, rank)
        self.stage = PipelineStage(net, rank, stages, torch.device("cpu"))
        return net

    def _pp_ddp(self, net: Net) -> nn.Module:
        mesh = init_device_mesh("cpu", tuple(self.dims), mesh_dim_names=("pp", "dp"))
        stage = mesh.get_local_rank("pp")
        whole = nn.parallel.DistributedDataParallel(
            self._cut(net, self.dims[0], stage), process_group=mesh.get_group("dp")
        )
        self.stage = PipelineStage(whole, stage, self.dims[0], torch.device("cpu"), group=mesh.get_group("pp"))
        return whole

    def step(self, n: int) -> float | None:
        """Trains one step on a batch that is the same on all ranks.

        Returns the loss, if it is known.
        """
        g = torch.Generator().manual_seed(n)
        x, y = torch.randn(4, 11, generator=g), torch.randn(4, 3, generator=g)
        self.optimizer.zero_grad()
        loss: float | None
        if self.stage is None:
            out = nn.functional.mse_loss(self.model(x), y)
            out.backward()
            loss = out.item()
        else:
            schedule = ScheduleGPipe(self.stage, 1, loss_fn=nn.functional.mse_loss)
            losses: list[Tensor] = []
            schedule.step(
                *([x] if self.stage.is_first else []), **({"target": y, "losses": losses} if self.stage.is_last else {})
            )
            loss = losses[0].item() if losses else None
        self.optimizer.step()
        return loss

    def parts(self) -> dict[str, Tensor]:
        """Returns this rank's part of everything, in its memory."""
        found = {n: local(p.detach()) for n, p in self.model.named_parameters()}
        for p, values in self.optimizer.state.items():
            # DCP loses the step of a parameter of which this rank has no element.
            if not local(p).numel():
                continue
            name = next(n for n, q in self.model.named_parameters() if q is p)
            found |= {f"{name}/{k}": local(v) for k, v in values.items() if isinstance(v, Tensor)}
        return found


def _memory() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {parts[0].rstrip(":"): int(parts[1]) << 10 for parts in lines if parts[0] in ("VmHWM:", "VmRSS:")}


def _read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def _save(layout: str, width: int, hidden: int, out: Path) -> dict[str, Any]:
    job = Job(layout, width, hidden, 1)
    ckpt = es.CheckpointManager(out / "ours", persist=STEPS, model=job.model, optimizer=job.optimizer)
    assert ckpt.restore() == 0
    for n in range(1, STEPS + 1):
        job.step(n)
        ckpt.step(n)
    ckpt.close()
    model, optimizer = get_state_dict(job.model, job.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(out / "dcp"))
    return {"loss": job.step(STEPS + 1)}


def _load(layout: str, width: int, hidden: int, out: Path) -> dict[str, Any]:
    job = Job(layout, width, hidden, 2)
    ckpt = es.CheckpointManager(out / "ours", model=job.model, optimizer=job.optimizer)
    Path("/proc/self/clear_refs").write_text("5")
    before = _read()
    assert ckpt.restore() == STEPS
    read, memory = _read() - before, _memory()
    found = {n: t.clone() for n, t in job.parts().items()}
    loss = job.step(STEPS + 1)
    wrong, oracle = _differs_from_dcp(job, out, found)
    needed = sum(t.numel() * t.element_size() for t in found.values())
    ckpt.close()
    return {
        "wrong": len(wrong),
        "first": wrong[:1],
        "oracle": oracle,
        "tensors": len(found),
        "needed": needed,
        "read": read,
        "extra": memory["VmHWM"] - memory["VmRSS"],
        "loss": loss,
    }


def _differs_from_dcp(job: Job, out: Path, found: dict[str, Tensor]) -> tuple[list[str], bool]:
    """Returns tensors that differ from those that DCP loads from its own checkpoint after training.

    Also whether DCP could load it.
    """
    try:
        model, optimizer = get_state_dict(job.model, job.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=str(out / "dcp"))
        set_state_dict(job.model, job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    except dcp.api.CheckpointException:
        # If an FSDP1 rank has no element of any parameter, DCP's optimizer state lacks its groups
        # there.
        return [], False
    right = job.parts()
    wrong = [n for n, t in right.items() if n not in found or found[n].dtype != t.dtype or not torch.equal(found[n], t)]
    return wrong + [n for n in found if n not in right], True


def _rank(what: Any, arguments: tuple[Any, ...], rank: int, size: int, port: int, report: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        found = what(*arguments)
        dist.barrier()
    except BaseException:  # noqa: BLE001
        found = {"error": traceback.format_exc()}
    report.write_text(json.dumps(found))
    os._exit("error" in found)


def _together(what: Any, layout: str, scratch: Path, *arguments: Any) -> list[dict[str, Any]]:
    from harness.cluster import free_port

    size, port = math.prod(int(n) for n in layout.partition(":")[2].split("x")), free_port()
    children = []
    for rank in range(size):
        report = scratch / f"report-{rank}"
        child = os.fork()
        if child == 0:
            _rank(what, (layout, *arguments), rank, size, port, report)
        children.append((child, report))
    for child, _ in children:
        os.waitpid(child, 0)
    found = [json.loads(report.read_text()) if report.exists() else {"error": "no report"} for _, report in children]
    for _, report in children:
        report.unlink(missing_ok=True)
    return found


def main() -> None:
    warnings.filterwarnings("ignore")
    pairs, scratch = json.loads(sys.argv[1]), Path(sys.argv[2])
    for number, (save, load, width, hidden) in enumerate(pairs):
        out = scratch / str(number)
        out.mkdir(parents=True)
        saved = _together(_save, save, scratch, width, hidden, out)
        loaded = [] if any("error" in r for r in saved) else _together(_load, load, scratch, width, hidden, out)
        shutil.rmtree(out)
        errors = [r["error"] for r in (*saved, *loaded) if "error" in r]
        print(
            json.dumps(
                {
                    "save": save,
                    "load": load,
                    "width": width,
                    "hidden": hidden,
                    "saved": saved,
                    "loaded": loaded,
                    "errors": errors,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
