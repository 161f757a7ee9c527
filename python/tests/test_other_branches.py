"""A step in memory is that of the branch that trains, whatever other branches have of the step."""

from __future__ import annotations

import re

import pytest

_SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
import everstep as es
what, life, out = sys.argv[1:]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
first = life == "first"

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self):
        self.make()
        self.seen += 1

    def make(self):
        if what == "names" and not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(4))

    def _load_from_state_dict(self, state, prefix, *rest):
        if prefix + "seen" in state:
            self.make()
        super()._load_from_state_dict(state, prefix, *rest)

model = Model()
divided = what != "names"
if divided:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(attempt if what == "parts" else 0)]))
local = model.weight.to_local() if divided else model.weight
ckpt = es.CheckpointManager(out, keep=50, persist=1 if first else 100_000, model=model)
step = ckpt.restore() if first else ckpt.restore(step=20 if what == "one" and attempt else 10)
if attempt:
    whole = model.weight.full_tensor() if divided else model.weight
    print(f"restored {step} {sorted(set(whole.flatten().tolist()))}", flush=True)
while step < (25 if first else 20):
    step += 1
    if what == "names":
        model()
    if what == "one" and not first and step == 20 and dist.get_rank() == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    with torch.no_grad():
        local.fill_(step if first or attempt else 1000 + step)
    ckpt.step(step)
if not first and not attempt:
    ckpt.wait("local")
    if what == "names" or (what == "parts" and dist.get_rank() == 0):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
ckpt.close()
os._exit(0)
"""


@pytest.mark.parametrize("what", ["names", "parts", "one"])
def test_a_step_in_memory_is_not_taken_for_that_of_the_branch_that_was_left(tmp_path, everstep, script, what):
    """``names``: the model that restores lacks a buffer that only training creates. ``parts``: its
    weight is sharded otherwise, so the step has to be read from a durable checkpoint, and only the
    other branch has one. ``one``: one of two ranks has the step that is asked for in memory, the
    other branch has it for both."""
    out = tmp_path / "out"
    line = ["run", "--standalone", "--nproc-per-node", "1" if what == "names" else "2", "--max-restarts", "1"]
    first = everstep(*line, script(_SCRIPT), what, "first", str(out))
    assert first.returncode == 0, first.stderr
    done = everstep(*line, script(_SCRIPT), what, "second", str(out))
    restored = re.findall(r"restored (\d+) \[(.*)\]", done.stdout)
    for step, values in restored:
        assert values == str(20.0 if what == "one" else 1000.0 + int(step)), done.stderr
    if not restored:
        assert what == "parts" and "is only in memory, saved with a different sharding" in done.stderr, done.stderr
    assert ("restored step 20 from disk" in done.stderr) is (what == "one"), done.stderr
    assert all((out / f"step-{n}").is_dir() for n in range(11, 26)), "the other branch is kept"
