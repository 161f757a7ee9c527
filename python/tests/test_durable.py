"""A step captured for durable storage gets there, and only that step, whatever ends a start
before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from test_capture import _published, _under_agent

from everstep._internal import list_checkpoints


def _weight(directory: Path, rank: int) -> float:
    with safe_open(next(directory.glob(f"rank-{rank}.*")), "pt") as shard:
        return float(shard.get_tensor("model.weight").flatten()[0])


def _run(tmp_path: Path, text: str, *options: str) -> tuple[int, str, Path]:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(text)
    done = _under_agent(tmp_path, *options, str(script), str(out), timeout=100)
    return done.returncode, done.stderr, out


MIXED = """
import os, sys, time, torch, everstep
world, model = everstep.world(), torch.nn.Linear(2048, 1024)
ckpt = everstep.CheckpointManager(sys.argv[1], persist=10, persist_bandwidth=1 << 20, model=model)
for step in range(ckpt.restore() + 1, 11):
    torch.nn.init.constant_(model.weight, 1000 * world.attempt + step)
    if world.attempt == 0 and step == 10 and world.rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), 9)
    ckpt.step(step)
    if world.attempt == 0 and step == 10:
        time.sleep(60)
ckpt.wait("disk")
ckpt.close()
"""


def test_shards_of_two_generations_are_not_mixed(tmp_path):
    """Rank 0 still writes a step that rank 1 never completed. Both write it anew."""
    code, said, out = _run(tmp_path, MIXED, "--nproc-per-node", "2", "--max-restarts", "1")
    assert code == 0, said
    assert [_weight(out / "step-10", rank) for rank in (0, 1)] == [1010, 1010]


GIVES_UP = """
import sys, torch, everstep
ckpt = everstep.CheckpointManager(sys.argv[1], model=torch.nn.Linear(2048, 1024), persist=100000, persist_bandwidth=4_000_000)
for step in ckpt.steps(1000):
    if step == 9:
        raise ValueError("enough")
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_that_gives_up_leaves_its_last_step(tmp_path, restarts):
    """Even if the last start has completed no step of its own."""
    code, said, out = _run(tmp_path, GIVES_UP, "--max-restarts", str(restarts))
    assert code != 0
    assert _published(out) == {9}, said


# Another thread writes to the weights all the time, so that it writes during the copy, too, unless
# it gets no processor then.
TORN = """
import sys, threading, time, torch, everstep
model = torch.nn.Linear(3000, 3000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = everstep.CheckpointManager(sys.argv[1], persist=5, overlap=True, model=model, optimizer=optimizer)
over, writes = threading.Event(), threading.Event()
def write():
    while not over.is_set():
        model.weight.data.add_(1)
        writes.set()
thread = threading.Thread(target=write)
for step in range(ckpt.restore() + 1, 6):
    if step == 5:
        ckpt.wait()  # if an earlier snapshot is torn, this one may be complete when step() returns
        thread.start()
        writes.wait()
    ckpt.step(step)
time.sleep(0.2)
over.set()
thread.join()
model.weight.data.fill_(7)
ckpt.close() if sys.argv[2] == "close" else ckpt.save()
"""


@pytest.mark.parametrize("last", ["close", "save"])
def test_a_torn_snapshot_is_made_anew_at_the_end(tmp_path, last):
    script = tmp_path / "script.py"
    script.write_text(TORN)
    for attempt in range(5):
        out = tmp_path / f"out-{attempt}"
        done = _under_agent(tmp_path, str(script), str(out), last)
        assert done.returncode == 0, done.stderr
        if "the snapshot of step 5 was discarded" in done.stderr:
            break
    else:
        pytest.fail(f"the snapshot was torn in no attempt: {done.stderr}")
    assert _published(out) == {5}
    assert _weight(out / "step-5", 0) == 7


SAVED_TWICE = """
import sys, torch, everstep
model = torch.nn.Linear(1024, 512)
ckpt = everstep.CheckpointManager(sys.argv[1], model=model, persist=5, persist_bandwidth=2 << 20)
for step in range(ckpt.restore() + 1, 6):
    ckpt.step(step)
model.weight.data.fill_(7)
ckpt.save()
print("saved", flush=True)
"""


def test_a_save_of_a_step_that_was_due_waits_for_its_own_checkpoint(tmp_path):
    code, said, out = _run(tmp_path, SAVED_TWICE)
    assert code == 0, said
    assert 7.0 in {_weight(path, 0) for path in out.glob("step-5*") if path.is_dir()}, [*out.iterdir()]


NOT_CLOSED = """
import sys, torch, everstep
def main():
    ckpt = everstep.CheckpointManager(sys.argv[1], persist=1, keep=9, persist_bandwidth=2 << 20, model=torch.nn.Linear(1024, 512))
    for step in range(ckpt.restore() + 1, 6):
        ckpt.step(step)
main()
"""


def test_a_script_without_close_leaves_what_was_due(tmp_path):
    code, said, out = _run(tmp_path, NOT_CLOSED)
    assert code == 0, said
    assert _published(out) == {1, 2, 3, 4, 5}


SPAWNED = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import everstep as es

def rank(number, out):
    dist.init_process_group("gloo", init_method=f"file://{out}.{os.getppid()}", rank=number, world_size=2)
    model = torch.nn.Linear(1, 1)
    ckpt = es.CheckpointManager(out, model=model, persist=1)
    done = ckpt.restore()
    assert done == 0 or model.weight.item() == number, (done, model.weight)
    torch.nn.init.constant_(model.weight, number)
    ckpt.step(done + 1)
    ckpt.close()
    dist.barrier()
    os._exit(0)  # See test_reshard.py.

if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1],), nprocs=2)
"""


def test_spawned_ranks_without_an_agent_save_one_checkpoint(tmp_path, env):
    """Only the process group says which rank each of them is."""
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SPAWNED)
    for _ in range(2):
        alone = subprocess.run([sys.executable, script, out], env=env, capture_output=True, text=True, check=False)
        assert alone.returncode == 0, alone.stderr[-3000:]
    assert {s.step: s.world_size for s in list_checkpoints(out)} == {1: 2, 2: 2}
