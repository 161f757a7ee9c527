"""Changes to checkpoints by someone who knows the format, with correct checksums.

Headers, values, tables, manifests, and metadata of DCP.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import msgpack
import torch

from figures import crafted_codes as codes
from figures.crafted_values import EDGES, noise, number, tree
from figures.crafting import BLOB, Checkpoint, Shard, Tensor

DTYPES = ["BOOL", "U8", "I8", "F16", "BF16", "I32", "F32", "I64", "F64", "C64", "C128", "F8_E8M0", "F4", "F33", ""]
#: Names of tensors that are added: of blobs, of objects, and of nothing.
_BLOBS = ["dcp", "dcp/x", "parts", "align", "align", "other", "a/b", "", "model", "extra", "layout", "rng", "optimizer"]
_OWNED = [
    "model.extra", "model.0.extra", "encoder.extra", "encoder._extra_state", "optimizer.x", "optimizer/state/model.0.weight/x",
    "held/x", "optimizer/values/param_0", "sgd/groups/0/lr",
]  # fmt: skip
_MADE_UP = ["x", "other", "a/b", "a.b", "x/y.z", ".x", "x.", "/", "\0", "é.é", "model", "extra/x"]


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


def _with_tree(r: random.Random, t: Tensor, change: Callable[[Any], Any]) -> None:
    """Changes the tree of a blob, or the bytes of one that has none."""
    try:
        if t.data[:1] != codes.MARK:
            raise ValueError("no typed value")
        data = codes.MARK + msgpack.packb(change(msgpack.unpackb(t.data[1:], strict_map_key=False)))
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        # An earlier change has already broken it, or made it deeper than msgpack writes.
        data = noise(r, t.data)
    _set(t, data)


def value(r: random.Random, c: Checkpoint) -> None:
    t = r.choice([t for t in r.choice(c.shards).tensors if t.data and not t.name.startswith(BLOB)])
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
    _with_tree(r, _blob(r, c), lambda node: tree(r, node))


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


def _names(c: Checkpoint) -> list[str]:
    return [t.name for t in c.shards[0].tensors if not t.name.startswith(BLOB)]


def _any_value(r: random.Random, shard: Shard) -> bytes:
    """Returns bytes for a blob: of any name's format, none of which may belong there."""
    names = [t.name for t in shard.tensors]
    rows = [[n, n, "float32", [2], [0], [2]] for n in r.choices(names, k=r.randrange(3))]
    table = {"version": 1, "pieces": rows, "objects": r.choice([[], ["x"]]), "mappings": {}}
    words = [r.choice([0, 1, 2, 8, 16, len(names), *EDGES[-5:-1]]) for _ in range(r.randrange(9))]
    typed = {"state": {}, "groups": []} if r.random() < 0.2 else codes.strange(r, names)
    return r.choice([
        json.dumps(table).encode(), struct.pack(f"<{len(words)}Q", *words), bytes(r.randrange(9)), b"{}",
        codes.MARK + msgpack.packb(typed), codes.MARK + msgpack.packb(typed), r.choice(shard.tensors).data,
    ])  # fmt: skip


