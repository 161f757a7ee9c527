"""What stays in a checkpoint directory: foreign files, the user's saves, and the running branch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import EVERSTEP
from small_run import train, tree

import everstep as es
import everstep.dcp


def _steps(directory: Path) -> list[str]:
    return sorted((p.name for p in directory.glob("step-*")), key=lambda n: float(n.removeprefix("step-")))


def _command(*line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([EVERSTEP, "ckpt", *line], capture_output=True, text=True, timeout=60, check=False)


def _foreign(out: Path) -> list[Path]:
    """Makes entries that are named like checkpoints but not written by everstep."""
    out.mkdir(exist_ok=True)
    state = {"a": torch.arange(3.0)}
    dcp.save(state, checkpoint_id=out / "step-2", no_dist=True)
    (out / "step-7").write_text("notes of a person")
    (out / "elsewhere").mkdir()
    (out / "elsewhere" / "rank-0.safetensors").write_bytes(b"x")
    (out / "step-3").symlink_to(out / "elsewhere")
    (out / "step-900").mkdir()
    (out / "step-4.tmp-0").mkdir()
    (out / "step-4.tmp-0" / "rank-0.safetensors").write_bytes(b"mine")
    (out / "step-5.gone-0123456789abcdef").mkdir()
    (out / "step-007").mkdir()
    (out / "everstep-frequency.json").write_text("[1, 2]")
    return sorted(out.iterdir())


def test_what_everstep_did_not_write_is_left_alone_and_named(tmp_path):
    out = tmp_path / "out"
    foreign = _foreign(out)
    os.mkfifo(out / "step-6")
    before = tree(*foreign)
    assert train(out, 9) == 0
    assert tree(*foreign) == before and (out / "step-6").is_fifo()
    assert {"step-8", "step-9"} == set(_steps_of_everstep(out)), "each step is published in spite of its neighbours"
    would = _command("prune", str(out), "--keep", "2", "--dry-run")
    did = _command("prune", str(out), "--keep", "2")
    assert would.stdout == did.stdout and would.returncode == did.returncode == 0
    for name in ("step-2", "step-3", "step-7", "step-900", "step-4.tmp-0", "step-007"):
        assert f"left alone: {name}:" in would.stderr, would.stderr
    assert tree(*foreign) == before
    listed = json.loads(_command("ls", str(out), "--json").stdout)
    assert {Path(f["path"]).name for f in listed["foreign"]} >= {"step-2", "step-3", "step-6", "step-7", "step-900"}


def _steps_of_everstep(out: Path) -> list[str]:
    return [p.parent.name for p in out.glob("step-*/manifest.json")]


def test_a_taken_name_costs_neither_the_step_nor_what_has_the_name(tmp_path):
    (tmp_path / "step-2").write_text("a file of somebody else")

    def save_two_steps() -> None:
        model = torch.nn.Linear(2, 2)
        ckpt = es.CheckpointManager(tmp_path, model=model, persist=2)
        for step in (1, 2):
            ckpt.step(step)
        ckpt.close()

    with pytest.warns(UserWarning, match="step 2 is saved as step-2.2"):
        save_two_steps()
    assert (tmp_path / "step-2").read_text() == "a file of somebody else"
    assert train(tmp_path, 2) == 2


def test_plain_dcp_checkpoints_stay_beside_everstep_s(tmp_path):
    state = {"a": torch.arange(3.0)}
    for step in (500, 1000):
        dcp.save(state, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    plain = [tmp_path / "step-500", tmp_path / "step-1000"]
    before = tree(*plain)
    for _ in range(2):
        # Saved under one name twice: the second replaces the first.
        state["a"] += 1
        dcp.save(state, storage_writer=everstep.dcp.Writer(tmp_path / "step-2000"), no_dist=True)
    assert tree(*plain) == before
    assert _steps(tmp_path) == ["step-500", "step-1000", "step-2000"]
    found = {"a": torch.zeros(3)}
    dcp.load(found, storage_reader=everstep.dcp.Reader(tmp_path / "step-2000"), no_dist=True)
    assert torch.equal(found["a"], state["a"])
    with pytest.raises(BaseException, match="step-500 already exists and is not replaced"):
        dcp.save(state, storage_writer=everstep.dcp.Writer(tmp_path / "step-500"), no_dist=True)
    assert tree(*plain) == before


def test_a_checkpoint_with_a_file_of_the_user_in_it_stays(tmp_path):
    train(tmp_path, 2)
    (tmp_path / "step-1" / "notes.txt").write_text("the good one")
    train(tmp_path, 6)
    assert (tmp_path / "step-1" / "notes.txt").exists() and (tmp_path / "step-1" / "manifest.json").exists()
    assert "step-1: it holds notes.txt" in _command("prune", str(tmp_path), "--keep", "2", "--dry-run").stderr


def test_checkpoints_of_an_earlier_version_are_restored_and_not_deleted(tmp_path):
    train(tmp_path, 2)
    for path in (tmp_path / "step-1", tmp_path / "step-2"):
        # As before marks existed: the same manifest without the new fields.
        manifest = json.loads((path / "manifest.json").read_text())["manifest"]
        del manifest["writer"], manifest["lineage"]
        _seal(path / "manifest.json", manifest)
        (path / "everstep-mark.json").unlink()
    (tmp_path / "everstep-run.json").unlink()
    (tmp_path / "everstep-branch.json").unlink()
    assert train(tmp_path, 6) == 2
    assert _steps(tmp_path) == ["step-1", "step-2", "step-5", "step-6"]
    assert train(tmp_path, 7) == 6


def _seal(path: Path, manifest: dict[str, object]) -> None:
    crc = (1 << 64) - 1  # CRC-64/NVME
    for byte in json.dumps(manifest, separators=(",", ":")).encode():
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    path.write_text(json.dumps({"manifest": manifest, "crc": f"{crc ^ (1 << 64) - 1:016x}"}))


def test_going_back_keeps_both_branches_and_a_restart_continues_the_new_one(tmp_path):
    train(tmp_path, 20, persist=5, keep=4)
    assert train(tmp_path, 13, step=10) == 10
    assert _steps(tmp_path) == ["step-5", "step-10", "step-12", "step-13", "step-15", "step-20"]
    assert train(tmp_path, 14) == 13
    dry = _command("prune", str(tmp_path), "--keep", "2", "--dry-run", "--abandoned")
    assert set(dry.stdout.split()) == {"5", "10", "15", "20"}
    assert _command("prune", str(tmp_path), "--keep", "2", "--abandoned").stdout == dry.stdout
    assert _steps(tmp_path) == ["step-13", "step-14"]


def test_the_same_step_of_two_branches_is_kept_twice(tmp_path):
    train(tmp_path, 4, persist=2, keep=4)
    assert train(tmp_path, 4, step=2) == 2
    assert _steps(tmp_path) == ["step-2", "step-3", "step-4", "step-4.2"]
    assert train(tmp_path, 4) == 4


def test_a_branch_left_by_a_fallback_goes_once_enough_newer_steps_are_durable(tmp_path):
    train(tmp_path, 4)
    shard = tmp_path / "step-4" / "rank-0.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.warns(UserWarning, match="skipping a checkpoint"):
        assert train(tmp_path, 4) == 3
    assert _steps(tmp_path) == ["step-3", "step-4", "step-4.2"]
    assert train(tmp_path, 5) == 4
    assert _steps(tmp_path) == ["step-4.2", "step-5"]


_JOB = """
import os, sys, torch, everstep as es
model = torch.nn.Linear(2, 2)
ckpt = es.CheckpointManager(sys.argv[1], model=model, persist=int(sys.argv[3]), keep=3)
done = ckpt.restore(int(sys.argv[2]))
print("FROM", done, flush=True)
for step in range(done + 1, done + 4):
    ckpt.step(step)
    if step == 13 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        ckpt.wait()
        os.kill(os.getpid(), 9)
