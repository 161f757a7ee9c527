"""Crafted checkpoints of ``torch.distributed.checkpoint``.

Its own ones, imported, and those saved through ``everstep.dcp``.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import everstep.dcp
from everstep import convert
from figures import crafted_changes as changes
from figures import crafting
from figures.crafted_changes import Payload, torch_saved
from figures.crafted_values import noise, number
from figures.scripts import crafted_checkpoints as managers

#: Layers of the state below, by the paths that DCP gives them.
STATE = {
    "model": {"weight": torch.arange(48.0).view(6, 8), "bias": torch.ones(8).half()},
    "step": 7,
    "list": [torch.ones(2), "a", {"b": 2.5}],
    "flag": True,
}


def inputs(directory: Path, seed: int, first: int, last: int) -> dict[int, dict[str, Any]]:
    """Tries inputs, half of each kind."""
    dcp.save(STATE, checkpoint_id=str(directory / "torch"), no_dist=True)
    dcp.save(STATE, storage_writer=everstep.dcp.Writer(directory / "base" / "step-1"), no_dist=True)
    rows: dict[int, dict[str, Any]] = {}
    canary = directory / "ran"
    for n in range(first, last):
        r, step = random.Random(f"dcp {seed}/{n}"), n - first + 1
        row = _through_writer(directory, r, step, canary) if n % 2 else _imported(directory, r, step, canary)
        rows[step] = {"input": n, **row, "ran": canary.exists()}
    return rows


def _through_writer(directory: Path, r: random.Random, step: int, canary: Path) -> dict[str, Any]:
    crafted = crafting.read(directory / "base" / "step-1")
    crafted.manifest["step"] = step
    crafted.shards[0].metadata["step"] = str(step)
    kind = r.choice(
        [
            "table",
            "table",
            "pickled",
            "value",
            "length",
            "dtype",
            "shape",
            "name",
            "gone",
            "header",
            "blob_noise",
            "none",
        ]
    )
    with contextlib.suppress(StopIteration, IndexError):
        if kind == "table":
            changes.table(r, crafted)
        elif kind == "pickled":
            changes.pickled(r, crafted, canary)
        elif kind != "none":
            changes.CHANGES[kind](r, crafted)
    crafted.write(directory / "all" / f"step-{step}")
    row = managers.exported(directory / "all", step, directory / "out.pt")
    return {"kind": f"through-{kind}", "restore": row["export"], **row}


def _imported(directory: Path, r: random.Random, step: int, canary: Path) -> dict[str, Any]:
    source, out = directory / "crafted", directory / "all" / f"step-{step}"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(directory / "torch", source)
    kind = r.choice(list(_KINDS))
    _KINDS[kind](r, source, canary)
    verdict, said = managers.converted("import", source, out, "--from", "dcp")
    row: dict[str, Any] = {"kind": f"import-{kind}", "import": verdict, "said": said, "imported": verdict == "accepted"}
    if verdict == "accepted" and kind in ("none", "metadata", "data"):
        row["wrong"] = _differs(source, out)
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


_KINDS = {
    "none": lambda r, source, canary: None,
    "metadata": _metadata,
    "hostile": _hostile,
    "opcode": _by_opcode,
    "noise": _noise,
    "object": _object,
    "data": _data,
}
