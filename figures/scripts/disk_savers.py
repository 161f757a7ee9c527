"""DCP with one thread, torch.save and safetensors, each made durable.

Prints seconds as JSON lines.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

out, size = Path(sys.argv[1]), int(sys.argv[2])
parts = {f"t{i}": torch.rand(size // 320 // 4) for i in range(320)}


def sync(path: Path) -> None:
    """Makes a file durable, including its directory entry."""
    for target in (path, path.parent):
        handle = os.open(target, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def save(name: str) -> None:
    """Makes one save of this kind."""
    if name == "dcp":
        dcp.save(
            parts,
            storage_writer=dcp.FileSystemWriter(
                out / "dcp", single_file_per_rank=True, sync_files=True, thread_count=1
            ),
        )
    elif name == "torch-save":
        torch.save(parts, out / "t.pt")
        sync(out / "t.pt")
    else:
        save_file(parts, out / "t.safetensors")
        sync(out / "t.safetensors")


for kind in ("dcp", "torch-save", "safetensors"):
    began = time.perf_counter()
    save(kind)
    print(json.dumps({"what": kind, "seconds": time.perf_counter() - began}), flush=True)
    shutil.rmtree(out / "dcp", ignore_errors=True)
    for file in (out / "t.pt", out / "t.safetensors"):
        file.unlink(missing_ok=True)