ckpt.close()
"""


@pytest.mark.parametrize("persist", [1, 100])
def test_a_restart_that_asks_for_the_step_again_goes_on_in_its_branch(tmp_path, everstep, script, persist):
    """Even if nothing of the branch was durable yet; then it continues from memory."""
    out = tmp_path / "out"
    train(out, 20, persist=5, keep=4)
    done = everstep("run", "--max-restarts", "3", script(_JOB), str(out), "10", str(persist), timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "FROM" in line][-1].endswith("FROM 13"), done.stdout
    assert "continuing its new branch at step 13" in done.stderr
    assert {"step-15", "step-20"} < set(_steps(out))
    assert train(out, 17) == 16


def test_a_restart_goes_on_where_the_step_that_the_script_asks_for_was_pruned(tmp_path, everstep, script):
    """The script names the step at every start, and knows nothing of what came after it."""
    out = tmp_path / "out"
    train(out, 10)
    line = (script(_JOB), str(out), "10", "1")
    done = everstep("run", "--max-restarts", "3", *line, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [at for at in done.stdout.splitlines() if "FROM" in at][-1].endswith("FROM 13"), done.stdout
    assert _steps(out) == ["step-14", "step-15", "step-16"]
    requeued = {"SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "1"}
    launched = everstep("run", *line, timeout=120, **requeued)
    assert "FROM 16" in launched.stdout and "continuing its new branch at step 16" in launched.stderr, launched.stderr
    plain = subprocess.run(
        [sys.executable, *line], env={**os.environ, **requeued}, capture_output=True, text=True, timeout=60, check=False
    )
    assert "FROM 19" in plain.stdout, plain.stderr


def test_a_step_that_is_gone_is_refused_with_those_that_are_there(tmp_path):
    train(tmp_path, 5)
    with pytest.raises(es.CheckpointError, match=r"step 3 cannot be restored.*available steps: 4, 5$"):
        train(tmp_path, 6, step=3)


BACK_LATER = """
import os, sys
import torch
import everstep as es
out, note = sys.argv[1], sys.argv[1] + ".note"
ckpt = es.CheckpointManager(out, model=torch.nn.Linear(2, 2), persist=10, keep=9)
done = ckpt.restore(step=int(open(note).read())) if os.path.exists(note) else ckpt.restore()
print(f"start {done}", flush=True)
for step in range(done + 1, 41):
    ckpt.step(step)
    # The loss explodes at 25, and the next start has to go back; at 30 of that one something else fails.
    if step == 25 and not os.path.exists(note):
        ckpt.wait("disk")
        open(note, "w").write("10")
        os._exit(7)
    if step == 30 and os.path.exists(note) and not os.path.exists(out + ".failed"):
        ckpt.wait("disk")
        open(out + ".failed", "w").close()
        os._exit(7)
