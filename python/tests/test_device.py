"""State on a device fills a slot before the slot is sealed.

Streams need a GPU: `make figure NAME=gpu-snapshot`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import nn

import everstep
from everstep import device
from everstep._internal import Arena, bytes_per_slot, reserve_slot


def test_a_slot_that_is_filled_from_elsewhere_is_sealed_with_its_checksums(tmp_path):
    size = 3_000_000
    paths = [str(tmp_path / f"slot-{i}") for i in range(2)]
    for path in paths:
        reserve_slot(path, bytes_per_slot(size, 64 << 10))
    arena = Arena(paths, "j", 0, 1, 1)
    for step in (1, 2, 3):
        place = arena.begin(step, [("a", "U8", [size], size)], None, 0)
        assert place is not None
        address, length = place
        assert length == size
        ctypes.memset(address, step, size)
        assert step not in [s for s, _ in arena.held()], "nothing is there before the seal"
        arena.seal(2, None)
        assert [s for s, _ in arena.held()] == [step, step - 1][: step if step < 2 else 2]
    shard = arena.shard(3)
    shard.verify()
    assert shard.bytes("a") == b"\x03" * size


def test_what_is_no_contiguous_tensor_is_restored_as_it_was(tmp_path, monkeypatch):
    """The code path for state on a GPU, with tensors on the CPU (which it copies in mixed states, too)."""
    monkeypatch.setattr(device, "on_device", lambda _: True)
    monkeypatch.setattr(device.DeviceCopies, "_register", lambda *_: None)
    torch.manual_seed(3)

    def made() -> tuple[nn.Module, torch.optim.Optimizer, everstep.CheckpointManager]:
        model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Flatten())
        model.register_parameter("transposed", nn.Parameter(torch.randn(5, 3).t()))
        model.register_buffer("every_second", torch.randn(4, 6)[:, ::2])
        model.register_buffer("expanded", torch.randn(3, 1).expand(3, 4))
        optimizer = torch.optim.Adam(model.parameters())
        return model, optimizer, everstep.CheckpointManager(tmp_path, model=model, optimizer=optimizer, persist=1)

    model, optimizer, ckpt = made()
    assert ckpt.restore() == 0
    (model(torch.randn(2, 3, 6, 6)).sum() + model.transposed.square().sum()).backward()
    optimizer.step()
    assert not optimizer.state[model.transposed]["exp_avg"].is_contiguous()
    ckpt.step(1)
    ckpt.close()
    other, others, ckpt = made()
    assert ckpt.restore() == 1
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    for one, two in zip(optimizer.state_dict()["state"].values(), others.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(one[k], two[k]) for k in one)
