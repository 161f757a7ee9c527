"""DCP's storage reader."""

from __future__ import annotations

import io
import os
from collections import defaultdict
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

from .._internal import CheckpointError, DamagedError, Shard, list_checkpoints, open_shards
from ..directory import Directory
from .foreign import safe_load
from .pieces import Stored, Table, pickled, read_table

#: Threads that read one shard.
THREADS = 4


class Reader(dcp.StorageReader):
    """Loads what :class:`everstep.dcp.Writer` saved, by any number of ranks in any sharding.

    ``path`` is a directory of checkpoints, of which the newest complete one is read, or one of them (``out/step-500``). Only the
    parts that are wanted are read, and every byte is verified before it is used.

    Objects that are no tensors are loaded as ``torch.load(weights_only=True)`` does: nothing of a checkpoint runs. ``allow_pickle=True``
    unpickles others, which runs whatever whoever wrote the checkpoint wanted to run.

    Raises:
        CheckpointError: when there is none, or it is damaged.
    """

    def __init__(self, path: str | PathLike[str], *, allow_pickle: bool = False) -> None:
        self._path = Directory(path)
        self._allow_pickle = allow_pickle
        self._shards: list[Shard] = []
        self._blocks: dict[MetadataIndex, Stored] = {}
        self._table = Table([], {}, {})

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """A load begins."""
        if checkpoint_id:
            self._path = Directory(checkpoint_id)

    def _open(self) -> str:
        root, wanted = self._path.located()
        if not root.is_there():
            raise CheckpointError(f"there is no directory {root}")
        wrongs = []
        for step, path, size, wrong in list_checkpoints(root):
            if wanted is not None and step != wanted:
                continue
            if wrong is None and size is not None:
                self._shards = open_shards(path)
                return path
            wrongs.append(str(wrong))
        if any(os.path.exists(f"{place}/.metadata") for place in (root, self._path)):
            raise CheckpointError(
                f"{self._path} is a checkpoint of DCP's own: read it with FileSystemReader, or import it with everstep ckpt import"
            )
        what = "; ".join(wrongs) or "it holds none"
        raise CheckpointError(f"no checkpoint in {self._path} can be read: {what}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata, from the shards' own tables."""
        path = self._open()
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
            # Equal copies: the first is read.
            if index not in self._blocks:
                found.chunks.append(ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.sizes)))
                self._blocks[index] = block
        known: dict[str, Any] = {**tensors, **{fqn: BytesStorageMetadata() for fqn in table.objects}}
        return Metadata(
            known, planner_data=dict(table.mappings), storage_data={}, storage_meta=StorageMeta(checkpoint_id=str(path))
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Everything was set up with the metadata."""
        if not self._shards:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As DCP plans."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As DCP plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads shard by shard, each in one pass over what is wanted of it."""
        by_shard: dict[int, list[tuple[ReadItem, Stored]]] = defaultdict(list)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                shard, name = self._table.objects[item.storage_index.fqn]
                data = self._shards[shard].bytes(name)
                if not self._allow_pickle:
                    # Planners unpickle: what they get is what was read safely, pickled here.
                    data = self._plain(item.storage_index.fqn, data)
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
    def _plain(fqn: str, data: bytes) -> bytes:
        try:
            return pickled(safe_load(io.BytesIO(data), fqn))
        except DamagedError:
            raise
        except CheckpointError as e:
            raise CheckpointError(
                f"{e}; or, which runs it, read it with everstep.dcp.Reader(…, allow_pickle=True)"
            ) from e

    @staticmethod
    def _read(shard: Shard, wanted: list[tuple[ReadItem, Stored]], planner: LoadPlanner) -> None:
        aside: list[tuple[Tensor, Tensor]] = []
        blocks = []
        targets = []
        for item, block in wanted:
            target = planner.resolve_tensor(item).detach()
            if tuple(target.shape) != tuple(item.lengths):
                raise CheckpointError(
                    f"{block.fqn}: {tuple(item.lengths)} elements are to be read into {tuple(target.shape)}"
                )
            into = target
            if target.dtype != block.dtype or not target.is_contiguous() or target.device.type != "cpu":
                into = torch.empty(tuple(item.lengths), dtype=block.dtype)
                aside.append((target, into))
            targets.append((item, target))
            if into.numel():
                blocks.append(
                    (
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
        """Any path."""
        return "://" not in str(checkpoint_id)
