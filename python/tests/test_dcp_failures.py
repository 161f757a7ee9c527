"""Saves through DCP under everstep run that fail on one rank, or are cut off by a restart: nobody
waits for ever, and no checkpoint holds parts of two saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import everstep as es
from everstep.dcp import stores

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_BEGIN = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
import everstep as es
from everstep.dcp import stores
dist.init_process_group("gloo")
rank, out = dist.get_rank(), sys.argv[1]
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
store = dist.distributed_c10d._get_default_store()

def state(value):
    return {f"w{r}": torch.full((9,), float(value)) for r in range(dist.get_world_size())}

def blocked(step):
    # The directory that the agent writes the step to, without the mark that it waits for: it does not
    # write before the workers are gone.
    mark = json.load(open(f"{out}/step-1/everstep-mark.json"))
    return f"{out}/step-{step}.tmp-{mark['epoch']}.{mark['generation']}"

def error(save, *args, **options):
    try:
        future = save(*args, **options)
        if save is dcp.async_save:
            future.result()
    except BaseException as e:
        return str(e)
    raise AssertionError("saved")
"""
_END = """
dist.barrier()
os._exit(0)  # See test_reshard.py.
"""


@pytest.fixture
def job(everstep, script, tmp_path):
    """Runs a script on two ranks. Returns what each checkpoint holds."""

    def run(text: str, restarts: int = 0) -> dict[str, float]:
        options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
        ended = everstep("run", *options, script(_BEGIN + text + _END), str(tmp_path / "out"), timeout=120)
        assert ended.returncode == 0, ended.stderr[-4000:]
        return _found(tmp_path / "out")

    return run


def _found(out: Path) -> dict[str, float]:
    found = {}
    for manifest in out.glob("step-*/manifest.json"):
        if ".tmp" in manifest.parent.name:
            continue
        state = {f"w{r}": torch.zeros(9) for r in range(2)}
        dcp.load(state, storage_reader=es.dcp.Reader(manifest.parent), no_dist=True)
        (value,) = {x.item() for t in state.values() for x in t}
        found[manifest.parent.name] = value
    return found


def test_a_rank_that_fails_fails_the_save_of_all(job):
    found = job("""
class Fails(dcp.DefaultSavePlanner):
    def __init__(self, where):
        super().__init__()
        self.where = where
    def finish_plan(self, plan):
        if self.where == "finish":
            raise OSError("gone")
        return super().finish_plan(plan)
    def resolve_data(self, item):
        if self.where == "data":
            raise OSError("gone")
        return super().resolve_data(item)

writer = es.dcp.Writer(out)
for n, (failing, where) in enumerate([(0, "data"), (1, "data"), (0, "finish"), (1, "finish")], 1):
    wrong = error(dcp.save, state(-n), storage_writer=writer, planner=Fails(where if rank == failing else ""))
    assert "gone" in wrong, wrong
    dcp.save(state(n), storage_writer=writer)

capture = stores.AgentStore.capture

def fails(self, step, items):
    raise OSError("no memory")

for n, failing in ((5, 0), (6, 1)):
    if rank == failing:
        stores.AgentStore.capture = fails
    wrong = error(dcp.async_save, state(-n), storage_writer=writer)
    assert "no memory" in wrong, wrong
    stores.AgentStore.capture = capture
    dcp.async_save(state(n), storage_writer=writer).result()
# Nothing that has failed holds up the change to another directory.
dcp.save(state(7), storage_writer=es.dcp.Writer(out + "/other"))
""")
    assert sorted(found.values()) == [1, 2, 3, 4, 5, 6], found


def test_a_number_of_a_save_that_has_failed_is_not_used_again(job):
    """Rank 1 raises it: step 10 is still in its memory. Its agent writes its part of what rank 0
    fails to save."""
    found = job("""
class Fails(dcp.DefaultSavePlanner):
    def resolve_data(self, item):
        if rank == 0:
            raise OSError("gone")
        return super().resolve_data(item)

held = stores.AgentStore.held
stores.AgentStore.held = lambda self: max(held(self), 10 if rank == 1 else 0)
writer = es.dcp.Writer(out)
assert "gone" in error(dcp.save, state(-1), storage_writer=writer, planner=Fails())
dcp.save(state(1), storage_writer=writer)
named = es.dcp.Writer(f"{out}/step-50")
assert "gone" in error(dcp.save, state(-2), storage_writer=named, planner=Fails())
assert "use increasing numbers" in error(dcp.save, state(2), storage_writer=named)
dcp.async_save(state(3), storage_writer=writer).result()
""")
    assert found == {"step-12": 1, "step-51": 3}


def test_what_failed_for_one_directory_is_not_saved_to_another(job, tmp_path):
    """All ranks have it in memory, and the agent has not begun to write it when the directory
    changes."""
    job("""
write = stores.AgentStore.write

def fails(self, step, room):
    if rank == 0 and step % 2:
        raise OSError("gone")
    return write(self, step, room)

stores.AgentStore.write = fails
for n in range(1, 11):
    assert "gone" in error(dcp.save, state(-n), storage_writer=es.dcp.Writer(f"{out}/step-{10 * n + 1}"))
    dcp.save(state(n), storage_writer=es.dcp.Writer(f"{out}/b/step-{10 * n + 2}"))
""")
    assert _found(tmp_path / "out" / "b") == {f"step-{10 * n + 2}": n for n in range(1, 11)}


