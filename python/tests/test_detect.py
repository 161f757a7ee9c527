"""``everstep detect``, and a running job whose machines are compared."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from figures.detector_bad_input import QUIET, SENTENCES
from figures.detector_csv import FAULT, table
from harness.cluster import EVERSTEP, cluster

START = 1_790_000_000


def detect(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(EVERSTEP), "detect", *map(str, words)], capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize("long", [False, True])
def test_a_table_is_judged_with_one_command(tmp_path: Path, long: bool) -> None:
    table(tmp_path / "t.csv", long)
    (tmp_path / "f.csv").write_text(f"machine,start,end\nhost-4,{START + FAULT[0]},{START + FAULT[1]}\n")
    said = detect(
        "eval", "--csv", tmp_path / "t.csv", "--faults", tmp_path / "f.csv", "--picture", tmp_path / "p.svg", "--json"
    )
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert (found["precision"], found["recall"], found["wrong"]) == (1.0, 1.0, 0)
    assert found["delay_median_s"] < 120
    assert "host-4 (red)" in (tmp_path / "p.svg").read_text()
    people = detect("run", "--csv", tmp_path / "t.csv")
    assert people.returncode == 1
    assert "host-4" in people.stdout
    assert "gpu-duty" in people.stdout


def test_models_are_taught_the_same_again_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    table(tmp_path / "t.csv", False)
    (tmp_path / "f.csv").write_text(f"machine,start,end\nhost-4,{START + FAULT[0]},{START + FAULT[1]}\n")
    line: list[Any] = ["train", "--csv", tmp_path / "t.csv", "--faults", tmp_path / "f.csv", "--epochs", "2", "-o"]
    for name in ("a.json", "b.json"):
        said = detect(*line, tmp_path / name)
        assert said.returncode == 0, said.stderr
        assert "3 metrics" in said.stdout
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    more = detect(
        "train",
        "--csv",
        tmp_path / "t.csv",
        "--models",
        tmp_path / "a.json",
        "--epochs",
        "1",
        "-o",
        tmp_path / "c.json",
    )
    assert more.returncode == 0, more.stderr
    assert (tmp_path / "c.json").read_bytes() != (tmp_path / "a.json").read_bytes()
    whole = (tmp_path / "a.json").read_text()
    (tmp_path / "a.json").write_text(whole.replace('"stride":8', '"stride":9'))
    used = detect("run", "--csv", tmp_path / "t.csv", "--detector", "lstm-vae", "--models", tmp_path / "a.json")
    assert used.returncode == 2
    assert "digest" in used.stderr


def test_thresholds_come_with_a_promise_or_with_what_it_needs(tmp_path: Path) -> None:
    lines = ["time,machine,cpu"]
    lines += [f"{s},m{m},{10 + (s * 7919 + m * 104729) % 97 / 97:.4f}" for s in range(400) for m in range(6)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    said = detect("calibrate", "--csv", tmp_path / "t.csv", "--false-alarms", "0.4", "-o", tmp_path / "s.toml")
    assert said.returncode == 2
    assert "2499 are needed" in said.stderr
    said = detect("calibrate", "--csv", tmp_path / "t.csv", "--false-alarms", "990", "-o", tmp_path / "s.toml")
    assert said.returncode == 0, said.stderr
    assert detect("run", "--csv", tmp_path / "t.csv", "--detector", tmp_path / "s.toml").returncode == 0


@pytest.mark.parametrize(("name", "text", "code", "word"), SENTENCES, ids=[s[0] for s in SENTENCES])
def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path, name: str, text: str, code: int, word: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    said = detect("run", "--csv", tmp_path / "t.csv")
    assert said.returncode == code
    assert word in said.stderr
    assert len(said.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "text"), [q for q in QUIET if "skew" not in q[0]], ids=[q[0] for q in QUIET if "skew" not in q[0]]
)
def test_odd_values_name_nobody(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    said = detect("run", "--csv", tmp_path / "t.csv", "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["alarms"] == []


def test_a_person_says_how_a_finding_was(tmp_path: Path) -> None:
    with cluster(
        "noted",
        ["figures/scripts/plain_ddp.py", "--steps", "100000", "--pause", "0.1"],
        workers=1,
        options=["--max-restarts", "3"],
    ) as c:
        c.start_all()
        c.wait_for(lambda: c.step() > 3, 120, "steps")
        c.kill_worker(0, 9)
        c.wait_for(lambda: len(c.facts("FirstStep")) > 1, 120, "the next generation")

        def ask(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [str(EVERSTEP), "incidents", "note", *words],
                env=c.env,
                capture_output=True,
                text=True,
                check=False,
                timeout=30,
            )

        noted = ask("inc-1", "--verdict", "wrong", "--text", "it was me")
        assert noted.returncode == 0, noted.stderr
        assert c.facts("Noted")[-1]["right"] is False
        assert ask("inc-7", "--verdict", "right").returncode == 1


def test_a_detector_that_nobody_knows_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text("[robust]\nshare = 2.0\n")
    line = [
        str(EVERSTEP),
        "run",
        "--standalone",
        "--detector",
        str(tmp_path / "d.toml"),
        "figures/scripts/plain_ddp.py",
    ]
    said = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode == 2
    assert "above 0 and at most 1" in said.stderr


STAGES = """
import os, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
first = dist.get_rank() < 2
layers = {"embedding": torch.nn.Embedding(8, 4), "block": torch.nn.Linear(4, 4)} if first else {"block": torch.nn.Linear(4, 4)}
model = torch.nn.ModuleDict(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = range(100000)
if sys.argv[1] == "managed":
    import everstep
    steps = everstep.CheckpointManager(sys.argv[2], model=model, optimizer=optimizer).steps(100000)
for _ in steps:
    optimizer.step()
    dist.barrier()
    time.sleep(0.1)
"""


@pytest.mark.parametrize("how", ["managed", "unchanged"])
def test_stages_of_a_pipeline_are_roles_without_a_word_from_anybody(tmp_path: Path, how: str) -> None:
    script = tmp_path / "stages.py"
    script.write_text(STAGES)
    with cluster("stages", [str(script), how, str(tmp_path / "ckpt")], nodes=4, workers=1) as c:
        c.start_all()

        def roles() -> list[Any]:
            return [n.get("role") for n in c.status().get("nodes", [])]

        def apart() -> bool:
            of = roles()
            # One node that has reported its role and three that have not also count as two groups.
            return None not in of and sorted(of.count(role) for role in set(of)) == [2, 2]

        c.wait_for(apart, 120, "two roles of two nodes each")
