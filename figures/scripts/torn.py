"""Writes to the weights between ``step()`` and the next update, and checks every sealed snapshot.

At the end of step N, each weight is N. In the copy window, the script sets all of them to another
value and back, by ``--way``. A sealed snapshot with a weight other than N is torn. The process
kills itself ``--kills`` times in that window; what is restored is checked, too. Prints one JSON
line per life.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import everstep
from everstep._internal import Target

SWAPPED = -1.0
#: Shape of the model. Its float32 weights and momentum take 168 MB.
SIDE = 1024
LAYERS = 20
Write = Callable[[nn.Module, float], None]


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [layer.weight for layer in model]  # type: ignore[union-attr,misc]


def copy(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for p in weights(model):
            p.copy_(torch.full_like(p, value))


def ema(model: nn.Module, value: float) -> None:
    averages = [torch.full_like(p, value) for p in weights(model)]
    with torch.no_grad():
        for p, average in zip(weights(model), averages, strict=True):
            mine = p.clone()
            p.copy_(average)
            average.copy_(mine)


def load(model: nn.Module, value: float) -> None:
    model.load_state_dict({k: torch.full_like(v, value) for k, v in model.state_dict().items()})


def foreach(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        torch._foreach_zero_(weights(model))
        torch._foreach_add_(weights(model), value)


def fused(model: nn.Module, value: float) -> None:
    """Uses an optimizer that the manager does not know."""
    for p in weights(model):
        p.grad = p.detach() - value
    torch.optim.SGD(weights(model), lr=1.0, fused=True).step()
    for p in weights(model):
        p.grad = None


def compiled(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for p in weights(model):
            _fill(p, torch.tensor(value))


@torch.compile(backend="aot_eager")
def _fill(p: torch.Tensor, value: torch.Tensor) -> None:
    p.copy_(value.expand_as(p))


def scaler(model: nn.Module, value: float) -> None:
    """Makes a step that the scaler skips, then a write of the script's own."""
    optimizer = torch.optim.SGD(weights(model), lr=1.0)
    for p in weights(model):
        p.grad = torch.full_like(p, float("inf"))
    amp = torch.amp.GradScaler("cpu")
    amp.scale(torch.zeros(()))
    amp.step(optimizer)
    for p in weights(model):
        p.grad = None
    copy(model, value)


def data(model: nn.Module, value: float) -> None:
    for p in weights(model):
        p.data.copy_(torch.full_like(p, value))


def numpy(model: nn.Module, value: float) -> None:
    for p in weights(model):
        p.detach().numpy()[...] = value


def element(model: nn.Module, value: float) -> None:
    """Writes one number of each tensor."""
    for p in weights(model):
        p.detach().numpy()[SIDE // 2, 7] = value


def inference(model: nn.Module, value: float) -> None:
    with torch.inference_mode():
        for p in weights(model):
            p.copy_(torch.full_like(p, value))


def storage(model: nn.Module, value: float) -> None:
    for p in weights(model):
        p.data = torch.full_like(p, value)


#: The trained parameters while others are in their place, by module.
OWN: dict[nn.Module, nn.Parameter] = {}


def attribute(model: nn.Module, value: float) -> None:
    """Puts other parameters in place, then the trained ones again."""
    for layer in model:  # type: ignore[union-attr]
        own = OWN.pop(layer, None)
        if own is None:
            OWN[layer] = layer.weight
            layer.weight = nn.Parameter(torch.full_like(layer.weight, value))
        else:
            layer.weight = own


def nothing(model: nn.Module, value: float) -> None:
    """Does nothing: the undisturbed control."""


WAYS: dict[str, Write] = {
    "ema": ema, "load-state-dict": load, "copy": copy, "foreach": foreach, "fused": fused, "compiled": compiled, "scaler-skip": scaler,
    "data-copy": data, "numpy": numpy, "numpy-element": element, "inference-mode": inference, "data-swap": storage,
    "attribute": attribute, "none": nothing,
}  # fmt: skip


def wrong(found: torch.Tensor, step: int) -> int:
    return int((found != float(step)).sum())


def sealed(ckpt: everstep.CheckpointManager, step: int) -> bool | None:
    """Returns whether the snapshot of the step is exact, or ``None`` if it was not sealed."""
    arena = ckpt._tier._slots.arena  # type: ignore[attr-defined]
    if step not in [s for s, _ in arena.held()]:
        return None
    shard = arena.shard(step)
    entries = [e for e in shard.entries() if e.name.endswith(".weight")]
    rooms = [torch.empty(e.shape) for e in entries]
    shard.copy_to([Target(e.name, r.data_ptr(), e.bytes) for e, r in zip(entries, rooms, strict=True)])
    return all(wrong(r, step) == 0 for r in rooms)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--way", choices=WAYS, required=True)
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--kills", type=int, default=1)
    p.add_argument("--blind", action="store_true", help="without the check: the planted control")
    p.add_argument("--out", required=True)
    a = p.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    write = WAYS[a.way]
    ckpt = everstep.CheckpointManager(
        Path(a.out) / "ckpt", model=model, optimizer=optimizer, every=1, persist=0, replicas=0, overlap=True
    )
    done = ckpt.restore()
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    report = {"way": a.way, "life": life, "restored": done,
              "restored_torn": bool(done) and any(wrong(w.detach(), done) for w in weights(model)),
              "due": 0, "kept": 0, "torn": 0, "gap": 0, "discarded": 0}  # fmt: skip
    dice = random.Random(f"{a.way}{life}")
    last = done
    end = done + dice.randint(a.steps // 2, a.steps) if life < a.kills else a.steps * (a.kills + 1)
    for step in range(done + 1, max(end, done + 2) + 1):
        for w in weights(model):
            w.grad = torch.zeros_like(w)
        optimizer.step()
        with torch.no_grad():
            for w in weights(model):
                w.fill_(float(step))
        outcome = ckpt.step(step)
        if a.blind:
            slots = ckpt._tier._slots  # type: ignore[attr-defined]
            slots.compares = slots.torn = False
        report["discarded"] += len(getattr(outcome, "failed", ()))
        write(model, SWAPPED)
        if step == end and life < a.kills:
            print(json.dumps(report), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        write(model, float(step))
        # The next update does the same.
        ckpt._fence()
        report["due"] += 1
        good = sealed(ckpt, step)
        if good is not None:
            report["kept"] += 1
            report["torn"] += not good
            report["gap"] = max(report["gap"], step - last)
            last = step
        time.sleep(0.005)
    report["gap"] = max(report["gap"], step - last)
    print(json.dumps(report), flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
