"""State on a device fills a slot before the slot is sealed.

Streams need a GPU: `make figure NAME=gpu-snapshot`.
"""

from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch
from torch import nn

import everstep
from everstep import device
from everstep._internal import Arena, Entry, bytes_per_slot, reserve_slot
from everstep.slots import Snapshot
from everstep.state import Item


def test_a_slot_that_is_filled_from_elsewhere_is_sealed_with_its_checksums(tmp_path):
    size = 3_000_000
    paths = [str(tmp_path / f"slot-{i}") for i in range(2)]
    for path in paths:
        reserve_slot(path, bytes_per_slot(size, 64 << 10))
    arena = Arena(paths, "j", 0, 1, 1)
    for step in (1, 2, 3):
        place = arena.begin(step, [Entry("a", "U8", [size], size)], None, 0)
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
    """The code path for state on a GPU, with tensors on the CPU (which it copies in mixed states,
    too)."""
    monkeypatch.setattr(device, "on_device", lambda _: True)
    monkeypatch.setattr(device.DeviceCopies, "pin", lambda *_: None)
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


class _Stream:
    """A stream of a device, whose work is done at once."""

    def __init__(self, *_: object) -> None:
        self.waited_for: list[_Stream] = []
        self.synchronized = 0

    def wait_stream(self, other: _Stream) -> None:
        self.waited_for.append(other)

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        self.synchronized += 1


class _OnDevice(torch.Tensor):
    """A tensor that claims to be on a GPU. ``fails`` has the operations for which memory is
    short."""

    device = property(lambda _: torch.device("cuda", 0))
    fails: frozenset[str] = frozenset()
    number = 0

    def detach(self) -> _OnDevice:
        return self

    def clone(self, **_: object) -> torch.Tensor:
        return self._made("clone")

    def contiguous(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor) if self.is_contiguous() else self._made("contiguous")

    def _made(self, what: str) -> torch.Tensor:
        if f"{what} {self.number}" in self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nMore.")
        return self.as_subclass(torch.Tensor).contiguous()


@pytest.fixture
def training(monkeypatch) -> _Stream:
    """The stream of the training on a simulated device, with 1 TB of free memory."""
    stream = _Stream()
    monkeypatch.setattr(device.DeviceCopies, "pin", lambda *_: None)
    monkeypatch.setattr(device, "_PART_BYTES", 1)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 40, 1 << 40))
    return stream


def _items(first: int) -> list[Item]:
    tensors = [torch.arange(first, first + 6.0).view(2, 3).t().as_subclass(_OnDevice) for _ in range(4)]
    for number, tensor in enumerate(tensors):
        tensor.number = number
    return [Item(f"t{n}", t, False) for n, t in enumerate(tensors)]


def _arena(path) -> Arena:
    reserve_slot(str(path / "slot"), bytes_per_slot(4 * 24, 64 << 10))
    return Arena([str(path / "slot")], "j", 0, 1, 1)


def _captured(arena: Arena, copies: device.DeviceCopies, step: int) -> None:
    assert copies.capture(arena, Snapshot(step, _items(step), None), 1, None)
    copies.wait()
    shard = arena.shard(step)
    for n in range(4):
        assert shard.bytes(f"t{n}") == torch.arange(step, step + 6.0).view(2, 3).t().contiguous().numpy().tobytes()


def test_a_copy_on_the_device_for_which_there_is_no_memory_is_left_out(tmp_path, monkeypatch, training):
    arena, copies = _arena(tmp_path), device.DeviceCopies()
    _captured(arena, copies, 1)
    assert training.waited_for == [], "the copies on the device are ordered before what follows"
    monkeypatch.setattr(_OnDevice, "fails", frozenset({"clone 2"}))
    _captured(arena, copies, 2)
    assert training.waited_for == [*copies._streams.values()], "what follows on the device waits for the copy"


def test_a_snapshot_for_which_the_device_has_no_memory_fails_and_the_next_one_is_made(tmp_path, monkeypatch, training):
    arena, copies = _arena(tmp_path), device.DeviceCopies()
    monkeypatch.setattr(_OnDevice, "fails", frozenset({"clone 1", "contiguous 3"}))
    with pytest.raises(everstep.CheckpointError, match=r"Tried to allocate 2.00 MiB.\); leave more of it free"):
        copies.capture(arena, Snapshot(1, _items(1), None), 1, None)
    assert arena.held() == [] and not copies.seals
    assert [s.synchronized for s in copies._streams.values()] == [1], "nothing writes to the slot any more"
    monkeypatch.setattr(_OnDevice, "fails", frozenset())
    _captured(arena, copies, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_limit_on_the_memory_of_the_process_does_not_end_the_training(tmp_path):
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))).cuda()
    ckpt = everstep.CheckpointManager(tmp_path, model=model, persist=1)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (160 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            [p.clone() for p in model.parameters()]
        ckpt.step(1)
        with torch.no_grad():
            saved = [p.cpu() for p in model.parameters()]
            for p in model.parameters():
                p.zero_()
        assert everstep.CheckpointManager(tmp_path, model=model).restore() == 1
        assert all(torch.equal(p.cpu(), s) for p, s in zip(model.parameters(), saved, strict=True))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
