"""DCP's storage writer, and its stager for ``async_save``."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .. import worker as _worker
from .._internal import CheckpointError
from ..directory import Directory
from ..worker import in_group
from ..world import place_in_group
from . import shares, turns
from .pieces import Piece, items, of_object
from .stores import AgentStore, Number, PlainStore

#: Seconds in which the thread that async_save starts must take over a save.
HANDOVER = 120.0
#: Why a thread that has not done so must not take over any more.
LATE = f"the thread of async_save did not begin within {HANDOVER:.0f} s: save again"
#: Why a Writer cannot be pickled.
STAYS = (
    "everstep.dcp.Writer works only in the training process: leave async_checkpointer_type at THREAD; the "
    "agent already writes outside that process"
)
#: Why a save cannot change its directory.
ELSEWHERE = "async_save has already copied the state for another directory: pass the path to the Writer instead of checkpoint_id"


def _decides() -> bool:
    return not in_group() or dist.get_rank() == 0


def _writable(path: Directory) -> Directory:
    """Refuses the name of a checkpoint that everstep has put beside another one: it would replace
    the other one.

    Raises:
        CheckpointError: naming the path to use instead.
    """
    root, step, name = path.located()
    if name is not None and name != f"step-{step}":
        raise CheckpointError(f"cannot save to {path}: the name {name} is reserved by everstep; use {root}/step-{step}")
    return path


class _Handover:
    """Whether the thread that async_save starts has taken over what was copied for it. Other ranks
    begin DCP's collectives only with a rank whose thread has."""

    def __init__(self, exchange: shares.Exchange) -> None:
        self._exchange = exchange
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._gone = False

    def take(self) -> bool:
        """Takes over. Returns False if nobody waits for that any more."""
        with self._lock:
            self._ended.set()
            return not self._gone

    def end(self) -> None:
        """Notes that no thread can take over any more."""
        self._give_up("async_save has started no thread for it")

    def wait(self) -> bool:
        """Waits until the thread has taken over or cannot. Returns False if it has not for too
        long; from then on, it must not."""
        return self._ended.wait(HANDOVER) or not self._give_up(LATE)

    def _give_up(self, why: str) -> bool:
        with self._lock:
            if self._ended.is_set():
                return False
            self._gone = True
            self._ended.set()
        # The process group may be gone.
        with contextlib.suppress(Exception):
            self._exchange.fail(CheckpointError(why))
        return True


@dataclass
class _Save:
    """One checkpoint in progress."""

    step: int
    store: AgentStore | PlainStore
    where: tuple[Directory, int | None]
    #: The memory with the copy, if this process writes it.
    room: Any


class _Copied(dict[str, Any]):
    """The state of one async_save, whose copy is ``save``.

    DCP tells a writer neither which save calls it nor whether it was staged, and other saves may
    come from other threads meanwhile. But every save first reads the items of its own state.
    """

    def __init__(
        self, state: dict[str, Any], writer: Writer, save: _Save, exchange: shares.Exchange, handover: _Handover
    ) -> None:
        super().__init__(state)
        self._writer, self._save, self._exchange, self._handover = writer, save, exchange, handover

    def items(self) -> Any:
        """Makes the calling thread the one that saves the copy."""
        self._writer._take_over(self._save, self._exchange, self._handover)
        return super().items()

    def __del__(self) -> None:
        self._handover.end()

    def __reduce__(self) -> Any:
        raise TypeError(STAYS)


#: The handover of the latest async_save of any writer: its thread may not have started.
_copied: _Handover | None = None


