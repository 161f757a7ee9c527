"""Changes to checkpoints by someone who knows the format, with correct checksums.

Headers, values, tables, manifests, and metadata of DCP.
"""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import torch

from figures.crafted_values import noise, number, tree
from figures.crafting import BLOB, Checkpoint, Shard, Tensor

DTYPES = ["BOOL", "U8", "I8", "F16", "BF16", "I32", "F32", "I64", "F64", "C64", "C128", "F8_E8M0", "F4", "F33", ""]


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def _set(t: Tensor, data: bytes) -> None:
    t.data, t.shape = data, [len(data)]


def _tensor(r: random.Random, c: Checkpoint) -> Tensor:
    return r.choice([t for t in r.choice(c.shards).tensors if not t.name.startswith(BLOB)])


def _blob(r: random.Random, c: Checkpoint) -> Tensor:
    blobs = [t for t in r.choice(c.shards).tensors if t.name.startswith(BLOB) and t.data and t.name != BLOB + "align"]
    return r.choice(blobs)


def value(r: random.Random, c: Checkpoint) -> None:
    t = _tensor(r, c)
    at = r.randrange(len(t.data))
    t.data = t.data[:at] + bytes([t.data[at] ^ 1 << r.randrange(8)]) + t.data[at + 1 :]


def length(r: random.Random, c: Checkpoint) -> None:
    t = r.choice(r.choice(c.shards).tensors)
    t.data = r.choice([t.data + b"x" * r.choice([1, 4, 64, 4096]), t.data[: r.randrange(len(t.data) + 1)]])


def dtype(r: random.Random, c: Checkpoint) -> None:
    _tensor(r, c).dtype = r.choice(DTYPES)


def shape(r: random.Random, c: Checkpoint) -> None:
    t = _tensor(r, c)
    at = r.randrange(len(t.shape) + 1)
    t.shape = r.choice([
        t.shape[::-1], [*t.shape[:at], 1, *t.shape[at:]], [*t.shape, 0],
        t.shape[:-1], [1 << 32, 1 << 32], [1 << 62, 4], [1 << 40, 0, 1 << 40],
        [abs(number(r, n)) for n in t.shape], t.shape + [1] * r.randint(30, 70),
    ])  # fmt: skip


def name(r: random.Random, c: Checkpoint) -> None:
    t = r.choice(r.choice(c.shards).tensors)
    t.name = r.choice(
        [_tensor(r, c).name, "__metadata__", "", "model.other", BLOB + "other", BLOB + "model", "a/b/c", "x" * 300]
    )


def gone(r: random.Random, c: Checkpoint) -> None:
    tensors = r.choice(c.shards).tensors
    tensors.remove(r.choice(tensors))


def header(r: random.Random, c: Checkpoint) -> None:
    def edit(lines: dict[str, Any]) -> None:
        key = r.choice([k for k in lines if k != "__metadata__"])
        other = r.choice([k for k in lines if k != "__metadata__"])
        what = r.randrange(5)
        if what == 0:
            lines[key]["data_offsets"] = lines[other]["data_offsets"]
        elif what == 1:
            lines[key]["data_offsets"], lines[other]["data_offsets"] = (
                lines[other]["data_offsets"],
                lines[key]["data_offsets"],
            )
        elif what == 2:
            lines[key]["data_offsets"] = [abs(number(r, n)) for n in lines[key]["data_offsets"]]
        elif what == 3:
            lines[key] = tree(r, lines[key])
        else:
            lines["__metadata__"] = {
                k: v for k, v in lines["__metadata__"].items() if k == "everstep.chunks" or r.random() < 0.5
            }

    def strict(lines: dict[str, Any]) -> None:
        edit(lines)
        # JSON has no bytes.
        text = json.dumps(lines, default=repr)
        lines.clear()
        lines.update(json.loads(text))

    r.choice(c.shards).edit = strict


def blob_noise(r: random.Random, c: Checkpoint) -> None:
    t = _blob(r, c)
    _set(t, noise(r, t.data))


