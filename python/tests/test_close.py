"""What close() makes durable: the last step that is complete, as it was then, and nothing else."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Run

import everstep as es

_TRAIN = """
import os, sys, torch, everstep as es
import torch.distributed as dist
out, how = sys.argv[1:3]
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(1))
model = torch.nn.Module()
model.weight = weight
optimizer = torch.optim.SGD([weight], lr=1.0)
ckpt = es.CheckpointManager(out, model=model, optimizer=optimizer, persist=100)
done = ckpt.restore()
first = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0
print(f"START {done} {weight.item()}\\n", end="", flush=True)
try:
    while done < 10:
        optimizer.zero_grad()
        gradient = -torch.ones(1)
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
        weight.grad = gradient
        optimizer.step()
        if done == 5 and first and (how == "all" or dist.get_rank() == 0):
            raise RuntimeError("the logging service is down")
        done += 1
        ckpt.step(done)
finally:
    ckpt.close()
print(f"END {weight.item()}\\n", end="", flush=True)
"""


@pytest.mark.parametrize(("ranks", "how"), [("2", "one"), ("2", "all"), ("1", "all")])
def test_an_exception_between_the_update_and_the_step_saves_nothing_wrong(
    everstep: Run, tmp_path: Path, script: Callable[[str], str], ranks: str, how: str
) -> None:
    line = ("run", "--standalone", "--nproc-per-node", ranks, "--max-restarts", "3", script(_TRAIN))
    done = everstep(*line, str(tmp_path / "out"), how, timeout=180)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"START (\S+ \S+)", done.stdout)[int(ranks) :] == ["5 5.0"] * int(ranks), done.stdout
    assert re.findall(r"END (\S+)", done.stdout) == ["10.0"] * int(ranks), done.stdout
    assert "the logging service is down" in done.stderr and "hangs" not in done.stderr, done.stderr


@pytest.mark.parametrize("given", [True, False])
def test_weights_between_two_steps_are_not_saved(tmp_path: Path, given: bool) -> None:
    """Also when the optimizer is not given to the manager."""

    def training() -> tuple[torch.nn.Linear, torch.optim.SGD, es.CheckpointManager]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        more = {"optimizer": optimizer} if given else {}
        return model, optimizer, es.CheckpointManager(tmp_path, model=model, persist=2, **more)

    model, optimizer, ckpt = training()
    for n in ckpt.steps(10):
        model.weight.grad = -torch.ones(1, 1)
        optimizer.step()
        if n == 5:
            break
    with pytest.raises(es.CheckpointError, match="updated after step 5"):
        ckpt.save()
    with pytest.warns(UserWarning, match=r"does not save step 5"):
        ckpt.close()
    model, optimizer, ckpt = training()
    assert (ckpt.restore(), model.weight.item()) == (4, 4.0)
    model.weight.grad = -torch.ones(1, 1)
    optimizer.step()
    ckpt.step(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt.close()
    model, _, ckpt = training()
    assert (ckpt.restore(), model.weight.item()) == (5, 5.0)


def test_a_training_within_an_exception_handler_is_closed_as_any_other(tmp_path: Path) -> None:
    try:
        raise ImportError("no such library")
    except ImportError:
        ckpt = es.CheckpointManager(tmp_path, model=torch.nn.Linear(1, 1), persist=100)
        ckpt.step(3)
        ckpt.close()
    assert es.CheckpointManager(tmp_path, model=torch.nn.Linear(1, 1)).restore() == 3
