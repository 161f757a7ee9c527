"""Real text that every machine has: the source of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def load(limit: int = 8 << 20) -> Tensor:
    """Returns the bytes of the standard library's modules in a fixed order: (n,) uint8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
    data = bytearray()
    for file in files:
        data += file.read_bytes()
        if len(data) >= limit:
            break
    return torch.frombuffer(data[:limit], dtype=torch.uint8)
