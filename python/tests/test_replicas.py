"""Replicas in other nodes' memory.

Sharded state without durable storage, and machines that are lost with all their memory.
"""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

from harness.cluster import Cluster, cluster

SHARDED = "figures/sharded.py"


def _command(out: str, *more: str) -> list[str]:
    return [SHARDED, "--out", out, "--steps", "90", "--pause", "0.03", *more]


def _after(c: Cluster, kind: str, since: float, timeout: float = 60) -> dict[str, Any]:
    return c.wait_for(lambda: next((f for f in c.facts(kind) if f["ts"] > since), None), timeout, kind)


def _told(out: Path, rank: int) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """Returns the digests by step, and what was restored."""
    lines = [json.loads(line) for line in (out / f"rank-{rank}.jsonl").read_text().splitlines()]
    return {r["step"]: r["digest"] for r in lines if "step" in r}, [r for r in lines if "restored" in r]


def _same_bits(out: Path, ranks: int, restored: list[int]) -> None:
    for rank in range(ranks):
        digests, restores = _told(out, rank)
        assert [r["restored"] for r in restores] == restored, (rank, restores)
        assert all(digests[r["restored"]] == r["digest"] for r in restores), rank


def test_a_lost_machines_shards_come_from_its_peer_and_nothing_promised_is_lost():
    with tempfile.TemporaryDirectory() as scratch, cluster("t-replica", _command(scratch), nodes=3, workers=1) as c:
        c.start_all().wait_step(20)
        assert c.facts("Replicated"), c.output()[-3000:]
        steps = []
        for node in (1, 0):
            promised = c.status()["replicated_step"] or 0
            lost = c.kill_node(node)
            c.start(node)
            found = _after(c, "Restored", lost)
            _after(c, "FirstStep", found["ts"])
            assert found["tiers"][node] == "Peer" and found["step"] >= promised > 0, found
            steps.append(found["step"])
            c.wait_step(found["step"] + 15)
        assert c.wait(60) == [0, 0, 0], c.output()[-3000:]
        _same_bits(Path(scratch), 3, steps)
        assert not c.leaks(), c.leaks()


def test_a_lost_group_falls_back_to_durable_storage_together():
    with (
        tempfile.TemporaryDirectory() as scratch,
        cluster("t-group", _command(scratch, "--persist", "10"), nodes=2, workers=1) as c,
    ):
        c.start_all().wait_step(25)
        c.kill_node(0)
        lost = c.kill_node(1)
        c.start_all()
        found = _after(c, "Restored", lost)
        assert found["tiers"] == ["Durable", "Durable"] and found["step"] >= 20 and found["step"] % 10 == 0, found
        assert c.wait(60) == [0, 0], c.output()[-3000:]
        _same_bits(Path(scratch), 2, [found["step"]])


def test_what_rots_in_memory_is_healed_from_a_copy_or_not_used():
    with (
        tempfile.TemporaryDirectory() as scratch,
        cluster("t-rot", _command(scratch, "--width", "512", "--steps", "120"), nodes=2, workers=1) as c,
    ):
        c.start_all().wait_step(20)
        # Each of rank 0's own slots is damaged in one place, after the superblock.
        c.kill_worker(0)
        assert c.rot(0, 300_000) >= 2
        assert c.wait(90) == [0, 0], c.output()[-3000:]
        assert "repaired from a copy" in c.output() or c.facts("RestoreFailed"), c.output()[-3000:]
        restored = [f["step"] for f in c.facts("Restored")[1:]]
        digests, restores = _told(Path(scratch), 0)
        assert restores and all(digests[r["restored"]] == r["digest"] for r in restores), restored


def test_a_header_is_one_page_and_any_tool_reads_the_file(tmp_path):
    import torch
    from safetensors.torch import load_file

    import everstep

    w = torch.nn.Linear(300, 300)
    ckpt = everstep.CheckpointManager(tmp_path, model=w)
    ckpt.step(1)
    ckpt.save()
    file = tmp_path / "step-1" / "rank-0.safetensors"
    head = struct.unpack("<Q", file.read_bytes()[:8])[0] + 8
    assert head % 4096 == 0
    assert torch.equal(load_file(file)["model.weight"], w.weight)


def test_what_was_in_memory_only_is_on_disk_when_the_job_gives_up():
    with tempfile.TemporaryDirectory() as scratch:
        # By default, durable checkpoints are half an hour apart, so none is due here.
        command = [*_command(scratch), "--persist", "100000"]
        with cluster("t-last", command, nodes=2, workers=1, options=["--max-restarts", "0"]) as c:
            c.start_all().wait_step(20)
            c.kill_worker(1)
            assert c.wait(60) == [1, 1], c.output()[-3000:]
            reached, said = max(f["step"] for f in c.facts("Replicated")), c.output()
        steps = [
            int(p.name.removeprefix("step-")) for p in (Path(scratch) / "ckpt").glob("step-*") if ".tmp" not in p.name
        ]
        assert len(steps) == 1 and steps[0] >= reached, (steps, said[-3000:])
        with cluster("t-next", command, nodes=2, workers=1) as c:
            assert c.start_all().wait(60) == [0, 0], c.output()[-3000:]
            assert c.facts("Restored")[0]["tiers"] == ["Durable", "Durable"]
        _same_bits(Path(scratch), 2, steps)


def test_what_a_restart_comes_back_from_is_made_durable():
    with (
        tempfile.TemporaryDirectory() as scratch,
        cluster("t-jit", [*_command(scratch), "--persist", "100000"], nodes=2, workers=1) as c,
    ):
        c.start_all().wait_step(40)
        # Meanwhile the collectives of 20 steps were profiled: gathers and scatters of two layers,
        # forward and backward.
        profile = json.loads((c.memory / "0" / "local-0-profile").read_text())
        assert profile["world_size"] == 2 and len(profile["iteration"]["idle"]) > 4, profile
        c.kill_worker(1)
        assert c.wait(60) == [0, 0], c.output()[-3000:]
        step = c.facts("Restored")[-1]["step"]
        assert step in [f["step"] for f in c.facts("Published")], c.facts("Published")
