"""Hand-made checkpoints: any header, any bytes, and correct checksums.

Nothing here uses everstep.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20
PAGE = 4096
BLOB = "__everstep__/"


@cache
def _tables() -> list[list[int]]:
    """Returns the tables for CRC-64/NVME, eight bytes at a time (NVM Express 2.0, figure
    5.2.1.3.4)."""
    first = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ 0x9A6C9329AC4BC9B5 if value & 1 else value >> 1
        first.append(value)
    tables = [first]
    for _ in range(7):
        tables.append([first[v & 0xFF] ^ (v >> 8) for v in tables[-1]])
    return tables


def crc(data: bytes) -> int:
    """Returns the checksum of ``data``."""
    t0, t1, t2, t3, t4, t5, t6, t7 = _tables()
    value = (1 << 64) - 1
    whole = len(data) // 8 * 8
    for (word,) in struct.iter_unpack("<Q", data[:whole]):
        v = value ^ word
        value = (
            t7[v & 0xFF] ^ t6[v >> 8 & 0xFF] ^ t5[v >> 16 & 0xFF] ^ t4[v >> 24 & 0xFF]
            ^ t3[v >> 32 & 0xFF] ^ t2[v >> 40 & 0xFF] ^ t1[v >> 48 & 0xFF] ^ t0[v >> 56]
        )  # fmt: skip
    for byte in data[whole:]:
        value = t0[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ (1 << 64) - 1


@dataclass
class Tensor:
    """A line of a header and its bytes."""

    name: str
    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class Shard:
    """A shard file taken apart."""

    #: Its line in the manifest.
    entry: dict[str, Any]
    tensors: list[Tensor]
    metadata: dict[str, str]
    #: Called with the header's JSON before it is written.
    edit: Callable[[dict[str, Any]], None] | None = None

    def blob(self, name: str) -> Tensor:
        """Returns a value that is not a tensor of the user's."""
        return next(t for t in self.tensors if t.name == BLOB + name)

    def bytes(self) -> bytes:
        """Returns the contents of the file, with correct checksums."""
        region = b"".join(t.data for t in self.tensors)
        metadata = dict(self.metadata)
        metadata["everstep.chunks"] = "".join(
            f"{crc(region[at : at + CHUNK_BYTES]):016x}" for at in range(0, len(region), CHUNK_BYTES)
        )
        if "everstep.values" in metadata:
            at, values = 0, []
            for t in self.tensors:
                if t.name.startswith(BLOB) and t.data and t.name != BLOB + "parts":
                    values.append(f"{at:x}:{crc(t.data):x}")
                at += len(t.data)
            metadata["everstep.values"] = " ".join(values)
        header: dict[str, Any] = {"__metadata__": metadata}
        at = 0
        for t in self.tensors:
            header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + len(t.data)]}
            at += len(t.data)
        if self.edit is not None:
            self.edit(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % PAGE)
        return struct.pack("<Q", len(text)) + text + region


@dataclass
class Checkpoint:
    """A published checkpoint taken apart."""

    manifest: dict[str, Any]
    shards: list[Shard] = field(default_factory=list)

    def write(self, directory: Path) -> None:
        """Writes the checkpoint with correct checksums."""
        directory.mkdir(parents=True, exist_ok=True)
        entries = []
        for shard in self.shards:
            data = shard.bytes()
            (directory / shard.entry["file"]).write_bytes(data)
            entries.append({**shard.entry, "bytes": len(data), "crc": f"{crc(data):016x}"})
        write_manifest(directory, {**self.manifest, "shards": entries})


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest with a correct checksum."""
    sealed = {"manifest": manifest, "crc": f"{crc(json.dumps(manifest, separators=(',', ':')).encode()):016x}"}
    (directory / "manifest.json").write_text(json.dumps(sealed, indent=2) + "\n")


def read(directory: Path) -> Checkpoint:
    """Takes a checkpoint apart."""
    manifest = json.loads((directory / "manifest.json").read_text())["manifest"]
    found = Checkpoint(manifest)
    for entry in manifest["shards"]:
        data = (directory / entry["file"]).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header, region = json.loads(data[8 : 8 + length]), data[8 + length :]
        metadata = header.pop("__metadata__")
        lines = sorted(header.items(), key=lambda line: (line[1]["data_offsets"], line[0]))
        tensors = [Tensor(name, x["dtype"], x["shape"], region[slice(*x["data_offsets"])]) for name, x in lines]
        found.shards.append(Shard(entry, tensors, metadata))
    return found
