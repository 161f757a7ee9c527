"""What ``everstep ckpt verify`` cannot see by checksums: values and tables are decoded as ``restore()`` and :mod:`everstep.dcp` do.

Reads a JSON array of shards whose bytes are good, ``{"checkpoint": DIRECTORY}`` with all of its shards or ``{"slot": FILE, "rank": R,
"world_size": N}`` (paths as lists of bytes), and prints one line of JSON for each: a list of (rank or ``null``, what is wrong).
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from ._internal import CheckpointError, DamagedError, Shard, WholeCheckpoint, open_shards, open_slot
from .blob_format import BLOB
from .damage import reading
from .dcp.foreign import safe_load
from .dcp.pieces import TABLE, read_table
from .values import MODULE, Values, objects

Wrong = tuple[int | None, str]


def shard_values(shard: Shard, rank: int, world_size: int) -> None:
    """Decodes all values of a shard.

    Raises:
        CheckpointError: when ``restore()`` would refuse one.
    """
    values = Values(shard)
    layout = values.layout()
    kinds = {} if layout is None else layout.kinds
    if layout is not None and (layout.rank, layout.world_size) != (rank, world_size):
        raise DamagedError(
            f"{shard.path} says that it is of rank {layout.rank} of {layout.world_size}, it is of rank {rank} of {world_size}",
            [],
        )
    there = objects(values.entries)
    for name in sorted(kinds or there):
        if name in there:
            values.of_object(name, kinds.get(name))
        elif kinds[name] != MODULE:
            raise DamagedError(f"{shard.path} has no value of {name}", [])
    values.of_step()
    values.places()
    # Once more as it is when tensors are filled: devices, parameters, gradients.
    values.finished()


def checkpoint_values(path: str) -> Iterator[Wrong]:
    """What is wrong with the values and tables of a published checkpoint, whose shards' bytes are good."""
    shards = open_shards(path)
    if any(TABLE in (e[0] for e in shard.entries()) for shard in shards):
        yield from _dcp_values(path, shards)
        return
    for rank, shard in enumerate(shards):
        try:
            shard_values(shard, rank, len(shards))
        except CheckpointError as e:
            yield rank, str(e.args[0])
    if any(shard.places() for shard in shards):
        # Parts of larger tensors: together they are all of them.
        whole = WholeCheckpoint(path)
        tensors = [
            (name, shape) for name, _, shape, *_ in whole.tensors() if not name.startswith(BLOB) and 0 not in shape
        ]
        whole.plan([(name, [0] * len(shape), shape, False, 0, 0) for name, shape in tensors])


def _dcp_values(path: str, shards: list[Shard]) -> Iterator[Wrong]:
    table = read_table(path, shards)
    for fqn, (rank, name) in table.objects.items():
        try:
            safe_load(io.BytesIO(shards[rank].bytes(name)), fqn)
        except DamagedError as e:
            yield rank, str(e.args[0])
        except CheckpointError:
            # It is good, and nothing for everstep to unpickle: Reader(allow_pickle=True) does.
            continue


def wrongs(item: dict[str, Any]) -> list[Wrong]:
    """What is wrong with one of the shards that were asked for."""
    found: list[Wrong] = []
    try:
        with reading("it"):
            if "slot" in item:
                shard_values(open_slot(os.fsdecode(bytes(item["slot"]))), item["rank"], item["world_size"])
            else:
                found.extend(checkpoint_values(os.fsdecode(bytes(item["checkpoint"]))))
    except CheckpointError as e:
        found.append((None, str(e.args[0])))
    return found


def main() -> int:
    """``python -m everstep.verify``, as ``everstep ckpt verify`` calls it."""
    for item in json.load(sys.stdin):
        print(json.dumps(wrongs(item)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
