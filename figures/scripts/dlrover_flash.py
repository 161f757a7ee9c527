"""DLRover's flash checkpoint, with its own class.

Measures the copy into shared memory that the training process waits for. Runs in the peers'
environment; prints seconds as JSON lines.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

os.environ.setdefault("TORCHELASTIC_RUN_ID", f"flash{os.getpid()}")
from dlrover.python.elastic_agent.torch.ckpt_saver import DLROVER_CKPT_CONFIG_KEY, CheckpointConfig, SharedMemoryHandler

TENSORS = 80


def parts(size: int) -> dict[str, torch.Tensor]:
    """Returns the same tensors as ``savers.py``."""
    per = size // TENSORS // (2 + 3 * 4) // 64 * 64
    found: dict[str, torch.Tensor] = {}
    for i in range(TENSORS):
        found[f"model.{i}"] = torch.rand(per).to(torch.bfloat16)
        found.update({f"optimizer.{i}.{k}": torch.rand(per) for k in ("master", "exp_avg", "exp_avg_sq")})
    return found


def main() -> None:
    size, rounds = int(sys.argv[1]), int(sys.argv[2])
    state = parts(size)
    handler = SharedMemoryHandler(0, host=True)
    for round_ in range(-1, rounds):
        config = CheckpointConfig(step=round_ + 1)
        began = time.perf_counter()
        handler.save_state_dict({**state, DLROVER_CKPT_CONFIG_KEY: config})
        took = time.perf_counter() - began
        if round_ >= 0:
            print(json.dumps({"mode": "dlrover-flash", "seconds": took}), flush=True)
        time.sleep(0.2)
    handler.close()
    handler.unlink()


if __name__ == "__main__":
    main()
