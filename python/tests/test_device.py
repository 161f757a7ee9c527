"""What a device fills: the slot between its beginning and its seal. (Streams need a GPU: `make figure NAME=gpu-snapshot`.)"""

from __future__ import annotations

import ctypes

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
