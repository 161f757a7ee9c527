"""Hand-made files of ``torch.save`` that only call what torch's own safe unpickler allows."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

#: Levels of lists in lists.
NESTED = 100_000


@dataclass
class Crafted:
    """A file of ``torch.save``."""

    data: bytes
    #: What a reader that takes it does wrong, if anything.
    wrong: str = ""


class _Call:
    """Is a call when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def saved(what: Any, *, packed: bool = True) -> bytes:
    """Returns what ``torch.save`` writes, or with ``packed=False`` what its earlier versions
    wrote."""
    out = io.BytesIO()
    torch.save(what, out, _use_new_zipfile_serialization=packed)
    return out.getvalue()


def _pickles(data: bytes) -> list[bytes]:
    """Returns the pickles at the beginning of a file of an earlier version, and what follows
    them."""
    file, found = io.BytesIO(data), []
    for _ in range(5):
        begins = file.tell()
        for _ in pickletools.genops(file):
            pass
        found.append(data[begins : file.tell()])
    return [*found, data[file.tell() :]]


def _with_pickle(pickled: bytes, *, packed: bool) -> bytes:
    """Returns a file without tensors whose value is this pickle."""
    data = saved(1, packed=packed)
    if not packed:
        magic, protocol, system, _, keys, rest = _pickles(data)
        return b"".join((magic, protocol, system, pickled, keys, rest))
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for record in old.infolist():
            new.writestr(record.filename, pickled if record.filename.endswith("data.pkl") else old.read(record))
    return out.getvalue()


def _allocating(r: random.Random, like: torch.Tensor) -> Crafted:
    what = r.choice(
        [
            _Call(bytearray, 1 << 34),
            [_Call(bytearray, 1 << 33), _Call(bytearray, 1 << 33)],
            {"a": _Call(bytearray, 3 << 30)},
        ]
    )
    return Crafted(saved(what, packed=r.random() < 0.7), "took gigabytes that are not in the file")


def _uninitialized(r: random.Random, like: torch.Tensor) -> Crafted:
    """Makes a tensor of a shape, of whatever is in memory."""
    call = _Call(torch.Tensor, *(like.shape if r.random() < 0.8 else (4,)))
    what = r.choice([call, call, [call], {"a": call}])
    return Crafted(saved(what, packed=r.random() < 0.7), "took values that are not in the file")


def _without_storages(r: random.Random, like: torch.Tensor) -> Crafted:
    """Lists no storages in a file of an earlier version, whose tensors have some."""
    magic, protocol, system, value, *_ = _pickles(saved(r.choice([like, [like]]), packed=False))
    data = b"".join((magic, protocol, system, value, pickle.dumps([], 2)))
    return Crafted(data, "took values that are not in the file")


def _nested(r: random.Random, like: torch.Tensor) -> Crafted:
    levels = r.choice([500, 5000, NESTED])
    pickled = r.choice([
        b"\x80\x02" + b"]" * levels + b"a" * (levels - 1) + b".",
        b"\x80\x02" + b")" + b"\x85" * levels + b".",
        b"\x80\x02" + b"}X\x01\0\0\0a" * levels + b"N" + b"s" * levels + b".",
    ])  # fmt: skip
    return Crafted(_with_pickle(pickled, packed=r.random() < 0.7))


#: What Python code, of torch or of everstep, may take for another tensor's.
_ATTRIBUTES = [
    "global_shape", "local_shards", "_local_tensor", "device_mesh", "placements", "_spec", "metadata", "size", "numel", "detach", "is_meta",
    "element_size", "untyped_storage", "requires_grad", "grad", "data", "_is_param", "__class__", "__dict__", "__torch_function__", "x",
]  # fmt: skip


def _with_attributes(r: random.Random, like: torch.Tensor) -> Crafted:
    """Gives a tensor attributes of Python, which its file has, too."""
    tensor = like.clone()
    for name in r.sample(_ATTRIBUTES, r.choice([1, 1, 2])):
        value = r.choice([[1, 2], 5, None, "x", (1 << 40,), {"a": 1}, torch.ones(2), torch.Size([1, 2])])
        try:
            setattr(tensor, name, value)
        except (AttributeError, TypeError, RuntimeError, ValueError):
            continue
    try:
        return Crafted(saved(r.choice([tensor, [tensor], {"a": tensor, "b": [tensor]}]), packed=r.random() < 0.7))
    except (AttributeError, TypeError, RuntimeError, ValueError, pickle.PicklingError):
        tensor = like.clone()
        tensor.global_shape = (1, 2)  # type: ignore[attr-defined]
        return Crafted(saved(tensor))


_SORTS = (_allocating, _uninitialized, _without_storages, _nested, _with_attributes, _with_attributes)


def crafted(r: random.Random, like: torch.Tensor) -> Crafted:
    """Returns a file of any of these sorts. ``like``: a tensor that belongs where it will be."""
    return r.choice(_SORTS)(r, like)
