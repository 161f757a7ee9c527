"""A copy that another thread begins while the rest of a step is collected is the copy of that
step."""

import pytest
import torch
from torch.optim import lr_scheduler

from everstep.slots import Snapshot
from everstep.state import Item, State
from everstep.structure import Structure, _is_inert
from everstep.values import Layout

SCRIPT = """
import os, torch, everstep

class Beside:
    \"\"\"State beside the model, which changes the model for as long as it is asked.\"\"\"

    def __init__(self, model):
        self.model, self.size = model, 0

    def change(self, by):
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(by)

    def state_dict(self):
        self.change(1024)
        try:
            return {"bytes": b"x" * self.size}
        finally:
            self.change(-1024)

    def load_state_dict(self, state):
        self.size = len(state["bytes"])

width, overlap = WIDTH, OVERLAP
model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width))
for p in model.parameters():
    # Small integers: adding and subtracting gives the same again.
    torch.nn.init.uniform_(p, -8, 8).data.round_()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
beside = Beside(model)
ckpt = everstep.CheckpointManager(
    "ckpt", model=model, optimizer=optimizer, beside=beside, persist=0, every=1, overlap=overlap
)
start = ckpt.restore()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    same = all(torch.equal(a, b.detach()) for a, b in zip(torch.load("weights.pt"), model.parameters()))
    print("RESTORED", start, same, beside.size, ckpt.extra, flush=True)
    ckpt.close()
    raise SystemExit(0)
for step in range(1, 31):
    for p in model.parameters():
        p.grad = torch.full_like(p, float(step % 3))
    optimizer.step()
    # It outgrows the room that was reserved for it.
    beside.size = {10: 3_000_000, 20: 10}.get(step, beside.size)
    if step == 15:
        try:
            ckpt.step(step, bad=object())
        except everstep.CheckpointError as e:
            print("REFUSED", e, flush=True)
        continue
    if step == 30:
        # The agent may be behind so fast a loop and hold every slot; a step is skipped then.
        ckpt.wait("peer")
    ckpt.step(step, note=step)
torch.save([p.detach() for p in model.parameters()], "weights.pt")
ckpt.wait()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("width", "overlap"), [(8, "'auto'"), (300, "'auto'"), (1000, "False")])
def test_what_is_restored_is_the_step_whatever_was_collected_meanwhile(everstep, script, width, overlap):
    path = script(SCRIPT.replace("WIDTH", str(width)).replace("OVERLAP", overlap))
    done = everstep("run", "--standalone", "--max-restarts", "1", path, timeout=120)
    assert "RESTORED 30 True 10 {'note': 30}" in done.stdout, done.stdout + done.stderr
    assert "REFUSED" in done.stdout and "bad" in done.stdout


def test_only_schedulers_that_run_no_code_of_the_user_are_asked_while_the_copy_goes_on(monkeypatch):
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)

    class Own(lr_scheduler.StepLR):
        def state_dict(self):
            return {}

    step, own = lr_scheduler.StepLR(optimizer, 1), Own(optimizer, 1)
    several = lr_scheduler.SequentialLR(optimizer, [step, own], [1])
    assert _is_inert(step) and not any(map(_is_inert, (own, several, object())))
    step.state_dict = dict
    assert not _is_inert(step)
    step = lr_scheduler.StepLR(optimizer, 1)
    monkeypatch.setattr(lr_scheduler.LRScheduler, "state_dict", lambda _: {})
    assert not _is_inert(step)


class Begun:
    """Counts the copies that are begun and given up."""

    def __init__(self):
        self.begun = self.cancelled = 0

    def start(self, step, layout, sizes, persist):
        self.begun += 1
        return True

    def cancel(self):
        self.cancelled += 1


def test_a_copy_of_another_structure_is_given_up():
    """Members that change while every tensor stays where it is are noticed after the copy has
    begun."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = State({"model": model, "optimizer": optimizer}, Layout(0, 1, replicated=True))
    early = Begun()
    structure = Structure(state, early)

    def swapped():
        model[0].weight, model[1].weight = model[1].weight, model[0].weight

    def renamed():
        model.other = model._modules.pop("1")

    def another_value():
        optimizer.state[model[0].bias]["note"] = 3

    def order_of_parameters():
        optimizer.param_groups[0]["params"].reverse()

    def hooked():
        model[0].register_state_dict_post_hook(lambda *_: None)

    def named(snapshot):
        return {i.name: i.tensor.tolist() for i in [*snapshot.items] if not i.name.startswith("__everstep__/")}

    for step, change in enumerate([swapped, another_value, order_of_parameters, renamed, hooked]):
        for _ in range(70):
            # After a change, a copy begins early only once the structure has been worked out again.
            if structure.snapshot(step, {}, None).started:
                break
        else:
            raise AssertionError(f"not known again before {change.__name__}")
        given_up = early.cancelled
        change()
        after = structure.snapshot(step, {}, None)
        assert not after.started and early.cancelled == given_up + 1, change.__name__
        assert named(after) == {
            i.name: i.tensor.tolist() for i in state.collect({}) if not i.name.startswith("__everstep__/")
        }, change.__name__


def test_what_the_optimizer_changes_stays_known_as_such_whatever_its_order_in_memory():
    """Ranks compare the bytes before the first tensor that changes outside the optimizer."""
    conv = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    snapshot = Snapshot(1, [Item("conv", conv, eager=False), Item("mean", torch.zeros(2, 2).t(), eager=True)], None)
    assert [item.eager for item in snapshot.host()] == [False, True]
