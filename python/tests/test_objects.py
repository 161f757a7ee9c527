"""Durable checkpoints in an object store: a real server of the S3 protocol."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from everstep._internal import list_checkpoints, list_line, run_id
from harness import objects
from harness.objects import BUCKET, Fault, Proxy
from harness.ranks import run_ranks

URL = f"s3://{BUCKET}/run"

_TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
import everstep as es
sharded = "--sharded" in sys.argv
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 4))
if sharded:
    from torch.distributed.fsdp import fully_shard
    fully_shard(model)
elif "WORLD_SIZE" in os.environ:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ckpt = es.CheckpointManager(sys.argv[1], persist=2, model=model, optimizer=optimizer)
first = None
for n in ckpt.steps(int(sys.argv[2])):
    first = n if first is None else first
    optimizer.zero_grad()
    loss = model(torch.randn(4, 1024, generator=torch.Generator().manual_seed(n))).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(float(os.environ.get("PAUSE", 0)))
if os.environ.get("RANK", "0") == "0":
    print("FIRST", first, "LOSS", loss.item(), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with objects.moto() as url:
        yield url


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of an empty store."""
    for name, value in objects.environment(server).items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=server)
    for key in _keys(client):
        client.delete_object(Bucket=BUCKET, Key=key)
    return client