def blob_tree(r: random.Random, c: Checkpoint) -> None:
    t = _blob(r, c)
    if t.data[:1] != b"\xc1":
        _set(t, noise(r, t.data))
        return
    try:
        changed = tree(r, msgpack.unpackb(t.data[1:], strict_map_key=False))
    except (ValueError, msgpack.UnpackException):
        # An earlier change has already broken it.
        _set(t, noise(r, t.data))
        return
    _set(t, b"\xc1" + msgpack.packb(changed))


def blob_swapped(r: random.Random, c: Checkpoint) -> None:
    one, other = _blob(r, c), _blob(r, c)
    first, second = one.data, other.data
    _set(one, second)
    _set(other, first)


def places(r: random.Random, c: Checkpoint) -> None:
    shard = r.choice(c.shards)
    words = shard.metadata.get("everstep.places", "0 0 2 10 10 0 0").split(" ")
    at = r.randrange(len(words))
    try:
        there = int(words[at], 16)
    except ValueError:
        # An earlier change has already broken it.
        there = 0
    words[at] = r.choice([f"{abs(number(r, there)):x}", "x", ""])
    shard.metadata["everstep.places"] = " ".join(words[: at if r.random() < 0.2 else None])


def manifest(r: random.Random, c: Checkpoint) -> None:
    key = r.choice(["step", "world_size", "saved_at", "writer", "lineage", "version"])
    c.manifest[key] = json.loads(json.dumps(tree(r, c.manifest.get(key)), default=repr))


#: The changes that the reader of a manager's checkpoints encounters. Pickles take the place of
#: values.
CHANGES: dict[str, Callable[[random.Random, Checkpoint], None]] = {
    f.__name__: f
    for f in (value, length, dtype, shape, name, gone, header, blob_noise, blob_tree, blob_swapped, places, manifest)
}


def table(r: random.Random, c: Checkpoint) -> None:
    """Changes the table of what was saved through DCP."""
    t = r.choice(c.shards).blob("dcp")
    _set(t, json.dumps(tree(r, json.loads(t.data)), default=repr).encode() if r.random() < 0.85 else noise(r, t.data))


def pickled(r: random.Random, c: Checkpoint, canary: Path) -> None:
    """Replaces a value by a pickle that runs code."""
    data = pickle.dumps(Payload(canary)) if r.random() < 0.5 else torch_saved(Payload(canary))
    _set(_blob(r, c), data)


def torch_saved(what: Any) -> bytes:
    """Returns the bytes that ``torch.save`` writes."""
    import io

    out = io.BytesIO()
    torch.save(what, out)
    return out.getvalue()


def parts(c: Checkpoint) -> Checkpoint:
    """Returns the checkpoint as two ranks would have saved it, each with half of every matrix."""
    layout = {"rank": 0, "world_size": 2, "replicated": False, "kinds": {"model": "module", "optimizer": "optimizer"}}
    found = Checkpoint({**c.manifest, "world_size": 2})
    for rank in range(2):
        one: Shard = c.shards[0]
        tensors, words = [], []
        for n, t in enumerate(one.tensors):
            if t.name == BLOB + "layout":
                data = b"\xc1" + msgpack.packb({**layout, "rank": rank})
                tensors.append(Tensor(t.name, "U8", [len(data)], data))
            elif len(t.shape) == 2:
                rows, half = t.shape[0] // 2, len(t.data) // 2
                words += [n, 0, 2, *t.shape, rank * rows, 0]
                tensors.append(Tensor(t.name, t.dtype, [rows, t.shape[1]], t.data[rank * half : (rank + 1) * half]))
            else:
                tensors.append(Tensor(t.name, t.dtype, list(t.shape), t.data))
        metadata = {
            **one.metadata,
            "rank": str(rank),
            "world_size": "2",
            "everstep.places": " ".join(f"{w:x}" for w in words),
        }
        found.shards.append(Shard({**one.entry, "rank": rank, "file": f"rank-{rank}.safetensors"}, tensors, metadata))
    return found
