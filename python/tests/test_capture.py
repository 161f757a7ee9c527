"""The promises of a snapshot: it is written, it is exact, and nothing is reported as saved too
early."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep as es

ROOT = Path(__file__).resolve().parents[2]
EVERSTEP = str(Path(sys.executable).parent / "everstep")
#: More than is copied before ``step()`` returns by default.
LARGE = 4100


def _published(directory: Path) -> set[int]:
    return {row.step for row in es._internal.list_checkpoints(str(directory)) if row.wrong is None}


def _under_agent(tmp_path: Path, *line: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "EVERSTEP_STATE_DIR": str(tmp_path / "state"),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return subprocess.run(
        [EVERSTEP, "run", "--standalone", "--no-warm", *line],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


FAST = """
import sys, torch, everstep
ckpt = everstep.CheckpointManager(sys.argv[1], model=torch.nn.Linear(4, 4), persist=3, keep=100)
for step in range(ckpt.restore() + 1, 61):
    ckpt.step(step)
ckpt.close()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_checkpoint_that_is_due_is_written_however_short_the_steps(tmp_path, ranks):
    script, out = tmp_path / "fast.py", tmp_path / "out"
    script.write_text(FAST)
    done = _under_agent(tmp_path, "--nproc-per-node", str(ranks), str(script), str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    assert _published(out) == set(range(3, 61, 3))


UNEVEN = """
import os, sys, torch, everstep
ckpt = everstep.CheckpointManager(sys.argv[1], model=torch.nn.Linear(4, 4), persist=3, keep=100, persist_bandwidth=10_000_000)
for step in range(ckpt.restore() + 1, 13):
    ckpt.step(step, text="x" * (20_000_000 if os.environ["RANK"] == "0" and step == 3 else 3))
ckpt.close()
"""


def test_a_rank_that_takes_long_to_write_does_not_cost_the_step(tmp_path):
    """Later steps are written by all ranks while one of them still writes the first."""
    script = tmp_path / "uneven.py"
    script.write_text(UNEVEN)
    done = _under_agent(tmp_path, "--nproc-per-node", "2", str(script), str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert _published(tmp_path / "out") == {3, 6, 9, 12}


STRIDES = """
import sys, time, torch, everstep
persist = sys.argv[2] if sys.argv[2] == "auto" else int(sys.argv[2])
ckpt = everstep.CheckpointManager(sys.argv[1], model=torch.nn.Linear(4, 4), persist=persist, keep=100)
for step in range(ckpt.restore() + 7, 1401, 7):
    ckpt.step(step)
    time.sleep(0.02)
ckpt.wait("disk")
"""


def test_a_script_may_count_several_steps_between_two_calls(tmp_path):
    script = tmp_path / "strides.py"
    script.write_text(STRIDES)
    done = _under_agent(tmp_path, str(script), str(tmp_path / "each"), "100")
    assert done.returncode == 0, done.stderr[-2000:]
    assert _published(tmp_path / "each") == {-(-hundreds * 100 // 7) * 7 for hundreds in range(1, 15)}
    done = _under_agent(tmp_path, str(script), str(tmp_path / "auto"), "auto")
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(_published(tmp_path / "auto")) > 0, "the step that the coordinator names lies between two calls"
    # The same without a launcher.
    line = [sys.executable, str(script), str(tmp_path / "alone"), "100"]
    assert subprocess.run(line, check=False, timeout=100).returncode == 0
    assert _published(tmp_path / "alone") == _published(tmp_path / "each")


def test_without_an_optimizer_every_promised_checkpoint_is_written(tmp_path):
    ckpt = es.CheckpointManager(tmp_path, model=nn.Linear(LARGE, LARGE), persist=2)
    ckpt.restore()
    for step in range(1, 6):
        saved = ckpt.step(step).saved
        assert ("disk" in saved) == (step % 2 == 0)
        assert (step in _published(tmp_path)) == (step % 2 == 0)
    ckpt.close()
    assert 5 in _published(tmp_path)


def test_a_step_that_the_scaler_skips_is_written(tmp_path):
    model = nn.Linear(LARGE, LARGE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=1)
    ckpt.restore()
    # GradScaler.step does not call the optimizer if a gradient is not finite.
    ckpt.step(1)
    ckpt.step(2)
    assert {1, 2} <= _published(tmp_path)


FULL = """
    import json, sys, time
    from pathlib import Path
    import torch, everstep
    model = torch.nn.Linear(500, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = Path(sys.argv[1])
    ckpt = everstep.CheckpointManager(out, model=model, optimizer=optimizer, persist=5, every=1, keep=9)
    done = ckpt.restore()
    filler = out / "filler"
    rows = []
    for step in range(1, 41):
        optimizer.step()
        if step == 13:
            filler.touch()
            try:
                with filler.open("wb") as file:
                    while True:
                        file.write(b"x" * 4096)
                        file.flush()
            except OSError:
                pass
        if step == 20:
            try:
                ckpt.save(step)
            except everstep.CheckpointError as e:
                refused = str(e)
            left = sorted(p.name for p in out.glob("step-*.tmp-*"))
        if step == 28:
            filler.unlink()
        before = {r.step for r in everstep._internal.list_checkpoints(str(out)) if r.wrong is None}
        outcome = ckpt.step(step)
        published = {r.step for r in everstep._internal.list_checkpoints(str(out)) if r.wrong is None}
        steps = dict(getattr(outcome, "steps", {"disk": step}))
        rows.append([step, sorted(outcome.saved), steps, sorted(published), list(getattr(outcome, "failed", ()))])
        time.sleep(0.15)
    Path(sys.argv[2]).write_text(json.dumps([rows, refused, left]))
    import os
    os._exit(0)
"""


def test_a_full_disk_is_in_the_outcome_and_training_goes_on(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    if (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(mount)], capture_output=True, check=False
        ).returncode
        != 0
    ):
        pytest.skip("needs the right to mount a small tmpfs")
    script = tmp_path / "full.py"
    script.write_text(textwrap.dedent(FULL))
    try:
        done = _under_agent(tmp_path, str(script), str(mount), str(tmp_path / "rows"))
        assert done.returncode == 0, done.stderr[-3000:]
    finally:
        subprocess.run(["umount", str(mount)], check=False)
    rows, refused, left = json.loads((tmp_path / "rows").read_text())
    assert len(rows) == 40
    assert "could not be written" in refused and "earlier checkpoints are kept" in refused
    assert left == []
    for step, saved, steps, published, _ in rows:
        assert "local" in saved and steps.get("local", step) == step
        if "disk" in saved:
            assert steps["disk"] in published, f"step {step}: {steps['disk']} is not in {published}"
    assert any("disk" in saved for step, saved, *_ in rows if step < 13)
    failed = [why for *_, why in rows if why]
    assert failed and "No space left" in failed[0][0]
    assert any("disk" in saved for step, saved, *_ in rows if step > 28), (
        "durable checkpoints go on when there is room again"
    )


@pytest.mark.parametrize("way", ["data-copy", "numpy", "ema"])
def test_weights_swapped_while_they_are_copied_are_not_restored(tmp_path, way):
    done = _under_agent(
        tmp_path, "--max-restarts", "1", "figures/scripts/torn.py", "--way", way, "--steps", "8", "--out", str(tmp_path)
    )
    lives = [json.loads(row) for row in done.stdout.splitlines() if row.startswith("{")]
    assert len(lives) == 2, done.stderr[-3000:]
    assert [life["torn"] for life in lives] == [0, 0] and not any(life["restored_torn"] for life in lives)
    assert lives[1]["restored"] > 0 and sum(life["kept"] for life in lives) > 5


NO_THREADS = """
    import os, resource, sys, warnings
    import numpy.random, torch, everstep
    torch.set_num_threads(1)
    model = torch.nn.Linear(2100, 2100)
    os.chown(sys.argv[1], 65534, 65534)
    ckpt = everstep.CheckpointManager(sys.argv[1], model=model, persist=1)
    ckpt.restore()
    os.setgid(65534)
    os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(1, 5):
            ckpt.step(step)
    ckpt.close()
    print(len([w for w in seen if "no thread can be created" in str(w.message)]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="changes its user")
def test_without_threads_the_training_thread_copies(tmp_path):
    script, out = tmp_path / "few.py", tmp_path / "out"
    out.mkdir()
    for above in itertools.takewhile(lambda path: path != Path(tempfile.gettempdir()), [out, *out.parents]):
        above.chmod(0o755)
    script.write_text(textwrap.dedent(NO_THREADS))
    done = subprocess.run(
        [sys.executable, str(script), str(out)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "1", "one line says so"
    assert 4 in _published(out)


class _Doubled(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"] * 2


def _changes_of_objects(model, optimizer):
    """Returns what may change in the objects behind the values, to be done in this order."""

    def removed() -> None:
        del optimizer.state[model[2].weight]

    def persistent() -> None:
        model[1].register_buffer("note", torch.ones(2), persistent=True)

    def requiring_grad() -> None:
        next(iter(optimizer.state.values()))["exp_avg"].requires_grad_()

    def retyped() -> None:
        model[2].__class__ = _Doubled

    def overridden() -> None:
        model.state_dict = lambda: {name: value + 1 for name, value in nn.Module.state_dict(model).items()}

    def hooked() -> None:
        del model.state_dict
        model[0].register_state_dict_post_hook(
            lambda m, s, prefix, local: s.__setitem__(f"{prefix}weight", s[f"{prefix}weight"] * 2)
        )

    return [removed, persistent, requiring_grad, retyped, overridden, hooked]


def _changes(model, optimizer, schedule):
    """Returns a step of training, and everything that may change a structure between two steps."""

    def train() -> None:
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    def replaced() -> None:
        old, new = model[0].weight, nn.Parameter(torch.randn(8, 8))
        model[0].weight = optimizer.param_groups[0]["params"][0] = new
        optimizer.state[new] = optimizer.state.pop(old)

    def transposed() -> None:
        model[2].weight.data = model[2].weight.data.t()

    def moved() -> None:
        model[2].bias.data = torch.randn(8)

    def buffer() -> None:
        model[1].running_mean = torch.full((8,), 3.0)

    def added() -> None:
        model.add_module("more", nn.Linear(8, 8))
        optimizer.add_param_group({"params": model.more.parameters(), "lr": 0.5})

    def frozen() -> None:
        *rest, last = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = rest
        del optimizer.state[last]

    def state() -> None:
        optimizer.state[model[1].weight]["exp_avg"] = torch.full((8,), 7.0)

    def value() -> None:
        optimizer.param_groups[0]["betas"] = (0.5, 0.6)

    def loaded() -> None:
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})

    return [
        train,
        replaced,
        transposed,
        moved,
        buffer,
        added,
        frozen,
        state,
        value,
        loaded,
        *_changes_of_objects(model, optimizer),
    ]


def test_a_structure_that_is_kept_notices_every_change(tmp_path):
    """A capture from the kept structure equals what a walk through the objects finds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, schedule=schedule, persist=1)
    ckpt.restore()

    train, *others = _changes(model, optimizer, schedule)
    step = 0
    for change in (train, *others):
        for now in (train, train, change):
            now()
            step += 1
            ckpt.step(step)
            shard = es._internal.open_shard(str(tmp_path / f"step-{step}"), 0)
            random = "__everstep__/rng"
            wanted = {
                i.name: i.tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                for i in ckpt._state.collect({})
            }
            found = {e.name: shard.bytes(e.name) for e in shard.entries()}
            assert found.keys() == wanted.keys(), (change.__name__, step)
            assert [n for n in found if found[n] != wanted[n] and n != random] == [], (change.__name__, step)


REMOVED = """
    import json, os, shutil, signal, sys, time
    from pathlib import Path
    import torch, everstep
    model = torch.nn.Linear(50, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = everstep.CheckpointManager(sys.argv[1], model=model, optimizer=optimizer, persist=3, every=1)
    done = ckpt.restore()
    print(json.dumps({"restored": done, "newest": [r.step for r in everstep._internal.list_checkpoints(sys.argv[1])][:1]}), flush=True)
    for step in range(done + 1, 41):
        optimizer.step()
        ckpt.step(step)
        if done == 0 and step == 10:
            shutil.rmtree(os.environ["EVERSTEP_SHM_DIR"] + f"/everstep-{os.getuid()}")
        if done == 0 and step == 29:
            # Before anything newer than 27 can be durable.
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
    ckpt.close()
"""


def test_shared_memory_that_is_removed_is_created_again(tmp_path):
    script = tmp_path / "removed.py"
    script.write_text(textwrap.dedent(REMOVED))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        env = {
            **os.environ,
            "EVERSTEP_STATE_DIR": str(tmp_path / "state"),
            "EVERSTEP_SHM_DIR": memory,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        line = [EVERSTEP, "run", "--standalone", "--max-restarts", "1", str(script), str(tmp_path / "out")]
        done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    lives = [json.loads(row) for row in done.stdout.splitlines() if row.startswith("{")]
    assert done.returncode == 0 and len(lives) == 2, done.stderr[-3000:]
    assert lives[1]["restored"] == 29 and lives[1]["newest"] >= [24]
    assert "was removed while the job was running" in done.stderr
    assert 40 in _published(tmp_path / "out")
