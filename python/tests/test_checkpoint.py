"""CheckpointManager: bit-exact resume, with and without an agent.

Damage is found and nothing is lost.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep as es
from everstep._internal import list_checkpoints
from harness.ranks import run_ranks


def _model(width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@es.resumable
def _batch(kind: str = "train") -> torch.Tensor:
    return torch.randn(6, 4) + random.random()


def _train(directory: Path, total: int, prefetch: bool, overlap: bool) -> list[float]:
    model, optimizer = _model()
    torch.manual_seed(1)
    random.seed(1)
    batch = es.resumable(_batch.fn)
    ckpt = es.CheckpointManager(directory, persist=3, overlap=overlap, model=model, optimizer=optimizer, data=batch)
    losses = []
    n = ckpt.restore()
    x = batch() if prefetch else None
    while n < total:
        x = x if prefetch else batch()
        loss = model(x).square().mean()
        if prefetch:
            x = batch()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        n += 1
        ckpt.step(n, last=loss.item())
    ckpt.wait()
    return losses


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_resumed_run_equals_an_undisturbed_one(tmp_path, prefetch, overlap):
    whole = _train(tmp_path / "whole", 12, prefetch, overlap)
    assert whole == _train(tmp_path / "again", 12, prefetch, overlap), "two undisturbed runs must agree first"
    first = _train(tmp_path / "cut", 7, prefetch, overlap)  # the last durable step is 6
    rest = _train(tmp_path / "cut", 12, prefetch, overlap)
    assert first == whole[:7] and rest == whole[6:]


def test_extra_values_come_back(tmp_path):
    _train(tmp_path, 6, False, False)
    model, optimizer = _model()
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, data=es.resumable(_batch.fn))
    assert ckpt.restore() == 6 and isinstance(ckpt.extra["last"], float)
    assert ckpt.latest_step("disk") == 6


def test_an_extra_value_may_be_called_metrics(tmp_path):
    """`metrics` used to be a parameter that nothing read."""
    ckpt = es.CheckpointManager(tmp_path, persist=1, model=torch.nn.Linear(1, 1))
    ckpt.step(1, metrics={"loss": 0.5})
    ckpt.close()
    again = es.CheckpointManager(tmp_path, model=torch.nn.Linear(1, 1))
    assert again.restore() == 1 and again.extra == {"metrics": {"loss": 0.5}}


def test_another_model_shows_what_differs(tmp_path):
    _train(tmp_path, 3, False, False)
    model, optimizer = _model(width=9)
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, data=es.resumable(_batch.fn))
    with pytest.raises(
        es.CheckpointError, match=r"model\.0\.weight: shape \[8, 4\] in the checkpoint, \[9, 4\] in the model"
    ):
        ckpt.restore()
    other = nn.Linear(4, 8).double()
    with pytest.raises(es.CheckpointError, match="a different model"):
        es.CheckpointManager(tmp_path, model=other).restore()


class _Data:
    epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


@pytest.mark.parametrize("before", [0, 3], ids=["the first step of all", "the first step after a restart"])
def test_a_step_that_ends_an_epoch_is_durable(tmp_path, before):
    data = _Data()
    ckpt = es.CheckpointManager(tmp_path, persist=3, model=nn.Linear(2, 2), data=data)
    assert ckpt.restore() == 0
    for step in range(before):
        ckpt.step(step + 1)
    data = _Data()
    ckpt = es.CheckpointManager(tmp_path, persist=1000, model=nn.Linear(2, 2), data=data)
    assert ckpt.restore() == before and data.epoch == 0
    data.epoch = 1
    ckpt.step(before + 1)
    assert ckpt.latest_step("disk") == before + 1
    ckpt.step(before + 2)
    assert ckpt.latest_step("disk") == before + 1


def _damage(path: Path, where: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[where % len(data)] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["flip-shard", "cut-shard", "flip-manifest", "cut-manifest", "no-shard"])
def test_damage_is_found_and_the_older_checkpoint_is_used(tmp_path, what):
    _train(tmp_path, 7, False, False)  # steps 3 and 6 are durable
    newest = tmp_path / "step-6"
    target = newest / ("manifest.json" if "manifest" in what else "rank-0.safetensors")
    if what.startswith("flip"):
        _damage(target, 12345, 3)
    elif what.startswith("cut"):
        target.write_bytes(target.read_bytes()[:-7])
    else:
        target.unlink()
    model, optimizer = _model()
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, data=es.resumable(_batch.fn))
    with pytest.warns(UserWarning, match="skipping a checkpoint"):
        assert ckpt.restore() == 3


def test_only_unreadable_checkpoints_are_never_buried(tmp_path):
    _train(tmp_path, 7, False, False)
    for step in (3, 6):
        _damage(tmp_path / f"step-{step}" / "rank-0.safetensors", 999, 1)
    model, optimizer = _model()
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, data=es.resumable(_batch.fn))
    with (
        pytest.warns(UserWarning, match="skipping a checkpoint"),
        pytest.raises(es.CheckpointError, match="starting from scratch would hide them"),
    ):
        ckpt.restore()
    assert (tmp_path / "step-6").exists()


def test_every_kind_of_damage_to_a_small_shard(tmp_path):
    """Damage to every byte of header and manifest, and to a thousand other bits, is noticed."""
    _train(tmp_path, 3, False, False)
    checkpoint = tmp_path / "step-3"
    rng = random.Random(5)
    flips = 0
    for name in ("manifest.json", "rank-0.safetensors"):
        good = (checkpoint / name).read_bytes()
        head = struct.unpack("<Q", good[:8])[0] + 8 if name.startswith("rank") else len(good)
        places = [*range(0, head, 7), *(rng.randrange(len(good)) for _ in range(500))]
        for place in places:
            bad = bytearray(good)
            bad[place] ^= 1 << rng.randrange(8)
            (checkpoint / name).write_bytes(bad)
            flips += 1
            listed = es._internal.list_checkpoints(str(tmp_path))
            if listed[0].wrong is None:
                with pytest.raises(es.CheckpointError):
                    es._internal.open_shard(str(checkpoint), 0).verify()
        (checkpoint / name).write_bytes(good)
    es._internal.open_shard(str(checkpoint), 0)
    print(f"corruption: {flips} flips, 0 undetected")


def test_a_shard_is_a_standard_safetensors_file(tmp_path):
    from safetensors.torch import load_file

    _train(tmp_path, 3, False, False)
    tensors = load_file(tmp_path / "step-3" / "rank-0.safetensors")
    assert tensors["model.0.weight"].shape == (8, 4)


def test_read_only_and_impossible_directories(tmp_path):
    model, optimizer = _model()
    (tmp_path / "file").write_text("x")
    with pytest.raises(es.CheckpointError, match="give another one"):
        es.CheckpointManager(tmp_path / "file" / "sub", model=model, optimizer=optimizer)
    with pytest.raises(es.CheckpointError, match=r"read-only|give another one"):
        es.CheckpointManager("/proc/1", model=model, optimizer=optimizer)


def test_no_state_and_wrong_state_are_refused():
    with pytest.raises(TypeError, match="pass model="):
        es.CheckpointManager("x")
    with pytest.raises(TypeError, match=r"everstep\.resumable"):
        es.CheckpointManager("x", data=lambda: 1)


def test_a_full_disk_loses_nothing(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        _train(mount, 3, False, False)
        ckpt = es.CheckpointManager(mount / "large", persist=1, model=nn.Linear(400, 400))
        with pytest.raises(es.CheckpointError, match=r"cannot write the checkpoint .*earlier checkpoints are kept"):
            ckpt.step(10)
        assert [row.step for row in es._internal.list_checkpoints(str(mount)) if row.wrong is None] == [3]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_calls_are_no_ops_outside(tmp_path):
    code = "import everstep as e, sys; e.heartbeat(3); e.should_stop(); print(e.world().world_size, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "1 False\n"


SCRIPT = """
import sys, torch, everstep
from torch import nn
model = nn.Linear({width}, {width})
opt = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = everstep.CheckpointManager({out!r}, persist={persist}, model=model, optimizer=opt)
for step in ckpt.steps(6):
    opt.zero_grad(); model(torch.ones(2, {width})).sum().backward(); opt.step()
    if step == 3 and everstep.world().attempt == 0: {at_three}
    print("step", step, flush=True)
