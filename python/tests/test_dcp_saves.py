"""Saves through DCP that meet others, fail, or ask for too much publish all of it, or nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_thread_executor as executor

import everstep as es
from harness.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _save(writer: es.dcp.Writer, value: float, **options: object) -> None:
    dcp.save({"w": torch.full((9,), value)}, storage_writer=writer, **options)


def _async(writer: es.dcp.Writer, value: float, **options: object):
    return dcp.async_save({"w": torch.full((9,), value)}, storage_writer=writer, no_dist=True, **options)


def _saved(directory: Path) -> dict[str, float]:
    found = {}
    for manifest in directory.glob("step-*/manifest.json"):
        state = {"w": torch.zeros(9)}
        dcp.load(state, storage_reader=es.dcp.Reader(manifest.parent), no_dist=True)
        assert (state["w"] == state["w"][0]).all()
        found[manifest.parent.name] = state["w"][0].item()
    return found


def test_two_writers_on_one_directory_take_turns_at_its_numbers(tmp_path):
    a, b = es.dcp.Writer(tmp_path), es.dcp.Writer(tmp_path)
    for value, writer in enumerate((a, b, a, b, b, a), 1):
        _save(writer, value)
    expected = {f"step-{n}": n for n in range(1, 7)}
    assert _saved(tmp_path) == expected
    _save(es.dcp.Writer(tmp_path / "step-7"), 7)
    _async(a, 8).result()
    _save(b, 9)
    assert _saved(tmp_path) == {**expected, "step-7": 7, "step-8": 8, "step-9": 9}


def test_saves_in_progress_through_two_writers_have_numbers_of_their_own(tmp_path):
    writers = [es.dcp.Writer(tmp_path) for _ in range(3)]
    futures = [_async(writer, value) for value, writer in enumerate(writers, 1)]
    for future in futures:
        future.result()
    assert _saved(tmp_path) == {"step-1": 1, "step-2": 2, "step-3": 3}


def test_a_number_that_everstep_chose_never_replaces_a_checkpoint(tmp_path, monkeypatch):
    """A checkpoint appears after the number was chosen, as when a listing is stale."""
    from everstep.dcp import stores

    _save(es.dcp.Writer(tmp_path / "step-1"), 1)
    monkeypatch.setattr(stores, "_newest", lambda root: 0)
    monkeypatch.setattr(stores, "_drawn", {})
    with pytest.raises(BaseException, match="is not replaced"):
        _save(es.dcp.Writer(tmp_path), 2)
    assert _saved(tmp_path) == {"step-1": 1}
    # A number in the path is the user's choice.
    _save(es.dcp.Writer(tmp_path / "step-1"), 3)
    assert _saved(tmp_path) == {"step-1": 3}


def test_a_save_after_an_async_save_that_failed_saves_its_own_state(tmp_path, monkeypatch):
    class Full(dcp.DefaultSavePlanner):
        def set_up_planner(self, *args, **kwargs):
            raise OSError("no memory for a plan")

    writer = es.dcp.Writer(tmp_path)
    with monkeypatch.context() as m:
        # In the thread that async_save starts, before it calls the writer.
        m.setattr(dcp.DefaultSavePlanner, "set_up_planner", Full.set_up_planner)
        failed = _async(writer, 1)
        assert "no memory for a plan" in str(failed.exception())
    _save(writer, 2)
    assert list(_saved(tmp_path).values()) == [2]
    _async(writer, 3).result()
    assert sorted(_saved(tmp_path).values()) == [2, 3]


def test_a_copy_whose_save_failed_is_not_taken_for_that_of_the_next_save(tmp_path):
    class Full(dcp.DefaultSavePlanner):
        def set_up_planner(self, *args, **kwargs):
            raise OSError("no memory for a plan")

    writer = es.dcp.Writer(tmp_path)
    copied = writer.stage({"w": torch.ones(9)})
    with pytest.raises(BaseException, match="no memory for a plan"):
        dcp.save(copied, storage_writer=writer, planner=Full())
    _save(writer, 2)
    assert list(_saved(tmp_path).values()) == [2]


def test_a_save_right_after_async_save_waits_until_that_has_its_copy(tmp_path, monkeypatch):
    begun = threading.Event()
    wrapper = executor.save_wrapper

    def late(*args, **kwargs):
        begun.wait()
        # The other save may go on meanwhile.
        time.sleep(0.3)
        return wrapper(*args, **kwargs)

    class Begins(es.dcp.Writer):
        def storage_meta(self):
            begun.set()
            return super().storage_meta()

    monkeypatch.setattr(executor, "save_wrapper", late)
    writer = Begins(tmp_path)
    future = _async(writer, 1)
    _save(writer, 2)
    future.result()
    assert _saved(tmp_path) == {"step-1": 1, "step-2": 2}


def test_async_save_without_its_thread_does_not_hold_up_the_next_save(tmp_path, monkeypatch):
    def no_thread(*args, **kwargs):
        raise RuntimeError("can't start new thread")

    writer = es.dcp.Writer(tmp_path)
    with monkeypatch.context() as m:
        m.setattr(executor._ThreadBasedAsyncCheckpointExecutor, "execute_save", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            _async(writer, 1)
    _save(writer, 2)
    assert list(_saved(tmp_path).values()) == [2]


class _Doubles(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item):
        data = super().resolve_data(write_item)
        return data * 2 if isinstance(data, torch.Tensor) else data


@pytest.mark.parametrize("planner", [_Doubles(), dcp.DefaultSavePlanner(flatten_state_dict=False)])
def test_async_save_refuses_a_planner_that_it_would_ignore(tmp_path, planner):
    writer = es.dcp.Writer(tmp_path)
    with pytest.raises(BaseException, match=r"call dcp\.save with it"):
        _async(writer, 1, planner=planner).result()
    assert _saved(tmp_path) == {}
    _save(writer, 1, planner=_Doubles())
    _async(writer, 3, planner=dcp.DefaultSavePlanner()).result()
    assert sorted(_saved(tmp_path).values()) == [2, 3]


def test_a_planner_is_refused_where_a_copy_was_made_without_knowing_it(tmp_path):
    writer = es.dcp.Writer(tmp_path)
    copied = writer.stage({"w": torch.ones(9)})
    with pytest.raises(BaseException, match=r"call dcp\.save with it"):
        dcp.save(copied, storage_writer=writer, planner=_Doubles())
    assert _saved(tmp_path) == {}


def test_a_save_in_another_thread_than_the_first_does_not_hold_up_the_next(tmp_path):
    """The thread that made it waits for the next one, which waits for its end."""
    writer, ended = es.dcp.Writer(tmp_path), []

    def train():
        for value in (1, 3):
            _save(writer, value)
            _async(writer, value + 1).result(timeout=30)
        ended.append(True)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert ended
    assert _saved(tmp_path) == {f"step-{n}": n for n in range(1, 5)}


def test_a_checkpoint_id_is_that_of_one_save(tmp_path):
    class Full(dcp.DefaultSavePlanner):
        def set_up_planner(self, *args, **kwargs):
            raise OSError("no memory for a plan")

    writer = es.dcp.Writer(tmp_path / "a")
    _save(writer, 1, checkpoint_id=tmp_path / "b" / "step-7")
    _save(writer, 2)
    # The writer has the path before the plan fails.
    with pytest.raises(BaseException, match="no memory for a plan"):
        _save(writer, 3, checkpoint_id=tmp_path / "b" / "step-7", planner=Full())
    _save(writer, 4)
    assert (_saved(tmp_path / "a"), _saved(tmp_path / "b")) == ({"step-1": 2, "step-2": 4}, {"step-7": 1})


class _LeavesOut(dcp.DefaultSavePlanner):
    def create_local_plan(self):
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[i for i in plan.items if i.index.fqn != "model.extra"])
        return self.plan


class _Renames(dcp.DefaultSavePlanner):
    def create_local_plan(self):
        plan = super().create_local_plan()
        self.plan = replace(
            plan, items=[replace(i, index=replace(i.index, fqn=f"{i.index.fqn}.x")) for i in plan.items]
        )
        return self.plan

    def lookup_object(self, index):
        return super().lookup_object(replace(index, fqn=index.fqn.removesuffix(".x")))


def test_what_a_planner_leaves_out_or_renames(tmp_path):
    writer = es.dcp.Writer(tmp_path)
    saved = {"model": {"w": torch.full((9,), 5.0), "extra": torch.ones(3)}}
    dcp.save(saved, storage_writer=writer, planner=_LeavesOut())
    back = {"model": {"w": torch.zeros(9)}}
    dcp.load(back, storage_reader=es.dcp.Reader(tmp_path))
    assert torch.equal(back["model"]["w"], saved["model"]["w"])
    with pytest.raises(BaseException, match=r"_Renames saves model\.w\.x, but its mappings have no entry for it"):
        dcp.save(saved, storage_writer=writer, planner=_Renames())
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-1"]
    dcp.save({"w": torch.ones(9)}, storage_writer=writer, planner=_Renames(flatten_state_dict=False))
    back = {"w.x": torch.zeros(9)}
    dcp.load(back, storage_reader=es.dcp.Reader(tmp_path))
    assert torch.equal(back["w.x"], torch.ones(9))


_BEGIN = """
import os, sys
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
import everstep as es
dist.init_process_group("gloo")
rank, out = dist.get_rank(), sys.argv[1]

