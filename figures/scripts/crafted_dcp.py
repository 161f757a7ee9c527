"""Crafted checkpoints of ``torch.distributed.checkpoint``.

Its own ones, imported, and those saved through ``everstep.dcp``.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import everstep.dcp
from everstep import convert
from figures import crafted_changes as changes
from figures import crafted_codes as codes
from figures import crafting
from figures.crafted_changes import Payload, torch_saved
from figures.crafted_values import noise, number
from figures.crafting import BLOB, Checkpoint
from figures.scripts import crafted_checkpoints as managers
from figures.scripts import crafted_pickles as pickles

#: Layers of the state below, by the paths that DCP gives them.
STATE: dict[str, Any] = {
    "model": {"weight": torch.arange(48.0).view(6, 8), "bias": torch.ones(8).half()},
    "step": 7,
    "list": [torch.ones(2), "a", {"b": 2.5}],
    "flag": True,
}
#: Values without tensors among others, which DCP's planner leaves out.
SPARSE = {
    "model": {"weight": torch.ones(3)},
    "list": [{}, torch.ones(2), 1],
    "last": [1, {}],
    "empty": {},
    "only": [{}],
}
TENSORS = {"model.weight": STATE["model"]["weight"], "model.bias": STATE["model"]["bias"], "list.0": STATE["list"][0]}
#: Rows of a table that name one entry, and its bytes.
ROWS, ENTRY_BYTES = 1200, 1 << 20


def inputs(directory: Path, seed: int, first: int, last: int) -> dict[int, dict[str, Any]]:
    """Tries inputs, half of each kind."""
    for name, state in (("torch", STATE), ("torch-sparse", SPARSE)):
        dcp.save(state, checkpoint_id=str(directory / name), no_dist=True)
    for name, state in (("base", STATE), ("sparse", SPARSE)):
        dcp.save(state, storage_writer=everstep.dcp.Writer(directory / name / "step-1"), no_dist=True)
    rows: dict[int, dict[str, Any]] = {}
    canary = directory / "ran"
    for n in range(first, last):
        r, step = random.Random(f"dcp {seed}/{n}"), n - first + 1
        try_one = _through_writer if n % 2 else _imported
        managers.running(directory, f"input {n} (dcp, {'through Writer' if n % 2 else 'imported'})")
        before = managers.peak()
        row = try_one(directory, r, step, canary)
        managers.without_room(row, before)
        rows[step] = {"input": n, **row, "ran": canary.exists()}
    return rows


def _object_in_shard(r: random.Random, crafted: Checkpoint, canary: Path) -> str:
    """Replaces an object by one that only calls what is allowed."""
    t = r.choice([t for t in crafted.shards[0].tensors if t.name.startswith(BLOB + "dcp/")])
    file = pickles.crafted(r, torch.ones(2))
    t.data, t.shape = file.data, [len(file.data)]
    return file.wrong


def _rows(r: random.Random, crafted: Checkpoint, canary: Path) -> str:
    """Lets many rows of the table name one entry."""
    shard = crafted.shards[0]
    t = shard.blob("dcp")
    table = json.loads(t.data)
    what = r.random()
    if what < 0.3:
        shard.tensors.insert(0, crafting.Tensor("big", "U8", [ENTRY_BYTES], bytes(ENTRY_BYTES)))
        rows = [["big", f"big{n}", "uint8", [ENTRY_BYTES], [0], [ENTRY_BYTES]] for n in range(ROWS)]
    else:
        name, fqn, dtype, shape, _, sizes = r.choice([row for row in table["pieces"] if row[3]])
        times, rest = r.choice([2, 3, 500]), [0] * (len(shape) - 1)
        if what < 0.55:
            rows = [[name, f"{fqn}{n}", dtype, shape, [0, *rest], sizes] for n in range(times)]
        elif what < 0.8:
            # One tensor of many equal parts, instead of what was there.
            table["pieces"] = [row for row in table["pieces"] if row[1] != fqn]
            whole = [shape[0] * times, *shape[1:]]
            rows = [[name, fqn, dtype, whole, [shape[0] * n, *rest], sizes] for n in range(times)]
        else:
            rows = [[name, fqn, dtype, shape, [0, *rest], sizes] for _ in range(times)]
    table["pieces"] += rows
    for row in rows:
        # A name with a dot is a path.
        table["mappings"].setdefault(row[1], row[1].split("."))
    t.data = json.dumps(table).encode()
    t.shape = [len(t.data)]
    return ""


def _paths(r: random.Random, crafted: Checkpoint, canary: Path) -> str:
    """Puts numbers and names beside each other, and values below values."""
    t = crafted.shards[0].blob("dcp")
    table = json.loads(t.data)
    for _ in range(r.randint(1, 2)):
        fqn = r.choice(list(table["mappings"]))
        path = table["mappings"][fqn]
        at = r.randrange(len(path))
        # Most have the same name as before.
        other = (
            int(path[at])
            if str(path[at]).isdigit() and r.random() < 0.7
            else r.choice([str(path[at]), 0, 7, "0", "b", ""])
        )
        table["mappings"][fqn] = [*path[:at], other, *path[at + 1 :]]
    t.data = json.dumps(table).encode()
    t.shape = [len(t.data)]
    return ""


def _deep(r: random.Random, crafted: Checkpoint, canary: Path) -> str:
    """Nests lists or dicts in the table."""
    t = crafted.shards[0].blob("dcp")
    levels = r.choice([50, 500, 990, 5000, pickles.NESTED])
    opens, closes = r.choice([("[", "]"), ('{"a":', "}")])
    text = json.dumps(codes.placed(r, json.loads(t.data), "here"))
    t.data = text.replace('"here"', opens * levels + "1" + closes * levels).encode()
    t.shape = [len(t.data)]
    return ""


#: Changes only of what was saved through DCP. Each returns what a reader that takes it does wrong.
_THROUGH: dict[str, Callable[[random.Random, Checkpoint, Path], str]] = {
    "object": _object_in_shard,
    "rows": _rows,
    "paths": _paths,
    "deep": _deep,
    "sparse": lambda r, crafted, canary: "",
    "table": lambda r, crafted, canary: changes.table(r, crafted) or "",
    "pickled": lambda r, crafted, canary: changes.pickled(r, crafted, canary) or "",
    "none": lambda r, crafted, canary: "",
}
_ALSO = ("value", "length", "dtype", "shape", "name", "gone", "header", "blob_noise", "added", "swapped")


def _through_writer(directory: Path, r: random.Random, step: int, canary: Path) -> dict[str, Any]:
    kind = r.choice([*_THROUGH, "table", "object", *_ALSO])
    crafted = crafting.read(directory / ("sparse" if kind == "sparse" else "base") / "step-1")
    crafted.manifest["step"] = step
    crafted.shards[0].metadata["step"] = str(step)
    wrong = ""
    with contextlib.suppress(StopIteration, IndexError):
        if kind in _THROUGH:
            wrong = _THROUGH[kind](r, crafted, canary)
        else:
            changes.CHANGES[kind](r, crafted)
    crafted.write(directory / "all" / f"step-{step}")
    row = managers.exported(directory / "all", step, directory / "out.pt")
    if kind == "rows":
        # Tensors of several copies of an entry are not what the entry of their name is.
        row.pop("wrong", None)
    if wrong and row["export"] == "accepted":
        row["wrong"] = [*row.get("wrong", ()), wrong]
    if kind in ("none", "sparse") and row["export"] != "accepted":
        row["wrong"] = [f"refused what the default planner saves: {row['said']}"]
    return {"kind": f"through-{kind}", "restore": row["export"], **row}


def _imported(directory: Path, r: random.Random, step: int, canary: Path) -> dict[str, Any]:
    source, out = directory / "crafted", directory / "all" / f"step-{step}"
    kind = r.choice(list(_KINDS))
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(directory / ("torch-sparse" if kind == "sparse" else "torch"), source)
    wrong = _KINDS[kind](r, source, canary)
    verdict, said = managers.converted("import", source, out, "--from", "dcp")
    row: dict[str, Any] = {"kind": f"import-{kind}", "import": verdict, "said": said, "imported": verdict == "accepted"}
    if verdict == "accepted" and kind in ("none", "metadata", "data"):
        row["wrong"] = _differs(source, out)
    if verdict == "accepted" and wrong:
        row["wrong"] = [wrong]
    if verdict != "accepted" and kind in ("none", "sparse"):
        row["wrong"] = [f"refused what the default planner saves: {said}"]
    return row


def _differs(source: Path, out: Path) -> list[str]:
    """Returns what torch reads differently.

    Only used for inputs without code: metadata of DCP's own classes with other numbers.
    """
    state: dict[str, Any] = {}
    try:
        state = convert._dcp_state(dcp.FileSystemReader(source))
    except Exception:  # noqa: BLE001
        # torch cannot read it, so there is nothing to compare with.
        return []
    found = convert.load(out)
    one, other = _flat(state, ""), _flat(found, "")
    return [k for k in one.keys() | other.keys() if k not in one or k not in other or not _same(one[k], other[k])]


def _flat(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, inner in items for k, v in _flat(inner, f"{path}/{key}").items()}
    return {path: value}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.numpy().tobytes() == other.numpy().tobytes()
        )
    return type(one) is type(other) and repr(one) == repr(other)


def _metadata(r: random.Random, source: Path, canary: Path) -> None:
    """Makes numbers, names and paths contradict each other."""
    path = source / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    tensors = [(k, m) for k, m in metadata.state_dict_metadata.items() if hasattr(m, "chunks")]
    _, whole = r.choice(tensors)
    chunk = r.choice(whole.chunks)
    index = r.choice(list(metadata.storage_data))
    info = metadata.storage_data[index]

    def sizes(old: torch.Size) -> torch.Size:
        new = list(old)
        at = r.randrange(len(new) + 1)
        new[at : at + 1] = [min(max(number(r, new[at] if at < len(new) else 1), 0), (1 << 62) - 1)]
        return torch.Size(new)

    what = r.randrange(9)
    if what == 0:
        whole.size = sizes(whole.size)
    elif what == 1:
        chunk.sizes = sizes(chunk.sizes)
    elif what == 2:
        chunk.offsets = sizes(chunk.offsets)
    elif what == 3:
        whole.chunks.append(chunk) if r.random() < 0.5 else whole.chunks.clear()
    elif what == 4:
        whole.properties.dtype = r.choice([torch.float16, torch.int32, torch.float64, torch.bool, torch.complex64])
    elif what == 5:
        info.offset, info.length = (number(r, n) for n in (info.offset, info.length))
    elif what == 6:
        info.relative_path = r.choice(
            ["../torch/.metadata", "/etc/passwd", "", ".", "..", ".metadata", "none", "__0_0.distcp\0"]
        )
    elif what == 7:
        key = r.choice(list(metadata.planner_data))
        metadata.planner_data[key] = r.choice(
            [(), ("step",), ("model",), ("model", "weight"), ("list", 0), ("list", 7), ("list", "x"), 5, (1.5,)]
        )
    else:
        del metadata.storage_data[index]
    path.write_bytes(pickle.dumps(metadata))


def _hostile(r: random.Random, source: Path, canary: Path) -> None:
    """Puts a pickle that runs code somewhere into the metadata."""
    path = source / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    payload = Payload(canary)
    what = r.randrange(6)
    if what == 0:
        path.write_bytes(pickle.dumps(payload, protocol=r.randrange(6)))
        return
    name = r.choice(list(metadata.state_dict_metadata))
    if what == 1:
        metadata.planner_data[name] = payload
    elif what == 2:
        metadata.state_dict_metadata[name] = payload
    elif what == 3:
        metadata.storage_data[r.choice(list(metadata.storage_data))] = payload
    elif what == 4:
        metadata.storage_meta = payload
    else:
        metadata.state_dict_metadata["more"] = payload
    path.write_bytes(pickle.dumps(metadata, protocol=r.randrange(2, 6)))


def _by_opcode(r: random.Random, source: Path, canary: Path) -> None:
    """Writes calls of any name by hand."""
    module, name = r.choice(
        [
            "os mkdir",
            "posix mkdir",
            "builtins eval",
            "builtins exec",
            "torch load",
            "torch._utils _rebuild_tensor_v2",
            "operator attrgetter",
            "torch hub.load",
        ]
    ).split()
    argument = pickle.dumps(str(canary), protocol=2)[2:-1]
    call = (
        r.choice([b"c" + f"{module}\n{name}\n".encode(), b"X" + _text(module) + b"X" + _text(name) + b"\x93"])
        + b"("
        + argument
        + b"t"
        + r.choice([b"R", b"\x81", b"b"])
    )
    data = (source / ".metadata").read_bytes()
    whole = [b"\x80\x02" + call + b".", data[:-1] + call + b"0.", b"\x80\x04" + call + data[2:]]
    (source / ".metadata").write_bytes(r.choice(whole))


def _text(text: str) -> bytes:
    return len(text).to_bytes(4, "little") + text.encode()


def _noise(r: random.Random, source: Path, canary: Path) -> None:
    path = source / ".metadata"
    path.write_bytes(noise(r, path.read_bytes()))


def _object(r: random.Random, source: Path, canary: Path) -> None:
    """Replaces an object, or a tensor, by a pickle that runs code."""
    metadata = pickle.loads((source / ".metadata").read_bytes())
    index = r.choice(list(metadata.storage_data))
    data = r.choice([torch_saved(Payload(canary)), pickle.dumps(Payload(canary)), torch_saved([Payload(canary)])])
    (source / "more.distcp").write_bytes(data)
    info = metadata.storage_data[index]
    info.relative_path, info.offset, info.length = "more.distcp", 0, len(data)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))


def _data(r: random.Random, source: Path, canary: Path) -> None:
    """Changes bytes in the files with tensors; torch does not have checksums for all of them."""
    path = r.choice(sorted(source.glob("*.distcp")))
    data = bytearray(path.read_bytes())
    for _ in range(r.randint(1, 3)):
        data[r.randrange(len(data))] ^= 1 << r.randrange(8)
    path.write_bytes(bytes(data))


def _allowed(r: random.Random, source: Path, canary: Path) -> str:
    """Replaces an object, or a part of a tensor, by one that only calls what is allowed."""
    metadata = pickle.loads((source / ".metadata").read_bytes())
    index = r.choice(list(metadata.storage_data))
    file = pickles.crafted(r, TENSORS.get(index.fqn, torch.ones(2)))
    (source / "more.distcp").write_bytes(file.data)
    info = metadata.storage_data[index]
    info.relative_path, info.offset, info.length = "more.distcp", 0, len(file.data)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    return file.wrong


def _nested_metadata(r: random.Random, source: Path, canary: Path) -> None:
    """Nests lists or tuples in the metadata's own pickle."""
    data = (source / ".metadata").read_bytes()
    levels = r.choice([500, 5000, pickles.NESTED])
    nested = r.choice([b"]" * levels + b"a" * (levels - 1), b")" + b"\x85" * levels])
    # Instead of a name in it, or all of it, or beside that.
    names = (
        b"\x8c" + bytes([len(n)]) + n.encode()
        for n in ("step", "model", "model.weight", "list", "list.0", "fqn", "offset")
    )
    name = r.choice([n for n in names if n in data])
    whole = [data.replace(name, nested, 1), b"\x80\x02" + nested + b".", data[:-1] + nested + b"0."]
    (source / ".metadata").write_bytes(r.choice(whole))


def _mixed(r: random.Random, source: Path, canary: Path) -> None:
    """Puts numbers and names beside each other in the paths of values."""
    metadata = pickle.loads((source / ".metadata").read_bytes())
    for _ in range(r.randint(1, 2)):
        key = r.choice(list(metadata.planner_data))
        path = list(metadata.planner_data[key])
        path[r.randrange(len(path))] = r.choice([0, 1, 2, 7, -1, True, "0", "1", "b", "", "model"])
        metadata.planner_data[key] = tuple(path)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))


#: A change may return what a reader that takes it does wrong.
_KINDS: dict[str, Callable[[random.Random, Path, Path], str | None]] = {
    "none": lambda r, source, canary: None,
    "sparse": lambda r, source, canary: None,
    "metadata": _metadata,
    "hostile": _hostile,
    "opcode": _by_opcode,
    "noise": _noise,
    "object": _object,
    "data": _data,
    "allowed": _allowed,
    "nested": _nested_metadata,
    "mixed": _mixed,
}