@pytest.fixture
def store(server: str, s3: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy to the store."""
    with Proxy(server).running() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


def _keys(s3: Any, prefix: str = "") -> list[str]:
    return [o["Key"] for o in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])]


def _said(out: str) -> tuple[int, float]:
    words = next(line for line in out.splitlines() if line.startswith("FIRST")).split()
    return int(words[1]), float(words[3])


def test_a_job_goes_on_from_a_store_with_other_ranks(store, tmp_path):
    """Saved by two ranks of FSDP2 and read by three, and by one: training gives the same result."""
    script = tmp_path / "train.py"
    script.write_text(_TRAIN)
    line = [str(script), URL]
    assert [r.code for r in run_ranks([*line, "4", "--sharded"], 2)] == [0, 0]
    whole = run_ranks([str(script), str(tmp_path / "whole"), "8", "--sharded"], 2)
    more = run_ranks([*line, "8", "--sharded"], 3)
    assert [r.code for r in more] == [0, 0, 0], more
    (first, loss), (_, right) = _said(more[0].out), _said(whole[0].out)
    assert first == 4 and loss == pytest.approx(right, rel=1e-6)


def test_under_an_agent_a_killed_job_goes_on_from_the_store(store, s3, everstep, env, tmp_path):
    """Nothing remains in memory; remains of earlier lives in the store are cleaned up.

    That includes uploads that they began.
    """
    left = "run/step-1/0-left/rank-0.safetensors"
    upload = s3.create_multipart_upload(Bucket=BUCKET, Key=left)["UploadId"]
    mark = {"run": run_id(URL), "epoch": 0, "generation": 0, "attempt": 0}
    s3.put_object(
        Bucket=BUCKET,
        Key="run/uploads/0-left.json",
        Body=json.dumps({"mark": mark, "key": left, "id": upload}).encode(),
    )
    s3.put_object(Bucket=BUCKET, Key="run/step-1/0-other/everstep-mark.json", Body=json.dumps(mark).encode())
    s3.put_object(Bucket=BUCKET, Key="run/step-1/0-other/rank-0.safetensors", Body=b"half")
    # Without the run's mark, nothing is everstep's to delete.
    foreign = ["run/step-2/0-other/rank-0.safetensors", "run/notes/step-2.0/rank-0.json", "run/step-3/of-a-person.txt"]
    for key in foreign:
        s3.put_object(Bucket=BUCKET, Key=key, Body=b"{}")
    script = tmp_path / "train.py"
    script.write_text(_TRAIN)
    run = [
        str(Path(sys.executable).parent / "everstep"),
        "run",
        "--name",
        "objects",
        "--nproc-per-node",
        "2",
        str(script),
        URL,
    ]
    first = subprocess.Popen(
        [*run, "1000"],
        env={**env, **objects.environment(store.url), "PAUSE": "0.02"},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not [row.step for row in list_checkpoints(URL) if row.step >= 4]:
        assert time.monotonic() < deadline, "no checkpoint within a minute"
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    everstep("doctor", "--clean")
    durable = max(row.step for row in list_checkpoints(URL) if row.wrong is None)
    done = everstep(
        "run", "--name", "objects", "--nproc-per-node", "2", str(script), URL, str(durable + 4), timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert _said(done.stdout)[0] >= durable - 2
    assert "run/uploads/0-left.json" not in _keys(s3)
    assert not _keys(s3, "run/step-1/")
    assert set(foreign) < set(_keys(s3))
    # An upload that was killed before its note was written has no parts yet. It costs nothing, and
    # only the store knows of it.
    for begun in s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []):
        assert begun["Key"] != left and not s3.list_parts(
            Bucket=BUCKET, Key=begun["Key"], UploadId=begun["UploadId"]
        ).get("Parts")
    listed = everstep("ckpt", "ls", URL)
    assert listed.returncode == 0 and "0-1 of 2" in listed.stdout
    assert everstep("ckpt", "verify", URL).returncode == 0
    pruned = everstep("ckpt", "prune", URL, "--keep", "1")
    assert pruned.returncode == 0, pruned.stderr


def test_going_back_in_a_store_keeps_both_branches(store, s3, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, everstep as es\n"
        "ckpt = es.CheckpointManager(sys.argv[1], persist=2, keep=4, model=torch.nn.Linear(4, 4))\n"
        "done = ckpt.restore(int(sys.argv[3]) if len(sys.argv) > 3 else None)\n"
        "for step in range(done + 1, int(sys.argv[2]) + 1): ckpt.step(step)\n"
        "ckpt.close(); print(done)\n"
    )

    def train(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, str(script), URL, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert [train("8"), train("6", "4"), train("6")] == ["0", "4", "6"]
    assert [row.step for row in list_line(URL)] == [6, 4, 2]
    assert [row.step for row in list_checkpoints(URL)] == [8, 6, 6, 4, 2]


def test_a_store_that_is_away_for_a_while_costs_nothing(store, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_TRAIN)
    store.begin(Fault("503", 8, times=6))
    done = subprocess.run(
        [sys.executable, str(script), URL, "6"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert next((row.step, row.wrong) for row in list_checkpoints(URL)) == (6, None)


def test_damage_in_the_store_is_found_and_the_older_checkpoint_is_used(store, s3, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_TRAIN)
    line = [sys.executable, str(script), URL]
    assert subprocess.run([*line, "4"], capture_output=True, timeout=120, check=False).returncode == 0
    (key,) = (k for k in _keys(s3, "run/step-4/") if k.endswith(".safetensors"))
    data = bytearray(s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    data[len(data) // 2] ^= 1
    s3.put_object(Bucket=BUCKET, Key=key, Body=bytes(data))
    done = subprocess.run([*line, "6"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and _said(done.stdout)[0] == 2, done.stderr


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "names no bucket"),
        ("s3:/bucket/x", "pass it as a string"),
        ("ftp://host/x", "is not a supported object store"),
        (f"s3://{BUCKET}-that-is-not/x", "NoSuchBucket"),
    ],
)
def test_a_url_that_means_nothing_is_said_at_once(store, url, words):
    line = "import sys, torch, everstep as es; es.CheckpointManager(sys.argv[1], model=torch.nn.Linear(2, 2))"
    done = subprocess.run([sys.executable, "-c", line, url], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and words in done.stderr, done.stderr


def test_a_store_that_does_not_answer_is_said_within_seconds(monkeypatch):
    for name, value in objects.environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    line = "import sys, torch, everstep as es; es.CheckpointManager(sys.argv[1], model=torch.nn.Linear(2, 2))"
    done = subprocess.run([sys.executable, "-c", line, URL], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and "does not answer" in done.stderr, done.stderr


def test_dcp_saves_to_a_store_and_loads_from_it(store, tmp_path):
    script = tmp_path / "dcp.py"
    script.write_text(
        "import sys, torch, everstep as es, torch.distributed.checkpoint as dcp\n"
        "import everstep.dcp\n"
        "state = {'a': torch.arange(3e6), 'n': 5}\n"
        "dcp.save(state, storage_writer=everstep.dcp.Writer(sys.argv[1]), no_dist=True)\n"
        "found = {'a': torch.zeros(3_000_000), 'n': 0}\n"
        "dcp.load(found, storage_reader=everstep.dcp.Reader(sys.argv[1]), no_dist=True)\n"
        "assert torch.equal(found['a'], state['a']) and found['n'] == 5\n"
    )
    done = subprocess.run([sys.executable, str(script), URL], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_store_that_does_not_take_the_last_step_is_named_while_the_job_waits(store, env, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, torch, everstep as es\n"
        "ckpt = es.CheckpointManager(sys.argv[1], persist=1000, model=torch.nn.Linear(4, 4))\n"
        "for step in range(ckpt.restore() + 1, 6): ckpt.step(step)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(3)\n"
    )
    line = ["everstep", "run", "--standalone", "--max-restarts", "0", str(script), URL]
    line[0] = str(Path(sys.executable).parent / line[0])
    job = subprocess.Popen(
        line,
        env={**env, **objects.environment(store.url)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert job.stdin is not None and job.stdout is not None and job.stderr is not None
        assert any("ready" in row for row in job.stdout)
        store.begin(Fault("503", 0, times=1_000_000))
        job.stdin.close()
        assert any(f"writing step 5, which is in memory only, to {URL}" in row for row in job.stderr)
        job.send_signal(signal.SIGINT)
        assert any("not waiting for step 5" in row for row in job.stderr)
        assert job.wait(30) != 0
    finally:
        job.kill()
        store.begin(Fault("none", -1))