def state(value):
    return {f"w{r}": torch.full((9,), float(value)) for r in range(dist.get_world_size())}

def error(save, *args, **options):
    try:
        future = save(*args, **options)
        if save is dcp.async_save:
            future.result()
    except BaseException as e:
        return str(e)
    raise AssertionError("saved")
"""


def _ranks(tmp_path: Path, size: int, script: str) -> None:
    (tmp_path / "script.py").write_text(_BEGIN + script + "\ndist.barrier()\nos._exit(0)  # See test_reshard.py.\n")
    ended = run_ranks([str(tmp_path / "script.py"), str(tmp_path / "out")], size)
    assert [r.code for r in ended] == [0] * size, "\n".join(r.err for r in ended)[-3000:]


def _steps(tmp_path: Path, size: int) -> dict[str, float]:
    found = {}
    for manifest in (tmp_path / "out").glob("step-*/manifest.json"):
        if ".tmp" in manifest.parent.name:
            continue
        state = {f"w{r}": torch.zeros(9) for r in range(size)}
        dcp.load(state, storage_reader=es.dcp.Reader(manifest.parent), no_dist=True)
        (value,) = {x.item() for t in state.values() for x in t}
        found[manifest.parent.name] = value
    return found


def test_ranks_number_alike_after_one_of_them_has_failed(tmp_path):
    _ranks(
        tmp_path,
        2,
        """
