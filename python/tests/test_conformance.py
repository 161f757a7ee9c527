"""Torchrun command lines, compared with what torchrun 2.15 did with them.

`make soak NAME=torchrun-conformance` records it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from figures.conformance.cases import CASES
from figures.conformance.compare import DOCUMENTED, differences, run

GOLDEN = json.loads((Path(__file__).parent / "golden" / "torchrun-2.15.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_command_line_means_what_it_means_to_torchrun(case):
    if case.name in ("per-cpu", "auto") and len(os.sched_getaffinity(0)) != 2:
        pytest.skip("recorded on a machine with two processors")
    found = differences(case, GOLDEN[case.name], run(case, "everstep"))
    assert found <= set(DOCUMENTED), found - set(DOCUMENTED)