def added(r: random.Random, c: Checkpoint) -> None:
    """Adds a tensor: a value of everstep's, a copy in a module or an optimizer, or one with a
    made-up name."""
    shard = r.choice(c.shards)
    what, like = r.random(), r.choice(shard.tensors)
    if what < 0.4:
        owner = r.choice(_BLOBS)
        data = _any_value(r, shard)
        new = Tensor(BLOB + owner, r.choice(["U8", "U8", "U8", "U8", "F32", "BOOL"]), [len(data)], data)
        if new.dtype == "F32":
            new.shape, new.data = [len(data) // 4], data[: len(data) // 4 * 4]
    elif what < 0.8:
        new = replace(like, name=r.choice(_OWNED))
    else:
        name = r.choice(_MADE_UP)
        new = replace(like, name=name, dtype=like.dtype if r.random() < 0.7 else r.choice(DTYPES))
    shard.tensors.insert(r.randrange(len(shard.tensors) + 1), new)


def grown(r: random.Random, c: Checkpoint) -> None:
    """Adds keys, items and values of all types to a value, or gives the generator of numpy another
    state."""
    t = r.choice(c.shards).blob("rng") if r.random() < 0.2 else _blob(r, c)
    if t.name == BLOB + "rng" and r.random() < 0.7:
        _with_tree(r, t, lambda node: {**node, "numpy": codes.generator(r)} if isinstance(node, dict) else node)
    else:
        _with_tree(r, t, lambda node: codes.grown(r, node, _names(c)))


def deep(r: random.Random, c: Checkpoint) -> None:
    """Puts containers in containers into a value, more than any stack takes, or such that each
    holds the one before twice."""
    t, what = _blob(r, c), r.random()
    if what < 0.15:
        _set(t, codes.nested_extensions(r))
    elif what < 0.5:
        _with_tree(r, t, lambda node: codes.placed_first(r, node, codes.doubled(r)))
    else:
        # msgpack does not write as many levels as it might be given.
        mark = f"here {r.random()}"
        _with_tree(r, t, lambda node: codes.placed(r, node, mark))
        _set(t, t.data.replace(msgpack.packb(mark), codes.nested(r)))


def swapped(r: random.Random, c: Checkpoint) -> None:
    """Gives two tensors each other's names, or a value another tensor."""
    shard = r.choice(c.shards)
    tensors = [t for t in shard.tensors if not t.name.startswith(BLOB)]
    if r.random() < 0.5:
        one, other = r.choice([(a, b) for a, b in combinations(tensors, 2) if (a.dtype, a.shape) == (b.dtype, b.shape)])
        one.name, other.name = other.name, one.name
        return

    def changed(node: Any) -> Any:
        found = r.choice(codes.references(node))
        given = found[codes.TENSOR]
        old = given if isinstance(given, str) else given[0]
        like = [
            t.name for t in tensors if any((t.dtype, t.shape) == (u.dtype, u.shape) for u in tensors if u.name == old)
        ]
        new = r.choice(like if like and r.random() < 0.7 else [t.name for t in tensors])
        found[codes.TENSOR] = new if isinstance(given, str) else [new, *given[1:]]
        return node

    _with_tree(r, r.choice([t for t in shard.tensors if t.name.startswith(BLOB) and t.data[:1] == codes.MARK]), changed)


#: The changes that the reader of a manager's checkpoints encounters. Pickles take the place of
#: values.
CHANGES: dict[str, Callable[[random.Random, Checkpoint], None]] = {
    f.__name__: f
    for f in (
        value, length, dtype, shape, name, gone, header, blob_noise, blob_tree, blob_swapped, places, manifest, added, grown, deep, swapped,
    )
}  # fmt: skip


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
    """Returns the checkpoint as two ranks would have saved it, each with half the rows of every
    matrix."""
    layout = {**msgpack.unpackb(c.shards[0].blob("layout").data[1:]), "world_size": 2, "replicated": False}
    found = Checkpoint({**c.manifest, "world_size": 2})
    for rank in range(2):
        one: Shard = c.shards[0]
        tensors, words = [], []
        for n, t in enumerate(one.tensors):
            if t.name == BLOB + "layout":
                data = b"\xc1" + msgpack.packb({**layout, "rank": rank})
                tensors.append(Tensor(t.name, "U8", [len(data)], data))
            elif len(t.shape) == 2:
                rows, bytes_ = t.shape[0], len(t.data) // t.shape[0]
                begins, ends = ((0, rows // 2), (rows // 2, rows))[rank]
                words += [n, 0, 2, *t.shape, begins, 0]
                data = t.data[begins * bytes_ : ends * bytes_]
                tensors.append(Tensor(t.name, t.dtype, [ends - begins, t.shape[1]], data))
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