class Fails(dcp.DefaultSavePlanner):
    def __init__(self, where):
        super().__init__()
        self.where = where
    def set_up_planner(self, *args, **kwargs):
        if self.where == "plan":
            raise OSError("gone")
        super().set_up_planner(*args, **kwargs)
    def finish_plan(self, plan):
        if self.where == "finish":
            raise OSError("gone")
        return super().finish_plan(plan)
    def resolve_data(self, item):
        if self.where == "data":
            raise OSError("gone")
        return super().resolve_data(item)

writer = es.dcp.Writer(out)
for n, where in enumerate(("data", "plan", "finish", "data", "plan", "finish"), 1):
    # A new Writer meets the same numbers.
    writer = writer if n < 4 else es.dcp.Writer(out)
    wrong = error(dcp.save, state(-n), storage_writer=writer, planner=Fails(where if rank == 1 else ""))
    assert "gone" in wrong, wrong
    dcp.save(state(n), storage_writer=writer)

class Torn:
    def __reduce__(self):
        raise OSError("gone")

for n in (7, 8):
    extra = {"torn": Torn()} if rank == 1 else {}
    wrong = error(dcp.async_save, {**state(-n), **extra}, storage_writer=writer)
    assert "gone" in wrong, wrong
    dcp.async_save(state(n), storage_writer=writer).result()
""",
    )
    found = _steps(tmp_path, 2)
    assert sorted(found.values()) == list(range(1, 9)), found


def test_ranks_whose_copy_nobody_saves_fail_the_save_of_all(tmp_path):
    """Otherwise, the others would wait for them in DCP's collectives."""
    _ranks(
        tmp_path,
        2,
        """
import time
from everstep.dcp import writer as of_writer
from torch.distributed.checkpoint import _async_thread_executor as executor

def no_thread(*args, **kwargs):
    raise RuntimeError("can't start new thread")

writer = es.dcp.Writer(out)
for n, failing in ((1, 0), (2, 1)):
    start = executor._ThreadBasedAsyncCheckpointExecutor.execute_save
    if rank == failing:
        executor._ThreadBasedAsyncCheckpointExecutor.execute_save = no_thread
    wrong = error(dcp.async_save, state(-n), storage_writer=writer)
    expected = "new thread" if rank == failing else f"rank {failing} could not copy its state: async_save has started no thread"
    assert expected in wrong, wrong
    executor._ThreadBasedAsyncCheckpointExecutor.execute_save = start
    dcp.async_save(state(n), storage_writer=writer).result()

# The thread of one rank begins too late.
wrapper = executor.save_wrapper

def late(*args, **kwargs):
    time.sleep(2 if rank == 1 else 0)
    return wrapper(*args, **kwargs)

executor.save_wrapper, of_writer.HANDOVER = late, 0.2
future = dcp.async_save(state(-3), storage_writer=writer)
executor.save_wrapper = wrapper
if rank == 1:
    assert not of_writer._copied.wait()
try:
    future.result()
except BaseException as e:
    assert "did not begin" in str(e), e
else:
    raise AssertionError("saved")
of_writer.HANDOVER = 120
dcp.async_save(state(3), storage_writer=writer).result()
""",
    )
    found = _steps(tmp_path, 2)
    assert sorted(found.values()) == [1, 2, 3], found


