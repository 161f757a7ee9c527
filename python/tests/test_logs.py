"""`everstep logs`: what the workers of a job printed."""

from __future__ import annotations

import subprocess
import tarfile

import pytest
from conftest import EVERSTEP

SPEAK = "import os, sys; print('out of', os.environ['RANK']); print('err of', os.environ['RANK'], file=sys.stderr)"


@pytest.mark.parametrize("options", [[], ["--redirects", "1"], ["--redirects", "3"], ["--tee", "3"]])
def test_each_line_is_printed_once_from_any_directory(env, everstep, script, tmp_path, options):
    line = ["run", "--standalone", "--name", "speaks", "--log-dir", "mine", *options, script(SPEAK)]
    assert everstep(*line).returncode == 0
    other = tmp_path / "other"
    other.mkdir()
    shown = subprocess.run([EVERSTEP, "logs", "speaks"], env=env, cwd=other, capture_output=True, text=True, check=True)
    lines = [line.split("] ", 1)[1] for line in shown.stdout.splitlines()]
    assert sorted(lines) == ["err of 0", "out of 0"]


def test_the_workers_are_numbered_on_their_node(everstep, script):
    assert everstep("run", "--standalone", "--nproc-per-node", "2", script(SPEAK)).returncode == 0
    # Earlier versions called it --rank.
    for option in ("--local-rank", "--rank"):
        shown = everstep("logs", option, "1").stdout
        assert "out of 1" in shown and "of 0" not in shown, shown
    help_text = everstep("logs", "--help").stdout
    assert "--local-rank" in help_text and "--rank" not in help_text, help_text


def test_an_export_has_the_logs_of_the_users_directory(everstep, script, tmp_path):
    text = SPEAK + "; raise SystemExit(5)"
    line = ["run", "--standalone", "--name", "fails", "--log-dir", "mine", "--redirects", "3", script(text)]
    assert everstep(*line).returncode == 1
    done = everstep("incidents", "export", "--job", "fails", "-o", "bundle.tar.gz")
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "bundle.tar.gz") as bundle:
        found = {m.name.rsplit("/", 1)[1]: bundle.extractfile(m).read() for m in bundle if m.isfile()}
    assert found["stdout.log"] == b"out of 0\n" and found["stderr.log"] == b"err of 0\n", sorted(found)
