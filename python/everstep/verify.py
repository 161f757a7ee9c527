"""The part of ``everstep ckpt verify`` that checksums cannot cover: decodes values and tables as
``restore()`` and :mod:`everstep.dcp` do.

Reads a JSON array of shards whose bytes are valid (paths are lists of bytes), and prints one line
of JSON for each: a list of (rank or ``null``, what is wrong), with ``null`` for a shard whose
values cannot be checked. The shards are those of a checkpoint, ``{"checkpoint": DIRECTORY}``, some
of them, ``{"checkpoint": DIRECTORY, "ranks": [R, …], "world_size": N}``, or one in memory,
``{"slot": FILE, "rank": R, "world_size": N}``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from ._internal import (
    CheckpointError,
    DamagedError,
    Shard,
    WholeCheckpoint,
    open_shard,
    open_shards,
    open_slot,
)
from .blob_format import BLOB
from .damage import OutOfMemory, Unavailable, reading
from .dcp.pieces import TABLE, read_table
from .dcp.reader import plain
from .tensor_places import Place
from .values import Values, objects

Wrong = tuple[int | None, str | None]


def shard_values(shard: Shard, rank: int, world_size: int) -> None:
    """Decodes all values of a shard.

    Raises:
        CheckpointError: when ``restore()`` would refuse one.
    """
    values = Values(shard)
    layout = values.layout()
    if layout is not None and (layout.rank, layout.world_size) != (rank, world_size):
        raise DamagedError(
            f"{shard.path} claims to be of rank {layout.rank} of {layout.world_size}, but is of rank {rank} of {world_size}",
            [],
        )
    for name in sorted(objects(values.entries)):
        values.of_object(name)
    values.of_step()
    values.places(world_size)
    # Decoded again as after tensors are filled: devices, parameters, gradients.
    values.finished()


def checkpoint_values(path: str) -> Iterator[Wrong]:
    """Yields what is wrong with the values and tables of a published checkpoint, whose shards'
    bytes are valid."""
    shards = open_shards(path)
    if any(_is_of_dcp(shard) for shard in shards):
        yield from _dcp_values(path, shards)
        return
    for rank, shard in enumerate(shards):
        try:
            shard_values(shard, rank, len(shards))
        except Unavailable:
            # Another machine may restore it.
            yield rank, None
        except CheckpointError as e:
            yield rank, str(e.args[0])
    if any(shard.places() for shard in shards):
        try:
            whole = WholeCheckpoint(path)
        except DamagedError:
            raise
        except CheckpointError:
            # Pipeline stages have used the same names for tensors of different shapes. Each rank
            # can restore its own.
            return
        # Parts of larger tensors must cover them completely.
        tensors = [t for t in whole.tensors() if not t.name.startswith(BLOB) and 0 not in t.shape]
        whole.plan([Place.whole(t.shape).wanted(t.name) for t in tensors])


def good_values(path: str, ranks: list[int], world_size: int) -> Iterator[Wrong]:
    """Yields what is wrong with the values of these ranks of a published checkpoint whose other
    shards are damaged."""
    for rank in ranks:
        try:
            shard = open_shard(path, rank)
            if _is_of_dcp(shard):
                # Its values are those that the tables of all shards name together.
                yield rank, None
            else:
                shard_values(shard, rank, world_size)
        except Unavailable:
            yield rank, None
        except CheckpointError as e:
            yield rank, str(e.args[0])


def _is_of_dcp(shard: Shard) -> bool:
    return TABLE in (e.name for e in shard.entries())


def _dcp_values(path: str, shards: list[Shard]) -> Iterator[Wrong]:
    table = read_table(path, shards)
    for fqn, (rank, name) in table.objects.items():
        try:
            plain(fqn, shards[rank].bytes(name))
        except (DamagedError, OutOfMemory) as e:
            yield rank, str(e.args[0])
        except Unavailable:
            yield rank, None
        except CheckpointError:
            # It is valid, but everstep does not unpickle it; Reader(allow_pickle=True) does.
            continue


def wrongs(item: dict[str, Any]) -> list[Wrong]:
    """Returns what is wrong with one of the requested shards."""
    found: list[Wrong] = []
    try:
        with reading("it"):
            if "slot" in item:
                shard_values(open_slot(os.fsdecode(bytes(item["slot"]))), item["rank"], item["world_size"])
            elif "ranks" in item:
                path = os.fsdecode(bytes(item["checkpoint"]))
                found.extend(good_values(path, item["ranks"], item["world_size"]))
            else:
                found.extend(checkpoint_values(os.fsdecode(bytes(item["checkpoint"]))))
    except CheckpointError as e:
        found.append((None, str(e.args[0])))
    return found


def main() -> int:
    """Runs ``python -m everstep.verify``, as ``everstep ckpt verify`` calls it."""
    for item in json.load(sys.stdin):
        # A name may have what no other program reads as text.
        found = [(rank, wrong and wrong.encode("utf-8", "backslashreplace").decode()) for rank, wrong in wrongs(item)]
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
