"""From a failure to its class and to what people are told, with real workers and real messages."""

from __future__ import annotations

import json

import pytest

#: Makes steps like a training script, and fails where `BREAK` says. Writes one step file per life.
LOOP = """
import os, sys, time, pathlib
import torch, everstep
model = torch.nn.Linear(2, 2)
ckpt = everstep.CheckpointManager(os.environ["OUT"], model=model)
lives = pathlib.Path(os.environ["OUT"]) / f"lives-{os.environ['RANK']}"
lives.parent.mkdir(exist_ok=True)
lives.write_text((lives.read_text() if lives.exists() else "") + "x")
life = len(lives.read_text())
for step in ckpt.steps(30):
    time.sleep(0.02)
    if step == 12:
        exec(os.environ["BREAK"])
ckpt.close()
"""


@pytest.fixture
def broken(everstep, script, tmp_path):
    """Runs the loop with a fault."""

    def run(fault: str, *options: str):
        line = ["run", "--standalone", "--name", "job", "--nproc-per-node", "2", *options, script(LOOP)]
        return everstep(*line, timeout=90, OUT=str(tmp_path / "out"), BREAK=fault)

    return run


def test_a_text_has_a_class(everstep, tmp_path):
    text = tmp_path / "text"
    text.write_text("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    said = json.loads(everstep("classify", "--json", str(text)).stdout)
    assert (said["class"], said["scope"], said["severity"]) == ("cuda-out-of-memory", "user", "sev2")
    shown = everstep("classify", str(text)).stdout.splitlines()
    assert shown[0].startswith("cuda-out-of-memory") and len(shown) == 4
    text.write_text("step 100 loss 2.3\n")
    assert everstep("classify", str(text)).returncode == 1
    missing = everstep("classify", str(tmp_path / "nothing"))
    assert missing.returncode == 2 and "cannot read" in missing.stderr


def test_a_table_of_ones_own_comes_first_and_a_wrong_one_is_refused(everstep, script, tmp_path):
    own = tmp_path / "own.toml"
    rows = '[[class]]\nname = "tokend"\nscope = "storage"\nseverity = "sev3"\nwhat = "the tokenizer is away"\nadvice = "call them"\n'
    own.write_text(rows + '[[rule]]\nclass = "tokend"\nline = ["tokend:"]\nsource = "ours"\n')
    done = everstep("run", "--standalone", "--failure-table", str(own), script("raise ValueError('tokend: no answer')"))
    assert done.returncode == 1 and "(tokend: the tokenizer is away)" in done.stderr, done.stderr
    own.write_text('[[rule]]\nclass = "nope"\nline = ["x"]\nsource = "s"\n')
    done = everstep("run", "--standalone", "--failure-table", str(own), script("pass"))
    assert done.returncode == 78 and 'rule 1 names class "nope"' in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_killed_worker_is_explained(broken, everstep):
    done = broken("if life == 1 and os.environ['RANK'] == '1': os.kill(os.getpid(), 9)")
    assert done.returncode == 0, done.stderr
    lines = everstep("explain").stdout.splitlines()
    assert 7 <= len(lines) <= 12, lines
    assert "RECOVERED in" in lines[0] and lines[0].startswith("inc-1 ")
    told = {line.split()[0]: line for line in lines[1:]}
    assert "rank 1" in told["What"] and "SIGKILL" in told["What"]
    assert told["Why"].split()[1] == "killed"
    assert "regroup" in told["Lost"] and "restarted the processes" in told["Done"] and "local memory" in told["Done"]
    assert told["Worked?"].split()[1].startswith("yes") and told["Next"]
    seen = json.loads(everstep("explain", "inc-1", "--json").stdout)["incident"]
    assert seen["outcome"] == "Recovered" and seen["failure"]["verdict"]["class"] == "killed"
    listed = everstep("incidents", "ls", "job").stdout.splitlines()
    assert len(listed) == 1 and "recovered in" in listed[0]


def test_the_same_error_after_the_same_step_ends_the_job(broken, everstep, tmp_path):
    done = broken("raise ValueError(f'odd value at {id(ckpt):#x}')")
    assert done.returncode == 93, done.stderr
    assert "the same error followed the same step" in done.stderr and "script-error" in done.stderr
    assert (tmp_path / "out" / "lives-0").read_text() == "xx"
    assert "ENDED THE JOB with exit code 93" in everstep("explain").stdout
    # torchrun knows only 1.
    assert broken("raise ValueError('bad record')", "--exit-codes", "torchrun").returncode == 1


def test_a_count_of_restarts_is_honoured_whatever_the_error_is(broken, tmp_path):
    done = broken("raise ValueError('bad record')", "--max-restarts", "3")
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "out" / "lives-0").read_text() == "xxxx"


def test_nothing_to_explain(everstep, script):
    assert everstep("explain").returncode == 1
    everstep("run", "--standalone", "--name", "calm", script("pass"))
    assert "has had no incident" in everstep("explain").stdout
    wrong = everstep("explain", "yesterday")
    assert wrong.returncode == 2 and "inc-3" in wrong.stderr
