"""DCP's storage reader."""

from __future__ import annotations

import io
import os
import warnings
from collections import defaultdict
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from .._internal import Block, CheckpointError, DamagedError, Shard, list_checkpoints, open_shards
from ..damage import OutOfMemory, reading
from ..directory import Directory
from ..in_place import is_plain
from ..worker import in_group
from .agreement import CANDIDATES_MAX, Agreed, Candidates, agree, moved, require_same_values
from .foreign import safe_load
from .pieces import Stored, Table, pickled, read_table

#: Threads that read one shard.
THREADS = 4


def plain(fqn: str, data: bytes) -> bytes:
    """Returns an object as it was pickled, after it has been read as
    ``torch.load(weights_only=True)`` does.

    Raises:
        CheckpointError: when only a pickle could restore it.
        DamagedError: when it cannot be read.
    """
    try:
        with reading(fqn):
            return pickled(safe_load(io.BytesIO(data), fqn))
    except (DamagedError, OutOfMemory):
        raise
    except CheckpointError as e:
        raise CheckpointError(
            f"{e}. everstep.dcp.Reader(…, allow_pickle=True) reads it, but executes the code in it"
        ) from e


class Reader(dcp.StorageReader):
    """Loads what :class:`everstep.dcp.Writer` saved, on any number of ranks in any sharding.

    ``path`` is a directory of checkpoints, of which the newest complete one that every rank finds
    is read, or one of them (``out/step-500``). Only the parts that are wanted are read, and every
    byte is verified before it is used.

    Objects that are not tensors are loaded as ``torch.load(weights_only=True)`` does: nothing of a
    checkpoint runs. ``allow_pickle=True`` unpickles others, which runs any code that the author of
    the checkpoint put into it.

    Raises:
        CheckpointError: when there is none, or it is damaged.
    """

    def __init__(self, path: str | PathLike[str], *, allow_pickle: bool = False) -> None:
        self._path = Directory(path)
        self._allow_pickle = allow_pickle
        self._shards: list[Shard] = []
        self._blocks: dict[MetadataIndex, Stored] = {}
        self._table = Table([], {}, {})
        self._paths: dict[str, str] = {}
        self._candidates = Candidates([])

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Begins a load."""
        if checkpoint_id:
            self._path = Directory(checkpoint_id)

    def _found(self) -> tuple[list[str], list[str]]:
        """Returns the complete checkpoints that may be read, newest first, and what is wrong with
        those before the first.

        Raises:
            CheckpointError: when there is none.
        """
        root, _, name = self._path.located()
        if not root.is_there():
            raise CheckpointError(f"there is no directory {root}")
        wrongs: list[str] = []
        paths: list[str] = []
        for row in list_checkpoints(root) if name is None else root.named(name):
            if row.wrong is None and row.world_size is not None:
                paths.append(row.path)
            elif not paths:
                wrongs.append(str(row.wrong))
        if paths:
            return paths[: 1 if name is not None else CANDIDATES_MAX], wrongs
        if any(os.path.exists(f"{place}/.metadata") for place in (root, self._path)):
            raise CheckpointError(
                f"{self._path} is a checkpoint of DCP's own: read it with FileSystemReader, or import it with everstep ckpt import"
            )
        what = "; ".join(wrongs) or "it holds none"
        raise CheckpointError(f"no checkpoint in {self._path} can be read: {what}")

    # No parameter is named kwargs: after an error, DCP would call this again, and if that
    # succeeded, this rank would skip the collectives in which the other ranks wait for it.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Returns DCP's metadata, from the shards' own tables."""
        paths, wrongs = self._found()
        # By their names: nodes may have mounted the directory at different paths.
        self._paths = {os.path.basename(path): path for path in paths}
        self._candidates = Candidates([*self._paths], wrongs)
        self._metadata = self._read_tables(paths[0])
        return self._metadata

    def _read_tables(self, path: str) -> Metadata:
        self._shards = open_shards(path)
        self._table = table = read_table(path, self._shards)
        tensors: dict[str, TensorStorageMetadata] = {}
        self._blocks = {}
        for block in table.blocks:
            found = tensors.get(block.fqn)
            if found is None:
                found = tensors[block.fqn] = TensorStorageMetadata(
                    TensorProperties(dtype=block.dtype), torch.Size(block.shape), []
                )
            index = MetadataIndex(block.fqn, block.offsets)
            # Of equal copies, the first is read.
            if index not in self._blocks:
                found.chunks.append(ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.sizes)))
                self._blocks[index] = block
        known: dict[str, Any] = {**tensors, **{fqn: BytesStorageMetadata() for fqn in table.objects}}
        return Metadata(
            known, planner_data=dict(table.mappings), storage_data={}, storage_meta=StorageMeta(checkpoint_id=str(path))
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing if the metadata was read."""
        if not self._shards:
            self.read_metadata()

    def _is_named(self) -> bool:
        return self._path.located()[1] is not None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds the checkpoints that this rank found to DCP's plan."""
        return plan if self._is_named() else replace(plan, storage_data=self._candidates)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Adds the checkpoint that all ranks read to DCP's plans."""
        ranks = [plan.storage_data for plan in plans if isinstance(plan.storage_data, Candidates)]
        if self._is_named() or len(ranks) < len(plans):
            return plans
        agreed, warning = agree(str(self._path), ranks)
        if warning is not None:
            warnings.warn(f"everstep: {warning}", stacklevel=2)
        return [replace(plan, storage_data=agreed) for plan in plans]

    def _as_agreed(self, plan: LoadPlan) -> list[ReadItem]:
        """Returns what to read, from the checkpoint that all ranks read.

        Raises:
            CheckpointError: when that is unknown, cannot be opened, or has other values than the
                one that the plan was made for.
        """
        agreed = plan.storage_data
        if not isinstance(agreed, Agreed):
            if not self._is_named() and in_group():
                raise CheckpointError(
                    "the planner drops a plan's storage_data, so that ranks cannot agree on a checkpoint; "
                    f"name the one to load: Reader({self._paths[self._candidates.names[0]]!r})"
                )
            return plan.items
        if agreed.name == self._candidates.names[0]:
            return plan.items
        planned, blocks = self._metadata, self._blocks
        self._metadata = self._read_tables(self._paths[agreed.name])
        require_same_values(planned, self._metadata)
        return moved(plan.items, blocks, self._blocks.values())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads shard by shard, each in one pass over the wanted parts."""
        by_shard: dict[int, list[tuple[ReadItem, Stored]]] = defaultdict(list)
        for item in self._as_agreed(plan):
            if item.type == LoadItemType.BYTE_IO:
                shard, name = self._table.objects[item.storage_index.fqn]
                data = self._shards[shard].bytes(name)
                if not self._allow_pickle:
                    # Planners unpickle, so they get what was read safely, pickled again here.
                    data = plain(item.storage_index.fqn, data)
                planner.load_bytes(item, io.BytesIO(data))
            else:
                block = self._blocks[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
                by_shard[block.shard].append((item, block))
        for shard, wanted in by_shard.items():
            self._read(self._shards[shard], wanted, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @staticmethod
    def _read(shard: Shard, wanted: list[tuple[ReadItem, Stored]], planner: LoadPlanner) -> None:
        aside: list[tuple[Tensor, Tensor]] = []
        blocks = []
        targets = []
        for item, block in wanted:
            target = planner.resolve_tensor(item).detach()
            if tuple(target.shape) != tuple(item.lengths):
                raise CheckpointError(
                    f"{block.fqn} has shape {tuple(item.lengths)} in the checkpoint, but {tuple(target.shape)} here"
                )
            into = target
            if target.dtype != block.dtype or not is_plain(target):
                into = torch.empty(tuple(item.lengths), dtype=block.dtype, device="cpu")
                aside.append((target, into))
            targets.append((item, target))
            if into.numel():
                blocks.append(
                    Block(
                        block.name,
                        list(block.sizes),
                        into.element_size(),
                        list(item.storage_offsets),
                        list(item.lengths),
                        into.data_ptr(),
                        into.nbytes,
                    )
                )
        shard.read_blocks(blocks, THREADS)
        for target, into in aside:
            target.copy_(into)
        for item, target in targets:
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Accepts any path."""
        return "://" not in str(checkpoint_id)