ckpt.close()
"""


def test_what_cannot_be_deleted_is_named_and_the_others_go(tmp_path):
    out = tmp_path / "out"
    assert train(out, 8, keep=8) == 0
    half = (out / "step-1").rename(out / "step-1.gone-0123456789abcdef")
    # Root may delete anything, except a directory as if it were a file.
    shard = half / json.loads((half / "manifest.json").read_text())["manifest"]["shards"][0]["file"]
    shard.unlink()
    (shard / "mine").mkdir(parents=True)
    pruned = _command("prune", str(out), "--keep", "2")
    assert pruned.returncode == 1 and pruned.stdout.split() == ["2", "3", "4", "5", "6"], pruned
    assert f"could not be deleted: {half.name}: " in pruned.stderr and (shard / "mine").is_dir(), pruned.stderr
    assert set(_steps_of_everstep(out)) == {half.name, "step-7", "step-8"}


def test_a_restart_that_asks_for_a_step_for_the_first_time_goes_back_to_it(tmp_path, everstep, script):
    done = everstep("run", "--standalone", "--max-restarts", "3", script(BACK_LATER), str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    first, back, on = (int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("start"))
    assert (first, back) == (0, 10), "the step was not asked for before"
    assert 11 <= on <= 30 and "has already gone back to step 10" in done.stderr


def test_what_comes_after_going_back_is_on_disk_when_the_job_gives_up(tmp_path, everstep, script):
    # The second life fails before it passes the checkpoint of the branch that it has left.
    gives_up = BACK_LATER.replace("step == 30", "step == 18").replace(
        '"disk")\n        open(out', '"local")\n        open(out'
    )
    line = "run", "--standalone", "--max-restarts", "1", script(gives_up), str(tmp_path / "out")
    failed = everstep(*line)
    assert failed.returncode == 1 and "start 10" in failed.stdout, failed.stderr
    written = re.search(r"step (\d+) was in memory only and is now in", failed.stderr)
    assert written and 10 < int(written[1]) <= 18, failed.stderr
    (tmp_path / "out.note").unlink()
    again = everstep(*line)
    assert f"start {written[1]}" in again.stdout, again.stderr


def test_a_directory_whose_name_is_no_text(tmp_path):
    out = os.fsencode(tmp_path) + b"/caf\xe9"
    for to, began in ((2, 0), (4, 2)):
        assert train(Path(os.fsdecode(out)), to) == began


def test_what_the_user_saved_stays_when_the_step_is_passed_again(tmp_path):
    model = torch.nn.Linear(2, 2)
    ckpt = es.CheckpointManager(tmp_path, model=model, persist=5, keep=9)
    for step in range(1, 11):
        ckpt.step(step)
        if step == 7:
            ckpt.save()
    ckpt.save(10)
    ckpt.close()
    saved = [tmp_path / "step-7", tmp_path / "step-10"]
    before = tree(*saved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert train(tmp_path, 30, step=5, persist=1) == 5
    assert tree(*saved) == before
    assert _steps(tmp_path)[-2:] == ["step-29", "step-30"]


def test_an_evaluation_reads_a_directory_that_it_cannot_write(tmp_path):
    train(tmp_path / "out", 3)
    text = (
        "import sys, torch, everstep as es\n"
        "c = es.CheckpointManager(sys.argv[1], model=torch.nn.Linear(2, 2), persist=1)\n"
        "print('FROM', c.restore()); c.step(4)\n"
    )
    mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    out, line = str(tmp_path / "out"), ("unshare", "-m", "--propagation", "private", "bash", "-c", mount, "bash")
    if subprocess.run([*line, out, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting needs root")
    before = tree(tmp_path / "out")
    done = subprocess.run(
        [*line, out, sys.executable, "-c", text, out], capture_output=True, text=True, timeout=60, check=False
    )
    assert "FROM 3" in done.stdout, done.stderr
    assert "is read-only; give one that can be written" in done.stderr.splitlines()[-1]
    assert tree(tmp_path / "out") == before


def test_a_save_of_the_model_alone_takes_nothing_from_the_training(tmp_path):
    """Neither its checkpoint with the optimizer, nor its place at the next start, nor the others
    that it keeps."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    ckpt = es.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=1, keep=5)
    for step in range(1, 6):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ckpt.step(step)
    ckpt.close()
    saved = [tmp_path / f"step-{step}" for step in range(1, 6)]
    before = tree(*saved)
    reader = es.CheckpointManager(tmp_path, model=torch.nn.Linear(2, 2))
    assert reader.restore() == 5
    with pytest.warns(UserWarning, match=r"step 5 is saved as step-5\.2, because step-5 already exists"):
        reader.save(accuracy=0.5)
    reader.close()
    assert _steps(tmp_path)[-2:] == ["step-5", "step-5.2"]
    assert tree(*saved) == before
    for step in (None, 5):
        anew = torch.optim.Adam(model.parameters())
        assert es.CheckpointManager(tmp_path, model=model, optimizer=anew).restore(step) == 5
        assert anew.state_dict()["state"][0]["step"] == 5


