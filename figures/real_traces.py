"""In real jobs, the slow worker is named, and nobody where nobody is at fault.

The slow worker, and only it, is named within two steps.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from figures.bound import Bound
from harness.cluster import ROOT


def measure(soak: bool) -> Iterator[Bound]:
    if not (ROOT.parent / "shared/data/straggler-analysis").is_dir():
        print("skipped: the traces are not at hand")
        return
    line = [
        "cargo",
        "test",
        "-q",
        "-p",
        "everstep-detector",
        "--test",
        "real_traces",
        "--",
        "--nocapture",
        "--test-threads",
        "1",
    ]
    said = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    named = re.findall(
        r"(\d+) workers, (\d+) steps: \{([^}]*)\} named, first after (?:Some\((\d+)\)|None)", said.stdout
    )
    for workers, steps, who, first in named:
        of = "AR" if who else "SE"
        print(
            f"{of}: {workers} workers, {steps} steps: "
            + (f"worker {who} is slow, known after {first} steps" if who else "nobody")
        )
    yield Bound("traces", len(named), "traces read", ">=", 2)
    yield Bound(
        "wrong",
        said.returncode,
        "the slow worker, nobody else, within 2 steps; and nobody (exit code of the test)",
        "<=",
        0,
    )
