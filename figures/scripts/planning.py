"""The two sides of figure ``planning-cost``. Prints processor seconds.

``planning.py save|load|dcp DIRECTORY RANKS TENSORS NEW_RANKS``. Every tensor is cut into rows like
with FSDP2. One rank's own work is done with real DTensors in a process group without peers (torch's
"fake" backend); the other ranks' shards are written from the same process.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep._internal import Arena, Mark, Retention, SlotLayout, Source, publish, reserve_slot
from everstep.slots import Snapshot
from everstep.state import Item, Layout, State
from everstep.tensor_places import PARTS

#: Rows of every tensor, divisible among both 256 and 192 ranks.
ROWS = 768
MARK = Mark("0" * 32, 1, 0, 0)


def model(ranks: int, tensors: int, rank: int) -> nn.Module:
    """Returns a module of sharded parameters as this rank has them."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    module = nn.Module()
    for n in range(tensors):
        part = DTensor.from_local(torch.zeros(ROWS // ranks, 4), mesh, [Shard(0)], run_check=False)
        module.register_parameter(f"layer_{n}_weight", nn.Parameter(part))
    return module


def save(directory: Path, ranks: int, tensors: int) -> dict[str, float]:
    """Writes all ranks' shards. Returns the cost for the first one, and for publishing."""
    module = model(ranks, tensors, 0)
    state = State({"model": module}, Layout(0, ranks, False))
    slot = str(directory / "slot")
    began = time.process_time()
    snapshot = Snapshot(1, state.collect({}), 1)
    reserve_slot(slot, snapshot.slot_bytes())
    shards = [_write(directory, slot, snapshot, 0, ranks)]
    own = time.process_time() - began
    rows = ROWS // ranks
    for rank in range(1, ranks):
        table = array("Q", [word for n in range(tensors) for word in (n, 0, 2, ROWS, 4, rank * rows, 0)])
        blob = torch.frombuffer(bytearray(table.tobytes()), dtype=torch.uint8)
        items = [Item(PARTS, blob, True) if i.name == PARTS else i for i in snapshot.items]
        shards.append(_write(directory, slot, Snapshot(1, items, 1), rank, ranks))
    began = time.process_time()
    publish(str(directory), MARK, 1, shards, Retention(2, 0, True), True)
    return {"rank": own, "publish": time.process_time() - began}


def _write(directory: Path, slot: str, snapshot: Snapshot, rank: int, ranks: int) -> str:
    arena = Arena([slot], "", rank, ranks, 0)
    entries = [i.entry() for i in snapshot.items]
    sources = [Source(i.tensor.data_ptr(), e.bytes, False) for i, e in zip(snapshot.items, entries, strict=True)]
    arena.capture(1, SlotLayout(entries, sources), [], 1, 1, None, False, False)
    arena.wait()
    return str(arena.write_shard(str(directory), 1, MARK))


def load(directory: Path, tensors: int, new: int) -> dict[str, float]:
    """Measures one rank of another world: it opens the checkpoint, finds its places, and plans."""
    state = State({"model": model(new, tensors, 7)}, Layout(7, new, False))
    began = time.process_time()
    seen = state.resharded(str(directory / "step-1"))
    runs, read = seen.plan([i.name for i in state.module_items()])
    spent = time.process_time() - began
    assert read == tensors * (ROWS // new) * 16, read
    return {"load": spent, "runs": runs}


def _plan(rank: int, ranks: int, tensors: int) -> SavePlan:
    rows = ROWS // ranks
    offsets, sizes = torch.Size((rank * rows, 0)), torch.Size((rows, 4))
    items = []
    for n in range(tensors):
        name = f"model.layer_{n}_weight"
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(), torch.Size((ROWS, 4)))
        items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(
        items, planner_data={f"model.layer_{n}_weight": ("model", f"layer_{n}_weight") for n in range(tensors)}
    )


def theirs(ranks: int, tensors: int, new: int) -> dict[str, float]:
    """Measures DCP: its coordinator's work for a save, and one rank's for a load."""
    gathered = [pickle.dumps(_plan(rank, ranks, tensors)) for rank in range(ranks)]
    began = time.process_time()
    plans = [pickle.loads(plan) for plan in gathered]
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    _, metadata = planner.create_global_plan(plans)
    written = pickle.dumps(metadata)
    spent = time.process_time() - began
    # The keys to which its planner flattens are those of the metadata.
    state: dict[str, Any] = {f"model.{name}": p for name, p in model(new, tensors, 7).named_parameters()}
    began = time.process_time()
    loader = DefaultLoadPlanner()
    loader.set_up_planner(state, pickle.loads(written), is_coordinator=False)
    local = loader.create_local_plan()
    loaded = time.process_time() - began
    assert isinstance(local, dcp.planner.LoadPlan) and len(local.items) >= tensors
    return {"save": spent, "load": loaded}


def main() -> None:
    what, directory, *numbers = sys.argv[1:]
    ranks, tensors, new = map(int, numbers)
    found = {
        "save": lambda: save(Path(directory), ranks, tensors),
        "load": lambda: load(Path(directory), tensors, new),
        "dcp": lambda: theirs(ranks, tensors, new),
    }[what]()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
