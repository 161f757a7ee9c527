"""DCP's storage writer, and its stager for ``async_save``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .. import worker as _worker
from .._internal import CheckpointError
from ..directory import Directory
from . import shares
from .pieces import Piece, items, of_object
from .stores import AgentStore, PlainStore

#: Seconds for which a save may stay unfetched by the thread that async_save starts.
HANDOVER = 120.0


#: The thread of the latest save.
_latest: threading.Thread | None = None


def _one_after_the_other() -> None:
    """DCP's own collectives of two saves on one process group would meet in another order on another rank: those of the save
    before come to their end first. What was staged is on its way meanwhile."""
    global _latest
    before, _latest = _latest, threading.current_thread()
    if before is not None and before is not _latest and before is not threading.main_thread():
        before.join()


@dataclass
class _Save:
    """One checkpoint on its way."""

    step: int
    store: AgentStore | PlainStore
    where: tuple[Directory, int | None]
    taken: threading.Event = field(default_factory=threading.Event)


#: The latest save that async_save has copied, of any writer: its thread may not have begun.
_copied: _Save | None = None


class Writer(dcp.StorageWriter, AsyncStager):
    """Saves what DCP plans, as an everstep checkpoint.

    ``path`` is a directory of checkpoints, each save makes the next one in it (``step-1``, ``step-2``, …); or one of them
    (``out/step-500``), which is then made. Nothing that was saved is removed. A ``checkpoint_id`` given to DCP replaces it.

    Under ``everstep run`` a save is complete for :func:`async_save` once it is in shared memory of this node: its agent writes and
    publishes it, with or without this process. Elsewhere DCP's thread does. The agent publishes in one directory at a time: a save to
    another directory than the one before begins when what went there is on storage.

    Raises:
        CheckpointError: from :func:`save`, when storage fails; the checkpoints before stay.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Directory(path)
        self._stores: dict[Directory, AgentStore | PlainStore] = {}
        self._staged: list[_Save] = []
        self._here = threading.local()

    # -- staging (AsyncStager) ----------------------------------------------------------------------

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Staging is complete when :meth:`stage` returns."""
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies this rank's state; it may change as soon as this returns."""
        global _copied
        before = _copied
        if before is not None and not before.taken.wait(HANDOVER):
            raise CheckpointError(
                "the async_save before this one was not taken up; give async_save the same storage_writer"
            )
        flat, mappings = flatten_state_dict(state_dict)
        pieces = [piece for fqn, value in flat.items() for piece in of_object(fqn, value)]
        save = self._begin(shares.own(pieces), mappings)
        self._staged.append(save)
        _copied = save
        # DCP plans with it once more, for its own books: only shapes are looked at.
        return state_dict

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """Nothing is held."""

    def _begin(self, pieces: Iterable[Piece], mappings: dict[str, Any]) -> _Save:
        root, fixed = self._path.located()
        store = self._stores.get(root)
        if store is None:
            agent = _worker.current().agent
            store = self._stores[root] = PlainStore(root) if agent is None else AgentStore(root)
        with store.turn():
            step = store.next_step(fixed)
            store.capture(step, items(pieces, mappings))
        return _Save(step, store, (root, fixed))

    # -- writing (StorageWriter) --------------------------------------------------------------------

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Another directory."""
        if not checkpoint_id:
            return
        if self._staged and Directory(checkpoint_id).located() != self._staged[-1].where:
            self._staged.pop().taken.set()
            raise CheckpointError(
                "async_save has copied the state for another directory already: give checkpoint_id to the Writer instead"
            )
        self._path = Directory(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """A save begins, in the thread that does it."""
        if not self._staged and _copied is not None:
            # A save without a copy comes after all that were copied.
            _copied.taken.wait(HANDOVER)
        _one_after_the_other()
        self._here.save = self._staged.pop() if self._staged else None
        if self._here.save is not None:
            self._here.save.taken.set()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As DCP plans."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As DCP plans."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Brings this rank's share to storage; what was staged is on its way already."""
        save: _Save | None = getattr(self._here, "save", None)
        if save is None:
            pieces = [piece for item in plan.items for piece in self._resolved(item, planner)]
            mappings = getattr(planner, "mappings", None) or {}
            save = self._begin(pieces, mappings)
            self._here.save = save
        written = save.store.write(save.step)
        done: Future[list[WriteResult]] = Future()
        results = [WriteResult(index=item.index, size_in_bytes=0, storage_data=None) for item in plan.items]
        # What is published is told from rank to rank by way of the results.
        done.set_result([*results, WriteResult(index=None, size_in_bytes=0, storage_data=written)])  # type: ignore[arg-type]
        return done

    @staticmethod
    def _resolved(item: WriteItem, planner: SavePlanner) -> list[Piece]:
        data: Any = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            return [Piece(item.index.fqn, None, pickled=data.getvalue())]
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        return [Piece(item.index.fqn, data.detach(), tuple(item.tensor_data.size), tuple(chunk.offsets))]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On one rank: the checkpoint becomes visible."""
        save: _Save = self._here.save
        written = [r.storage_data for rank in results for r in rank if r.index is None]
        save.store.publish(save.step, written)
        with contextlib.suppress(AttributeError):
            metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> StorageMeta | None:
        """Where it is."""
        return StorageMeta(checkpoint_id=str(self._path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Any path."""
        return "://" not in str(checkpoint_id)

    def __getstate__(self) -> Any:
        raise TypeError(
            "everstep.dcp.Writer stays in the training process: leave async_checkpointer_type at THREAD; the "
            "agent writes outside of it anyway"
        )
