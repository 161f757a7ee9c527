"""Parity in other nodes' memory instead of full copies.

Machines are lost with all their memory, without durable storage.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from harness.cluster import Cluster, cluster

SHARDED = "figures/sharded.py"


def _command(out: str, *more: str) -> list[str]:
    return [SHARDED, "--out", out, "--steps", "70", "--pause", "0.05", "--width", "256", *more]


def _lose(c: Cluster, lost: list[int]) -> dict[str, Any]:
    """Loses machines with all their memory; they come back empty.

    Returns what was restored then.
    """
    before = len(c.facts("Restored"))
    promised = c.status()["replicated_step"] or 0
    for node in lost:
        c.kill_node(node)
    for node in lost:
        c.start(node)
    found = c.wait_for(lambda: c.facts("Restored")[before:], 90, "a restore")[-1]
    assert found["step"] >= promised, (promised, found)
    c.wait_for(lambda: [f for f in c.facts("FirstStep") if f["ts"] > found["ts"]], 90, "a step")
    return found


def _same_bits(out: Path, ranks: int, restored: list[int]) -> None:
    for rank in range(ranks):
        lines = [json.loads(line) for line in (out / f"rank-{rank}.jsonl").read_text().splitlines()]
        digests = {r["step"]: r["digest"] for r in lines if "step" in r}
        restores = [r for r in lines if "restored" in r]
        assert [r["restored"] for r in restores] == restored, (rank, restores)
        assert all(digests[r["restored"]] == r["digest"] for r in restores), rank


def test_two_of_four_machines_are_lost_and_nothing_with_them():
    with (
        tempfile.TemporaryDirectory() as scratch,
        cluster("t-erasure", _command(scratch, "--replicas", "2+2"), nodes=4, workers=1) as c,
    ):
        c.start_all().wait_step(15)
        c.wait_for(lambda: c.facts("Replicated"), 30, "the first step that all hold")
        parity = sorted(p.name for p in c.memory.glob("*/parity-*"))
        assert parity and not list(c.memory.glob("*/peer-*")), parity
        steps = []
        for lost in ([1, 3], [2, 3]):
            found = _lose(c, lost)
            # How many steps are lost is a matter of time, which the figure measures.
            assert [found["tiers"][n] for n in lost] == ["Parity", "Parity"], found
            steps.append(found["step"])
            c.wait_step(found["step"] + 12)
        assert c.wait(120) == [0] * 4, c.output()[-3000:]
        _same_bits(Path(scratch), 4, steps)
        assert not c.leaks(), c.leaks()


def test_what_rots_in_memory_is_computed_from_the_others():
    command = _command(scratch := tempfile.mkdtemp(), "--replicas", "2+1", "--steps", "90")
    with cluster("t-erasure-rot", command, nodes=3, workers=1) as c:
        c.start_all().wait_step(20)
        c.kill_worker(0)
        before = len(c.facts("Restored"))
        assert c.rot(0, 200_000) >= 2
        assert c.wait(120) == [0] * 3, c.output()[-3000:]
        assert c.facts("Restored")[before:], c.output()[-3000:]
        assert "repaired from a copy" in c.output() or c.facts("RestoreFailed"), c.output()[-3000:]
        lines = [json.loads(line) for line in (Path(scratch) / "rank-0.jsonl").read_text().splitlines()]
        digests = {r["step"]: r["digest"] for r in lines if "step" in r}
        assert all(digests[r["restored"]] == r["digest"] for r in lines if "restored" in r)


@pytest.mark.parametrize("wrong", ["4", "4+0", "0+2", "a+b", "4+2+1", -1, True, 1.5, None])
def test_a_code_that_makes_no_sense_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="number of copies, or a code such as '4\\+2'"):
        everstep.CheckpointManager(tmp_path, model=torch.nn.Linear(2, 2), replicas=wrong)
