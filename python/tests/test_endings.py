"""A finished training is never repeated, and an unfinished one never counts as finished.

Tested with real workers that end in every way.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

#: A DDP script that never imports everstep. It logs each of 12 steps and then runs `END`; `EARLY`
#: runs before a step.
SCRIPT = """
import atexit, os, sys, threading, time
import torch, torch.distributed as dist

rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
others = [r for r in range(int(os.environ["WORLD_SIZE"])) if r != rank]
place = os.environ["OUT"]


def note(what):
    with open(f"{place}/{what}-{rank}", "a") as file:
        file.write(f"{life}\\n")


def others_are_gone():
    while not all(os.path.exists(f"{place}/ended-{r}") for r in others):
        time.sleep(0.01)
    time.sleep(0.2)


dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 13):
    exec(os.environ.get("EARLY", ""))
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    note("step")
if "KEEP" not in os.environ:
    dist.destroy_process_group()
exec(os.environ.get("END", ""))
note("ended")
"""


@pytest.fixture
def ending(everstep, script, tmp_path):
    """Runs the script with an end. Returns the result, and how many steps each rank has logged."""

    def run(*options: str, ranks: int = 2, **how: str):
        out = tmp_path / "out"
        out.mkdir()
        line = ["run", "--standalone", "--name", "job", "--nproc-per-node", str(ranks), *options, script(SCRIPT)]
        done = everstep(*line, timeout=90, OUT=str(out), **how)
        steps = [len((out / f"step-{rank}").read_text().split()) for rank in range(ranks)]
        return done, steps

    return run


#: How rank 1 ends after its last step, while rank 0 ends normally.
ENDS = {
    "abort-first": "time.sleep(0.5) if rank == 0 else os.abort()",
    "abort-at-exit": "if rank == 1: atexit.register(os.abort); atexit.register(others_are_gone)",
    "os-exit-at-exit": "if rank == 1: atexit.register(os._exit, 3)",
    "exception": "if rank == 1: others_are_gone(); raise OSError('no space left for the picture')",
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("leave", ["raise SystemExit(3)", "exit(1)", "raise SystemExit('no more data')"])
def test_an_exit_code_in_the_middle_is_a_failure(ending, ranks, leave):
    done, steps = ending(ranks=ranks, EARLY=f"if step == 8: {leave}")
    assert (done.returncode, steps) == (1, [7] * ranks), done.stderr
    assert "counts as finished" not in done.stderr, done.stderr


@pytest.mark.parametrize("end", ENDS)
def test_a_finished_training_is_not_done_again(ending, end):
    done, steps = ending(END=ENDS[end])
    assert (done.returncode, steps) == (0, [12, 12]), done.stderr
    assert "counts as finished" in done.stderr, done.stderr


def test_a_single_rank_that_aborts_at_exit_has_finished(ending):
    done, steps = ending(ranks=1, END="atexit.register(os.abort)")
    assert (done.returncode, steps) == (0, [12]), done.stderr


def test_a_rank_in_the_middle_beside_one_that_has_ended_fails_the_job(ending):
    early = """
if rank == 0 and step == 8:
    note("ended"), os._exit(0)
if rank == 1 and step == 7:
    optimizer.register_step_pre_hook(lambda *_: (others_are_gone(), os.abort()))
"""
    done, steps = ending(EARLY=early)
    assert done.returncode == 1 and steps == [7, 6], (steps, done.stderr)
    assert "the training is not finished" in done.stderr, done.stderr


#: Rank 1 leaves at the top of an iteration, in the middle of the training.
LEAVES = {
    "exit": "if rank == 1 and step == 7: sys.exit(0)",
    "os-exit": "if rank == 1 and step == 7: os._exit(0)",
}


@pytest.mark.parametrize("leave", LEAVES)
def test_a_rank_that_needs_one_that_has_left_has_not_finished(ending, leave):
    done, steps = ending(EARLY=LEAVES[leave])
    assert (done.returncode, steps) == (1, [6, 6]), done.stderr
    assert "rank 1 finished after step 6" in done.stderr, done.stderr
    assert "counts as finished" not in done.stderr, done.stderr


#: Rank 1 leaves a second training in its first step, after its backward pass.
SECOND = """
second = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
other = torch.optim.Adam(second.parameters())
for number in range(6):
    other.zero_grad()
    second(torch.ones(3, 4)).sum().backward()
    if rank == 1: LEAVE
    other.step()
