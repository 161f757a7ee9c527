"""The main job survives three real losses and computes the same bits as an undisturbed run.

The demo itself measures it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures.bound import Bound
from harness.training import differences

ROOT = Path(__file__).resolve().parent.parent


def measure(soak: bool) -> Iterator[Bound]:
    done = subprocess.run(
        [sys.executable, "examples/gpt/demo.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    text = done.stdout
    print(text, end="")
    lost = [int(n) for n in re.findall(r"^(?:worker|coordinator|node).*?(\d+)  (?:memory|durable)", text, re.MULTILINE)]
    yield Bound("exit-code", done.returncode, "", "=", 0)
    yield Bound("kills", len(lost), "kills", "=", 3)
    yield Bound("bit-identical", int("bit-identical to the undisturbed run" in text), "", "=", 1)
    yield Bound("lost-worker-and-coordinator", sum(lost[:2]) if len(lost) == 3 else -1, "steps", "=", 0)
    with tempfile.TemporaryDirectory() as scratch:
        a, b = Path(scratch) / "a", Path(scratch) / "b"
        a.mkdir()
        (a / "losses-0.jsonl").write_text('{"step": 0, "loss": "0x1.8p+1"}\n')
        (a / "final-0.txt").write_text("x")
        shutil.copytree(a, b)
        (b / "losses-0.jsonl").write_text('{"step": 0, "loss": "0x1.80001p+1"}\n')
        yield Bound("one-bit-off", int(not differences(a, b, 1, 1)), "runs taken for identical", "=", 1, control=True)