def test_what_was_left_for_another_directory_does_not_hold_up_saves(job, tmp_path):
    job(
        """
a, b = es.dcp.Writer(out), es.dcp.Writer(out + "/b")
if restarts == 0:
    dcp.save(state(1), storage_writer=a)
    # As many as there are slots, on both ranks: none of them is written.
    for step in range(2, 6):
        if rank == 0:
            os.mkdir(blocked(step))
    for step in range(2, 6):
        dcp.async_save(state(-step), storage_writer=a)
    store.set(f"captured/{rank}", "")
    store.get(f"captured/{1 - rank}")
    os.kill(os.getpid(), signal.SIGKILL)
stores.PATIENCE = 20
dcp.save(state(6), storage_writer=b)
""",
        1,
    )
    assert list(_found(tmp_path / "out" / "b").values()) == [6]


_CUT_OFF = """
writer = es.dcp.Writer(out)
if restarts == 0:
    dcp.save(state(1), storage_writer=writer)
    if rank == 0:
        os.mkdir(blocked(STEP))
    else:
        def dies(self, step, items):
            store.get("captured")
            os.kill(os.getpid(), signal.SIGKILL)
        stores.AgentStore.capture = dies
    dcp.async_save(state(-1), storage_writer=WRITER)
    store.set("captured", "")
    time.sleep(60)
if rank == 0:
    os.rmdir(blocked(STEP))
dist.barrier()
back = state(0)
dcp.load(back, storage_reader=es.dcp.Reader(out))
assert back["w0"][0] == back["w1"][0] == 1
"""


@pytest.mark.parametrize("kind", ["save", "async_save"])
def test_a_number_that_a_rank_still_has_in_memory_is_not_used_again(job, kind):
    text = _CUT_OFF.replace("WRITER", "writer").replace("STEP", "2")
    found = job(
        f"{text}\nsaved = dcp.{kind}(state(2), storage_writer=writer)\nif '{kind}' != 'save': saved.result()", 1
    )
    assert found == {"step-1": 1, "step-3": 2}


def test_a_number_that_is_given_again_is_of_the_new_save_alone(job):
    """The user names the same step again, of which rank 0 still has the old part in memory."""
    text = _CUT_OFF.replace("WRITER", "es.dcp.Writer(f'{out}/step-5')").replace("STEP", "5")
    found = job(
        f"{text}\nfor n in (2, 3): dcp.save(state(n), storage_writer=es.dcp.Writer(f'{{out}}/step-{{n + 3}}'))", 1
    )
    assert found == {"step-1": 1, "step-5": 2, "step-6": 3}


def test_what_all_ranks_had_in_memory_is_kept_beside_what_they_save_after_a_restart(job):
    found = job(
        """
writer = es.dcp.Writer(out)
if restarts == 0:
    dcp.save(state(1), storage_writer=writer)
    if rank == 0:
        os.mkdir(blocked(2))
    dcp.async_save(state(100), storage_writer=writer)
    store.set(f"captured/{rank}", "")
    store.get(f"captured/{1 - rank}")
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    os.rmdir(blocked(2))
dist.barrier()
dcp.async_save(state(2), storage_writer=writer).result()
""",
        1,
    )
    assert found == {"step-1": 1, "step-2": 100, "step-3": 2}


def test_several_ranks_without_a_process_group_are_told(everstep, script, tmp_path):
    text = """
import os, sys
import torch
import torch.distributed.checkpoint as dcp
import everstep as es

for save in (dcp.save, dcp.async_save):
    if os.environ["RANK"] == "0":
        try:
            future = save({"w": torch.ones(9)}, storage_writer=es.dcp.Writer(sys.argv[1]))
            save is dcp.save or future.result()
        except BaseException as e:
            assert "there is no process group" in str(e), e
        else:
            raise AssertionError("saved")
"""
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "0"]
    ended = everstep("run", *options, script(text), str(tmp_path / "out"), timeout=120)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert _found(tmp_path / "out") == {}


def test_a_failure_is_known_to_whoever_asks_while_it_is_noted():
    class Noted(dict):
        """Calls as a save of another thread would between any two instructions."""

        def pop(self, step, default=None):
            found = super().pop(step, default)
            if found is not None:
                said.append(store._end(step))
            return found

    said: list[str | None] = []
    store = object.__new__(stores.AgentStore)
    pending = Noted({7: stores._Pending(store, 0)})
    with pytest.MonkeyPatch.context() as m:
        m.setattr(stores.AgentStore, "_under_way", pending)
        m.setattr(stores.AgentStore, "_ended", {})
        m.setattr(stores.AgentStore, "_look", lambda self, step, pending: (True, "gone"))
        store._settle()
        with pytest.raises(es.CheckpointError, match="gone"):
            store.publish(7, [], fixed=False)
    assert said == ["gone"]
