"""No kind of damage to a small checkpoint makes it return anything but what was written.

Slot, replica, file, manifest, index and frames are damaged. Also what other formats do with one
flipped bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures import transfer
from figures.bound import Bound
from harness.cluster import ROOT


def _others() -> dict[str, str]:
    """Returns what DCP, torch.load and safetensors do with one flipped bit of payload.

    One of ``error``, ``wrong`` or ``right``.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file

    good = {"w": torch.arange(16_384, dtype=torch.float32)}
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        dcp.save(dict(good), checkpoint_id=out / "dcp")
        torch.save(good, out / "t.pt")
        save_file(good, out / "t.safetensors")

        def dcp_load() -> torch.Tensor:
            got = {"w": torch.zeros(16_384)}
            dcp.load(got, checkpoint_id=out / "dcp")
            return got["w"]

        loads = {
            "dcp": (next((out / "dcp").glob("*.distcp")), dcp_load),
            "torch.load": (out / "t.pt", lambda: torch.load(out / "t.pt")["w"]),
            "safetensors": (out / "t.safetensors", lambda: load_file(out / "t.safetensors")["w"]),
        }
        for name, (path, load) in loads.items():
            data = bytearray(path.read_bytes())
            at = data.index(good["w"].numpy().tobytes()[40_000:40_064])
            data[at + 5] ^= 16
            path.write_bytes(data)
            try:
                found[name] = "right" if torch.equal(load(), good["w"]) else "wrong"
            except Exception:  # noqa: BLE001
                found[name] = "error"
    return found


def measure(soak: bool) -> Iterator[Bound]:
    build = ["cargo", "build", "-q", "--release", "-p", "everstep-checkpoint", "--example", "corruption"]
    subprocess.run(build, cwd=ROOT, check=True)
    with transfer.memory() as memory:
        line = [str(ROOT / "target/release/examples/corruption"), str(memory), "10000"]
        done = subprocess.run(
            line, capture_output=True, text=True, env={**os.environ, "RUST_BACKTRACE": "1"}, check=False
        )
    rows = [json.loads(x) for x in done.stdout.splitlines()]
    for row in rows:
        print(f"  {row}", flush=True)
    yield Bound("exit", done.returncode, done.stderr[-300:].replace("\n", " "), "=", 0)
    tries = [r for r in rows if "tried" in r]
    yield Bound("tried", sum(r["tried"] for r in tries), f"ways to damage, {len(tries)} kinds", ">=", 500_000)
    yield Bound("wrong", sum(r["wrong"] for r in tries), "returned something else than was written", "=", 0)
    yield Bound("panics", done.stderr.count("panicked"), "", "=", 0)
    slot = next(r for r in tries if r["what"] == "slot-bits")
    healable = slot["healed"]
    yield Bound(
        "healed",
        healable,
        "of the damaged chunks for which a copy was asked, all of them (the run ends otherwise)",
        ">=",
        1000,
    )
    largest = next(r for r in rows if r["what"] == "largest-allocation")
    yield Bound("largest-allocation", largest["bytes"], "bytes", "<=", largest["limit"])
    others = _others()
    for name, outcome in others.items():
        yield Bound(
            f"{name}-notices",
            int(outcome == "error"),
            f"one flipped bit: {outcome}",
            "=",
            1,
            control=outcome == "wrong",
        )