def test_a_rank_that_cannot_plan_does_not_disturb_the_save_before(tmp_path):
    """DCP tells the others of that with a collective."""
    _ranks(
        tmp_path,
        2,
        """
import time
from everstep.dcp import stores

class Fails(dcp.DefaultSavePlanner):
    def set_up_planner(self, *args, **kwargs):
        if rank == 1:
            raise OSError("gone")
        super().set_up_planner(*args, **kwargs)

write = stores.PlainStore.write

def slow(self, step, room):
    time.sleep(1)
    return write(self, step, room)

writer = es.dcp.Writer(out)
stores.PlainStore.write = slow
future = dcp.async_save(state(1), storage_writer=writer)
time.sleep(0.3)
wrong = error(dcp.save, state(-1), storage_writer=writer, planner=Fails())
assert "gone" in wrong, wrong
future.result()
dcp.save(state(2), storage_writer=writer)
""",
    )
    found = _steps(tmp_path, 2)
    assert sorted(found.values()) == [1, 2], found


def test_what_one_rank_cannot_save_as_asked_fails_on_all(tmp_path):
    _ranks(
        tmp_path,
        2,
        """
class Own(dcp.DefaultSavePlanner):
    pass

writer = es.dcp.Writer(out)
for n in (0, 1):
    planner = Own() if rank == n else None
    wrong = error(dcp.async_save, state(-1), storage_writer=writer, planner=planner)
    assert "everstep cannot use this Own" in wrong, wrong
    dcp.async_save(state(n), storage_writer=writer).result()
""",
    )
    assert sorted(_steps(tmp_path, 2).values()) == [0, 1]


_SPAWNED = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import torch.distributed.checkpoint as dcp
import everstep as es

def rank(number, out):
    dist.init_process_group("gloo", init_method=f"file://{out}.meeting", rank=number, world_size=2)
    for value in (1, 2):
        state = {f"w{r}": torch.full((9,), float(value)) for r in range(2)}
        dcp.save(state, storage_writer=es.dcp.Writer(f"{out}/step-1"))
        dcp.async_save(state, storage_writer=es.dcp.Writer(out)).result()
    dist.barrier()
    os._exit(0)  # See test_reshard.py.

if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1],), nprocs=2)
"""


def test_spawned_ranks_save_one_checkpoint(tmp_path, script, env):
    """Only the process group says which rank each of them is."""
    alone = subprocess.run(
        [sys.executable, script(_SPAWNED), str(tmp_path / "out")], env=env, capture_output=True, text=True, check=False
    )
    assert alone.returncode == 0, alone.stderr[-3000:]
    assert _steps(tmp_path, 2) == {"step-1": 2, "step-2": 1, "step-3": 2}


def test_ranks_spawned_under_everstep_run_save_one_checkpoint(tmp_path, script, everstep):
    ended = everstep("run", "--standalone", "--max-restarts", "0", script(_SPAWNED), str(tmp_path / "out"), timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert _steps(tmp_path, 2) == {"step-1": 2, "step-2": 1, "step-3": 2}


def test_nothing_is_published_if_ranks_save_different_steps(tmp_path):
    _ranks(
        tmp_path,
        2,
        """
for save in (dcp.save, dcp.async_save):
    wrong = error(save, state(1), storage_writer=es.dcp.Writer(f"{out}/step-{rank + 5}"))
    assert "same path on all ranks" in wrong, wrong
""",
    )
    assert _steps(tmp_path, 2) == {}


def test_ranks_that_do_not_save_with_all_others_are_told_at_once(tmp_path):
    """Waiting for those that do not take part would last until the store's timeout, longer than
    this test."""
    _ranks(
        tmp_path,
        3,
        """
groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
writer = es.dcp.Writer(out)
for group, members in zip(groups, ((0, 1), (1, 2))):
    for save in (dcp.save, dcp.async_save):
        if rank in members:
            wrong = error(save, state(1), storage_writer=writer, process_group=group)
            assert "with all ranks of the job" in wrong, wrong
        dist.barrier()
for save in (dcp.save, dcp.async_save):
    if rank == 1:
        wrong = error(save, state(1), storage_writer=writer, no_dist=True)
        assert "with all ranks of the job" in wrong, wrong
    dist.barrier()
    if rank == 0:
        wrong = error(save, state(1), storage_writer=writer, no_dist=True)
        assert "with all ranks of the job" in wrong, wrong
    dist.barrier()
whole = dist.new_group([0, 1, 2])
dcp.save(state(1), storage_writer=writer, process_group=whole)
dcp.async_save(state(2), storage_writer=writer, process_group=whole).result()
""",
    )
    assert _steps(tmp_path, 3) == {"step-1": 1, "step-2": 2}