def test_a_checkpoint_without_the_optimizer_is_refused_by_name(tmp_path):
    model = torch.nn.Linear(2, 2)
    first = es.CheckpointManager(tmp_path, model=model, persist=1)
    first.step(3)
    first.close()
    with pytest.raises(es.CheckpointError, match=r"optimizer=: not in the checkpoint\n  in .*step-3$"):
        es.CheckpointManager(tmp_path, model=model, optimizer=torch.optim.Adam(model.parameters())).restore()


def test_a_step_is_published_again_without_exchanging_names(tmp_path):
    """File systems such as NFS refuse to exchange names, or to rename without replacing."""
    if subprocess.run(["strace", "-V"], capture_output=True, check=False).returncode != 0:
        pytest.skip("strace makes the file system refuse")
    text = (
        "import sys, torch, everstep as es\n"
        "c = es.CheckpointManager(sys.argv[1], model=torch.nn.Linear(2, 2), persist=1)\n"
        "c.step(1); c.save(); c.save(); c.close()\n"
    )
    line = [sys.executable, "-c", text, str(tmp_path)]
    done = subprocess.run(
        ["strace", "-f", "-o", "/dev/null", "-e", "inject=renameat2:error=EINVAL", *line],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert train(tmp_path, 1) == 1


@pytest.mark.parametrize("command", ["verify", "export"])
def test_python_files_beside_a_checkpoint_are_not_run(tmp_path: Path, command: str) -> None:
    """Somebody else made the directory."""
    train(tmp_path / "out", 2)
    planted = "raise SystemExit(f'{__file__} was run')\n"
    for name in ["torch.py", "json.py", "sitecustomize.py", "everstep/__init__.py"]:
        (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_text(planted)
    line = {"verify": ("verify", "."), "export": ("export", ".", str(tmp_path / "to"), "--to", "torch")}[command]
    done = subprocess.run(
        [EVERSTEP, "ckpt", *line], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path / "out"
    )
    assert done.returncode == 0 and "was run" not in done.stdout + done.stderr, done.stderr
