"""`everstep ckpt` and `everstep memory`: what they list, find and refuse."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from conftest import EVERSTEP

import everstep as es


def _everstep(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([EVERSTEP, *arguments], env=env, capture_output=True, text=True, timeout=60, check=False)


def _checkpoints(directory, *, keep: int = 9) -> None:
    model = torch.nn.Linear(400, 400)
    ckpt = es.CheckpointManager(directory, keep=keep, persist=2, model=model)
    for step in range(1, 9):
        ckpt.step(step)
        if step == 3:
            ckpt.save()
    ckpt.close()


def test_a_directory_is_listed_looked_into_verified_and_pruned(env, tmp_path):
    out = tmp_path / "out"
    _checkpoints(out)
    rows = json.loads(_everstep("ckpt", "ls", str(out), "--json", env=env).stdout)["checkpoints"]
    assert [r["step"] for r in rows] == [8, 6, 4, 3, 2] and {r["tier"] for r in rows} == {"disk"}
    assert rows[3]["state"] == "durable, saved by the user" and rows[0]["ranks"] == "0-0 of 1"
    shown = _everstep("ckpt", "show", str(out), "6", "--tensors", env=env).stdout
    assert "model.weight" in shown and "[400, 400]" in shown
    assert _everstep("ckpt", "verify", str(out), env=env).returncode == 0
    would = _everstep("ckpt", "prune", str(out), "--keep", "2", "--dry-run", env=env).stdout.split()
    assert would == ["2", "4"]
    file = out / "step-8" / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    found = _everstep("ckpt", "verify", str(out), env=env)
    assert found.returncode == 1 and "step 8" in found.stdout and "1 are damaged" in found.stdout
    assert _everstep("ckpt", "prune", str(out), "--keep", "2", env=env).stdout.split() == ["2", "4"]
    assert sorted(p.name for p in out.glob("step-*")) == ["step-3", "step-6", "step-8"]


def test_what_is_not_there_is_said_in_one_sentence(env, tmp_path):
    for line in (
        ["ckpt", "ls", "no-such-job"],
        ["ckpt", "show", str(tmp_path)],
        ["ckpt", "verify", str(tmp_path)],
        ["memory"],
        ["memory", str(tmp_path)],
    ):
        refused = _everstep(*line, env=env)
        assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, (line, refused)
    assert _everstep("memory", "--state", "lots", env=env).returncode == 2
    assert _everstep("ckpt", "prune", str(tmp_path / "none"), "--keep", "2", env=env).returncode == 78


def test_memory_adds_up_and_says_when_it_does_not_fit(env):
    said = json.loads(
        _everstep("memory", "--state", "100M", "--workers", "2", "--nodes", "16", "--json", env=env).stdout
    )
    assert (
        said["fits"] and said["own_bytes"] == 8 * said["slot_bytes"] and said["replica_bytes"] == 4 * said["slot_bytes"]
    )
    assert abs(dict(said["survival"])[2] - 14 / 15) < 1e-12
    large = _everstep("memory", "--state", "900T", env=env)
    assert large.returncode == 1 and "--shm-size" not in large.stdout and "EVERSTEP_SHM_DIR" in large.stderr


def test_epochs_and_spans_are_kept(tmp_path):
    class Data:
        epoch = 0

        def state_dict(self):
            return {"epoch": self.epoch}

        def load_state_dict(self, state):
            self.epoch = state["epoch"]

    data = Data()
    ckpt = es.CheckpointManager(tmp_path, keep=2, persist=2, model=torch.nn.Linear(3, 3), data=data)
    for step in range(1, 11):
        data.epoch = step // 5
        ckpt.step(step)
    ckpt.close()
    steps = sorted(int(p.name.split("-")[1]) for p in tmp_path.glob("step-*"))
    assert steps == [5, 8, 10], steps


def test_a_directory_of_two_jobs_is_listed_once(env, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, everstep\n"
        "ckpt = everstep.CheckpointManager('out', model=torch.nn.Linear(4, 4))\n"
        "for step in ckpt.steps(3): pass\n"
    )
    for name in ("first", "second"):
        subprocess.run([EVERSTEP, "run", "--name", name, str(script)], env=env, cwd=tmp_path, check=True, timeout=120)
    rows = json.loads(_everstep("ckpt", "ls", "--json", env=env).stdout)["checkpoints"]
    assert [(r["step"], r["tier"], r["job"]) for r in rows] == [(3, "disk", None)], rows
    assert _everstep("ckpt", "ls", env=env).stdout.startswith("JOB")
    assert not _everstep("ckpt", "ls", "second", env=env).stdout.startswith("JOB")


@pytest.mark.parametrize(
    ("name", "what"),
    [("dangling", "a dangling link to {}/nowhere"), ("file", "a regular file"), ("link-to-file", "a regular file")],
)
def test_what_is_in_the_place_of_a_directory_is_named(env, tmp_path, name, what):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link-to-file").symlink_to(tmp_path / "file")
    at, what = str(tmp_path / name), what.format(tmp_path)
    for below in ("", "/below"):
        with pytest.raises(es.CheckpointError) as e:
            es.CheckpointManager(at + below, model=torch.nn.Linear(2, 2))
        said = f"{at}/below: {at} is {what}" if below else f"{at}: it is {what}"
        assert str(e.value).startswith(f"cannot create the checkpoint directory {said}"), e.value
        assert e.value.__cause__ is None, "the system's own words are beside it"
    out = str(tmp_path / "out.pt")
    for words in (
        ["ls", at],
        ["show", at],
        ["verify", at],
        ["prune", at, "--keep", "2"],
        ["export", at, out, "--to", "torch"],
    ):
        done = _everstep("ckpt", *words, env=env)
        (said,) = done.stderr.splitlines()
        assert done.returncode != 0 and at in said and what in said, done
    torch.save({"model": {"weight": torch.zeros(2)}}, out)
    done = _everstep("ckpt", "import", out, at, "--from", "torch", env=env)
    (said,) = done.stderr.splitlines()
    assert done.returncode == 1 and at in said and what in said, done
    done = _everstep("ckpt", "export", str(tmp_path), at, "--to", "dcp", env=env)
    (said,) = done.stderr.splitlines()
    assert done.returncode == 1 and at in said and (name != "dangling" or what in said), done
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "nowhere").exists()