def _arguments(function: str) -> Mapping[str, Any]:
    """Returns the arguments of DCP's ``async_save`` or ``save`` that calls, which DCP does not pass
    on; none where something else calls."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == state_dict_saver.__name__:
            return frame.f_locals
        frame = frame.f_back
    return {}


def _require_default(planner: SavePlanner | None) -> None:
    """Refuses a planner that would save something else than what async_save copies.

    Raises:
        CheckpointError: naming what to call instead.
    """
    default = type(planner) is DefaultSavePlanner and planner.flatten_state_dict and planner.flatten_sharded_tensors
    if planner is not None and not default:
        raise CheckpointError(
            f"async_save copies the state without a planner, so everstep cannot use this {type(planner).__name__}; "
            "call dcp.save with it, or leave planner out"
        )


def _require_places(pieces: list[Piece], mappings: Mapping[str, Any], planner: SavePlanner) -> None:
    """Refuses values without a place in the state: no Reader would take the checkpoint.

    Raises:
        CheckpointError: naming the first one.
    """
    unknown = next((p.fqn for p in pieces if mappings and p.fqn not in mappings), None)
    if unknown is not None:
        raise CheckpointError(
            f"{type(planner).__name__} saves {unknown}, but its mappings have no entry for it; add one where the "
            "planner renames or adds items, or create the planner with flatten_state_dict=False"
        )


def _require_world(whole: bool) -> None:
    """Refuses a save in which not all ranks take part.

    Raises:
        CheckpointError: unless the process group is the ``whole`` world.
    """
    if in_group() and not whole:
        raise CheckpointError(
            "everstep.dcp.Writer saves with all ranks of the job: leave out process_group, no_dist and use_collectives"
        )


class Writer(dcp.StorageWriter, AsyncStager):
    """Saves what DCP plans, as an everstep checkpoint.

    ``path`` is a directory of checkpoints, in which each save creates the next one (``step-1``,
    ``step-2``, …); or one of them (``out/step-500``), which is then created. Nothing that was saved
    is removed. A ``checkpoint_id`` given to DCP takes its place for that save.

    Under ``everstep run``, a save is complete for :func:`async_save` once it is in shared memory of
    this node: its agent writes and publishes it, with or without this process. Elsewhere, DCP's
    thread does. The agent publishes in one directory at a time: a save to another directory than
    the previous one begins when everything for that one is on storage.

    Raises:
        CheckpointError: from :func:`save`, when storage fails; the checkpoints before stay.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = _writable(Directory(path))
        #: By directory and place of this process, which is another one once the process group is.
        self._stores: dict[tuple[Directory, tuple[int, int]], AgentStore | PlainStore] = {}
        #: What the save of each thread uses.
        self._here = threading.local()

    # -- staging (AsyncStager) --------------------------------------------------------------------

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: staging is complete when :meth:`stage` returns."""
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies this rank's state, which may change as soon as this returns."""
        global _copied
        asked = _arguments("async_save")
        # First: ranks that do not take part count no exchange.
        self._require_all_ranks(asked)
        exchange = shares.Exchange()
        root, fixed, _ = self._path.located()
        try:
            # What cannot be saved as asked must not be copied: an agent publishes what it has.
            self._require_possible(asked)
            before, _copied = _copied, None
            if before is not None and not before.wait():
                raise CheckpointError(
                    "the previous async_save was not taken over by its thread; give async_save the same storage_writer"
                )
            flat, mappings = flatten_state_dict(state_dict)
            pieces = [piece for fqn, value in flat.items() for piece in of_object(fqn, value)]
            store = self._store(root)
            held = store.held()
            number = store.draw(fixed, held) if _decides() else None
            pieces, number = exchange.deal(pieces, number, fixed, held)
            save = self._capture(store, number, (root, fixed), pieces, mappings)
        except Exception as e:
            exchange.fail(e)
            raise
        _copied = _Handover(exchange)
        # DCP plans with it again, for its own records: it reads only shapes.
        return _Copied(state_dict, self, save, exchange, _copied)

    @staticmethod
    def _require_all_ranks(asked: Mapping[str, Any]) -> None:
        group = asked.get("process_group")
        _require_world(
            not asked.get("no_dist", False)
            and asked.get("use_collectives", True)
            and (group is None or dist.get_world_size(group) == dist.get_world_size())
        )

    def _require_possible(self, asked: Mapping[str, Any]) -> None:
        _require_default(asked.get("planner"))
        if getattr(asked.get("async_checkpointer_type"), "name", "THREAD") != "THREAD":
            raise CheckpointError(STAYS)
        there = asked.get("checkpoint_id")
        if there and _writable(Directory(there)).located()[:2] != self._path.located()[:2]:
            raise CheckpointError(ELSEWHERE)

    def _take_over(self, save: _Save, exchange: shares.Exchange, handover: _Handover) -> None:
        turn, before = turns.begin()
        try:
            taken = handover.take()
            save.store.follow(save.step, turn.is_over)
            if not taken:
                raise CheckpointError(LATE)
            exchange.copied()
        except Exception as e:
            exchange.fail(e)
            raise
        finally:
            # Also if this one fails: the next one waits for this one alone.
            if before is not None:
                before.wait()
        exchange.await_copies()
        self._here.copied = save

    def synchronize_staging(self) -> None:
        """Does nothing: staging is complete."""

    def close(self) -> None:
        """Does nothing."""

    def _store(self, root: Directory) -> AgentStore | PlainStore:
        here, ranks = place_in_group(), _worker.world().world_size
        agent = _worker.current().agent
        if agent is not None and ranks > 1 and not (dist.is_available() and dist.is_initialized()):
            raise CheckpointError(
                f"everstep.dcp.Writer saves with all {ranks} ranks of the job, but there is no process group: call "
                "torch.distributed.init_process_group() before, and save on all ranks"
            )
        store = self._stores.get((root, here))
        if store is None:
            # An agent writes for the ranks that it has started. Those that a script makes of one of
            # them (mp.spawn) are a world of their own.
            agent = agent if here[1] == ranks else None
            store = self._stores[root, here] = PlainStore(root) if agent is None else AgentStore(root)
        return store

    @staticmethod
    def _capture(
        store: AgentStore | PlainStore,
        number: Number,
        where: tuple[Directory, int | None],
        pieces: list[Piece],
        mappings: dict[str, Any],
    ) -> _Save:
        store.accept(number, where[1])
        with store.turn():
            room = store.capture(number.step, items(pieces, mappings))
        return _Save(number.step, store, where, room)

    # -- writing (StorageWriter) ------------------------------------------------------------------

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Begins a save, perhaps to another directory."""
        if checkpoint_id:
            self._here.path = _writable(Directory(checkpoint_id))

    def _given(self) -> Directory | None:
        """Returns the path that was given for the save that calls, if one was. An earlier save may
        have failed before it used its own."""
        path: Directory | None = self._here.__dict__.get("path")
        return path if _arguments("save").get("checkpoint_id", path) else None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Checks the place of a save."""
        if not self._here.__dict__.pop("has_begun", False):
            self._begin()
        save: _Save | None = self._here.save
        path = self._given()
        self._here.__dict__.pop("path", None)
        self._here.at = path or self._path
        if in_group():
            # DCP counts in the group; not all versions pass the rank.
            first = dist.get_rank() == 0
            rank = kwargs.get("rank", dist.get_rank())
            _require_world(is_coordinator == first and rank == dist.get_rank() and kwargs.get("use_collectives", True))
        if save is not None:
            if path is not None and path.located()[:2] != save.where:
                raise CheckpointError(ELSEWHERE)
            return
        self._here.where = self._here.at.located()[:2]

    def _begin(self) -> None:
        save: _Save | None = self._here.__dict__.pop("copied", None)
        self._here.save = save
        if save is not None:
            return
        if _copied is not None:
            _copied.wait()
        self._here.turn, before = turns.begin()
        if before is not None:
            before.wait()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns DCP's plan, after telling rank 0 which numbers are in use here."""
        if self._here.save is None:
            shares.announce_held(self._store(self._here.where[0]).held())
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns DCP's plans, and numbers the checkpoint."""
        # A group may begin with rank 0 and still not be the whole world.
        _require_world(not in_group() or len(plans) == dist.get_world_size())
        if self._here.save is None:
            root, fixed = self._here.where
            store = self._store(root)
            self._here.number = number = store.draw(fixed, max(store.held(), shares.held_by_all()))
            shares.announce(number)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's share to storage; what was staged is being written already."""
        save: _Save | None = self._here.save
        if save is not None:
            # Where it was not known when the state was copied.
            _require_default(planner)
        else:
            root, fixed = self._here.where
            number = shares.announced() if in_group() else self._here.number
            pieces = [piece for item in plan.items for piece in self._resolved(item, planner)]
            mappings = getattr(planner, "mappings", None) or {}
            _require_places(pieces, mappings, planner)
            save = self._here.save = self._capture(self._store(root), number, (root, fixed), pieces, mappings)
            save.store.follow(save.step, self._here.turn.is_over)
        written = save.store.write(save.step, save.room)
        done: Future[list[WriteResult]] = Future()
        results = [WriteResult(index=item.index, size_in_bytes=0, storage_data=None) for item in plan.items]
        # The results carry the shards to publish from rank to rank.
        done.set_result(
            [*results, WriteResult(index=None, size_in_bytes=0, storage_data=(save.step, written))]  # type: ignore[arg-type]
        )
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
        """Publishes the checkpoint, on one rank."""
        save: _Save = self._here.save
        written = [r.storage_data for rank in results for r in rank if r.index is None]
        steps = [step for step, _ in written]
        if len(written) < len(results) or set(steps) != {save.step}:
            raise CheckpointError(
                f"step {save.step} is not published: the ranks saved the steps {steps}; call the same saves on all ranks"
            )
        save.store.publish(save.step, [shard for _, shard in written], fixed=save.where[1] is not None)
        with contextlib.suppress(AttributeError):
            metadata.storage_meta = StorageMeta(checkpoint_id=str(self._here.at))

    def storage_meta(self) -> StorageMeta | None:
        """Returns the location of the checkpoint. DCP calls this first, and its collectives follow
        whatever fails after that, such as the planner: the save begins here. One that async_save
        has copied is taken over already, by the thread that calls; any other one waits for all that
        were copied."""
        if turns.is_saving(threading.current_thread()):
            self._begin()
            self._here.has_begun = True
        return StorageMeta(checkpoint_id=str(self._given() or self._path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Accepts any path."""
        return "://" not in str(checkpoint_id)

    def __getstate__(self) -> Any:
        raise TypeError(STAYS)
