"""Saves once, drops the file from the page cache, and loads with DCP.

Prints seconds as a JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

out, size = Path(sys.argv[1]) / "dcp", int(sys.argv[2])
parts = {f"t{i}": torch.rand(size // 320 // 4) for i in range(320)}
if not out.exists():
    dcp.save(parts, storage_writer=dcp.FileSystemWriter(out, sync_files=True))
for file in out.iterdir():
    handle = os.open(file, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
began = time.perf_counter()
dcp.load(parts, checkpoint_id=out)
print(json.dumps({"what": "dcp-load", "seconds": time.perf_counter() - began}))