"""


@pytest.mark.parametrize("leave", ["sys.exit(0)", "os._exit(0)"])
def test_a_second_training_that_one_rank_leaves_is_not_finished(ending, leave):
    done, steps = ending(END=SECOND.replace("LEAVE", leave), KEEP="1")
    assert steps == [12, 12]
    assert done.returncode == 1 and "counts as finished" not in done.stderr, done.stderr


def test_a_barrier_without_the_others_after_the_last_step_is_no_failure(ending):
    done, steps = ending(END="if rank == 0: others_are_gone(); dist.barrier()", KEEP="1")
    assert (done.returncode, steps) == (0, [12, 12]), done.stderr
    assert "counts as finished" in done.stderr and "Connection closed" in done.stderr, done.stderr


def test_a_script_that_fails_at_its_end_has_not_finished(ending):
    done, steps = ending(END="sys.exit(3)")
    assert done.returncode == 1 and steps == [12, 12], done.stderr
    assert "no rank has used an everstep.CheckpointManager" in done.stderr


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise OSError('no space left')"])
def test_a_crash_at_exit_does_not_hide_that_the_script_has_failed(ending, end):
    """torch aborts now and then at interpreter shutdown; the error that the script reported before
    counts."""
    done, steps = ending(
        END=f"atexit.register(os.abort); atexit.register(os.write, 2, b'terminate called without an active exception\\n'); {end}"
    )
    assert done.returncode == 1 and steps == [12, 12], done.stderr
    assert "no rank has used an everstep.CheckpointManager" in done.stderr and "SIGABRT" not in done.stderr, done.stderr


_CAUGHT = "try: sys.exit(3)\nexcept SystemExit: pass\n"


@pytest.mark.parametrize("when", ["before a step", "after the last one"])
def test_an_exit_code_that_the_script_has_caught_is_not_its_own(ending, when):
    how = {"END": "atexit.register(os.abort)"}
    if when == "before a step":
        how["EARLY"] = f"if step == 3:\n  kept = []\n  {_CAUGHT.replace('pass', 'kept.append(sys.exc_info())')}"
        how["EARLY"] = how["EARLY"].replace("\nexcept", "\n  except")
    else:
        how["END"] = _CAUGHT + how["END"]
    done, steps = ending(ranks=1, **how)
    assert (done.returncode, steps) == (0, [12]), done.stderr
    assert "counts as finished" in done.stderr, done.stderr


def test_an_exception_without_a_way_back_ends_the_job_unless_restarts_are_given(ending, tmp_path):
    early = "if step == 6 and rank == 1 and life == 0: raise ValueError('odd batch')"
    done, steps = ending(EARLY=early)
    assert done.returncode == 1 and steps == [5, 5], (steps, done.stderr)
    assert "no rank has used an everstep.CheckpointManager" in done.stderr
    os.rename(tmp_path / "out", tmp_path / "first")
    done, steps = ending("--max-restarts", "1", EARLY=early)
    assert done.returncode == 0 and steps == [17, 17], (steps, done.stderr)


#: Rank 0 fails because rank 1 drops its connections. Rank 1's own error comes after that.
ECHO_FIRST = """
if step == 6 and rank == 0:
    inner = sys.excepthook
    sys.excepthook = lambda *how: (inner(*how), note("failed"))
if step == 6 and rank == 1:
    import contextlib, socket
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername():
                end.shutdown(socket.SHUT_RDWR)
    while not os.path.exists(f"{place}/failed-0"):
        time.sleep(0.01)
    raise ValueError("odd batch")
"""


def test_an_echo_that_came_first_does_not_make_explain_claim_a_restart(ending, everstep):
    done, steps = ending(EARLY=ECHO_FIRST)
    assert done.returncode == 1 and steps == [5, 5], (steps, done.stderr)
    told = everstep("explain").stdout
    assert "Done     ended the job" in told and "restarted the processes" not in told, told


def test_a_kill_without_checkpoints_still_restarts(ending):
    done, steps = ending(EARLY="if step == 6 and rank == 1 and life == 0: os.kill(os.getpid(), 9)")
    assert done.returncode == 0 and steps == [17, 17], (steps, done.stderr)


def test_a_finished_training_is_not_done_again_with_restarts_to_spare(ending):
    done, steps = ending("--max-restarts", "3", END="if rank == 1: os.abort()")
    assert (done.returncode, steps) == (0, [12, 12]), done.stderr


#: The same with everstep's checkpoints. Logs the steps that each life has computed.
CHECKPOINTED = """
import atexit, os, time
import sys, torch, torch.distributed as dist, everstep

model = torch.nn.Linear(4, 2)
if os.environ.get("DDP"):
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = everstep.CheckpointManager(os.environ["OUT"] + "/ck", model=model, optimizer=optimizer)
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in ckpt.steps(12):
    if step == int(os.environ.get("BREAK", 12)):
        break
    exec(os.environ.get("EARLY", ""))
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    with open(f"{os.environ['OUT']}/step-{rank}", "a") as file:
        file.write(f"{life}\\n")
exec(os.environ.get("END", ""))
"""


@pytest.fixture
def checkpointed(everstep, script, tmp_path):
    """Runs the script with everstep's checkpoints. Returns the result, and the life of each step of
    each rank."""

    def run(*options: str, **how: str):
        out = tmp_path / "out"
        out.mkdir()
        line = ["run", "--standalone", "--name", "job", "--nproc-per-node", "2", *options, script(CHECKPOINTED)]
        done = everstep(*line, timeout=90, OUT=str(out), **how)
        return done, [Path(out / f"step-{rank}").read_text().split() for rank in range(2)]

    return run


def test_a_crash_at_exit_beside_checkpoints_is_no_restart(checkpointed):
    done, steps = checkpointed(END="if rank == 1: atexit.register(os.abort)")
    assert done.returncode == 0 and "counts as finished" in done.stderr, done.stderr
    assert steps == [["0"] * 12] * 2


@pytest.mark.parametrize("leave", ["sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_leaves_before_the_last_of_its_steps_has_not_finished(checkpointed, leave):
    done, steps = checkpointed(DDP="1", EARLY=f"if rank == 1 and step == 6: {leave}")
    assert (done.returncode, steps) == (1, [["0"] * 6] * 2), done.stderr
    assert "rank 1 finished at step 6 of 12" in done.stderr, done.stderr
    assert "counts as finished" not in done.stderr, done.stderr


def test_leaving_the_loop_together_is_a_normal_end(checkpointed):
    done, steps = checkpointed(DDP="1", BREAK="6")
    assert (done.returncode, steps) == (0, [["0"] * 6] * 2), done.stderr
    assert "counts as finished" not in done.stderr, done.stderr