"""


def _script(script, tmp_path, *, width: int = 8, persist: int = 0, at_three: str = "pass") -> str:
    return script(SCRIPT.format(width=width, out=str(tmp_path / "out"), persist=persist, at_three=at_three))


def test_a_damaged_arena_falls_back_to_the_step_before(everstep, script, tmp_path):
    damage = """
        from pathlib import Path; import os
        slots = Path(os.environ["EVERSTEP_BOARD"]).parent.glob("local-0-slot-*")
        newest = max(slots, key=lambda p: int.from_bytes(p.open("rb").read(56)[48:], "little"))
        file = newest.open("r+b"); file.seek(4096 + 10); byte = file.read(1)[0]  # in place: the agent has it mapped
        file.seek(4096 + 10); file.write(bytes([byte ^ 4])); file.close()
        os.kill(os.getpid(), 9)
"""
    at_three = "\n" + "\n".join(line for line in damage.splitlines() if line)
    done = everstep("run", "--standalone", "--max-restarts", "2", _script(script, tmp_path, at_three=at_three))
    assert done.returncode == 0, done.stderr
    # Step 3 was sealed (step 2 had been sealed in another slot). Its slot is damaged, so step 2
    # runs again.
    assert done.stdout.split() == [
        "step",
        "0",
        "step",
        "1",
        "step",
        "2",
        "step",
        "2",
        "step",
        "3",
        "step",
        "4",
        "step",
        "5",
    ], done.stdout


def test_shared_memory_too_small_falls_back_to_a_directory(everstep, script, tmp_path):
    small = tmp_path / "shm"
    small.mkdir()
    if (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(small)], capture_output=True, check=False
        ).returncode
        != 0
    ):
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        path = _script(script, tmp_path, width=2000, at_three="import os; os.kill(os.getpid(), 9)")
        done = everstep("run", "--standalone", "--max-restarts", "1", path, EVERSTEP_SHM_DIR=str(small))
        assert done.returncode == 0, done.stderr
        assert "do not fit into shared memory" in done.stderr and "--shm-size" in done.stderr
        assert done.stdout.split() == ["step", "0", "step", "1", "step", "2", "step", "3", "step", "4", "step", "5"], (
            done.stdout
        )
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_stop_makes_the_last_step_durable(env, script, tmp_path):
    import signal
    import time

    from conftest import EVERSTEP

    text = SCRIPT.format(width=8, out=str(tmp_path / "out"), persist=1000, at_three="pass").replace(
        "steps(6)", "steps(100000)"
    )
    ready = tmp_path / "ready"
    text = text.replace(
        'print("step", step, flush=True)',
        f"import time; time.sleep(0.02); step == 10 and open({str(ready)!r}, 'w').close()",
    )
    run = subprocess.Popen([EVERSTEP, "run", "--standalone", "--nproc-per-node", "2", script(text)], env=env)
    deadline = time.monotonic() + 30
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    assert run.wait(40) == 143
    (row,) = es._internal.list_checkpoints(str(tmp_path / "out"))
    assert row.step > 5 and row.world_size == 2 and row.wrong is None


def test_the_last_step_waits_for_slots_that_are_being_written_out(everstep, script, tmp_path):
    """Makes every step durable, half a second each, so that memory is full when the loop ends."""
    path = script(
        """
import torch, everstep as es
model = torch.nn.Linear(1024, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = es.CheckpointManager("out", persist=1, persist_bandwidth=4 << 20, model=model, optimizer=optimizer)
step = ckpt.restore()
while step < 9:
    step += 1
    ckpt.step(step)
ckpt.close()
""",
    )
    done = everstep("run", "--standalone", "--max-restarts", "0", path)
    assert done.returncode == 0, done.stderr
    assert max(row.step for row in list_checkpoints(tmp_path / "out")) == 9


def test_a_step_that_is_saved_again_while_it_is_written(everstep, script, tmp_path):
    """The user saves a step that is being written for recovery.

    Both are complete, and the user's stays.
    """
    path = script(
        """
import torch, everstep as es
model = torch.nn.Linear(1024, 256)
ckpt = es.CheckpointManager("out", persist=1, keep=1, persist_bandwidth=8 << 20, model=model)
step = ckpt.restore()
while step < 5:
    step += 1
    ckpt.step(step)
    if step in (2, 4):
        ckpt.save(step, block=step == 2)
        ckpt.save(step)
ckpt.close()
""",
    )
    done = everstep("run", "--standalone", "--max-restarts", "0", path)
    assert done.returncode == 0, done.stderr
    assert [(row.step, row.wrong) for row in list_checkpoints(tmp_path / "out")] == [(5, None), (4, None), (2, None)]
    verified = everstep("ckpt", "verify", "out")
    assert verified.returncode == 0, verified.stderr


def test_who_asks_for_the_end_again_does_not_wait_for_the_disk(env, script, tmp_path):
    import signal
    import time

    from conftest import EVERSTEP

    path = script(
        "import torch, everstep\n"
        "m = torch.nn.Linear(2048, 4096)\n"
        f"ckpt = everstep.CheckpointManager({str(tmp_path / 'out')!r}, model=m, persist=100000, persist_bandwidth=1_000_000)\n"
        "for step in ckpt.steps(1000):\n"
        "    if step == 9: raise ValueError('enough')\n"
    )
    run = subprocess.Popen(
        [EVERSTEP, "run", "--standalone", "--max-restarts", "0", path], env=env, stderr=subprocess.PIPE, text=True
    )
    assert run.stderr is not None
    # 32 MiB at 1 MB/s would take half a minute from here.
    said = next(line for line in run.stderr if "exited with code 1" in line)
    deadline = time.monotonic() + 30
    while not any((tmp_path / "out").glob("step-*.tmp-*/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    rest = run.stderr.read()
    assert run.wait(20) == 1, said + rest
    assert "not waiting for step 9" in rest, rest


def test_the_next_agent_adopts_what_a_killed_one_left_in_memory(env, everstep, script, tmp_path):
    import time

    from conftest import EVERSTEP

    path = _script(script, tmp_path, at_three="open('held', 'w').write('x'); import time; time.sleep(60)")
    line = [EVERSTEP, "run", "--standalone", "--name", "adopt", path]
    first = subprocess.Popen(line, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / "held").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    first.kill()
    assert first.communicate()[0].split() == ["step", "0", "step", "1", "step", "2"]
    path = _script(script, tmp_path)
    done = everstep("run", "--standalone", "--name", "adopt", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["step", "3", "step", "4", "step", "5"], done.stdout


_SKEWED = """
import os, sys, time
from datetime import timedelta
rank = int(os.environ["RANK"])
real = time.monotonic
# The clock of rank 1 runs otherwise.
time.monotonic = lambda: real() * (1.37 if rank else 1.0)
import torch, torch.distributed as dist
import everstep as es
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
ckpt = es.CheckpointManager(sys.argv[1], persist=timedelta(seconds=0.2), keep=100, model=model)
ckpt.restore()
for step in range(1, 201):
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.005)
    ckpt.step(step)
ckpt.close()
dist.destroy_process_group()
"""


def test_without_an_agent_all_ranks_make_the_same_steps_durable(tmp_path):
    """Clocks differ, and a rank that wrote alone would wait for the others forever."""
    script = tmp_path / "skewed.py"
    script.write_text(_SKEWED)
    ended = run_ranks([str(script), str(tmp_path / "out")], 2, timeout=100)
    assert [r.code for r in ended] == [0, 0], ended
    steps = [r.step for r in list_checkpoints(tmp_path / "out") if r.wrong is None and r.world_size == 2]
    # 200 steps of at least 5 ms, one for each 0.2 s, and the last.
    assert steps[0] == 200 and len(steps) >= 4, steps
