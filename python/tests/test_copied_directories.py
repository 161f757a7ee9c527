"""Copies of checkpoint directories, and directories into which checkpoints were copied."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_run import train, tree

import everstep as es
import everstep.dcp
from everstep import convert


@pytest.mark.parametrize("identified", [True, False])
def test_a_copy_continues_the_branch_that_ran_last(tmp_path: Path, identified: bool) -> None:
    """Moved to another file system, or restored from a backup; perhaps without the run id."""
    out, copy = tmp_path / "out", tmp_path / "copy"
    train(out, 20, persist=5, keep=9)
    assert train(out, 13, step=10, keep=9) == 10
    shutil.copytree(out, copy)
    if not identified:
        (copy / "everstep-run.json").unlink()
    assert train(copy, 14, keep=9) == 13
    # The original goes on, and what it saves is copied, too: the copy has a branch of its own.
    assert train(out, 30, keep=9) == 13
    shutil.copytree(out / "step-30", copy / "step-30")
    assert train(copy, 15, keep=9) == 14
    again = tmp_path / "again"
    shutil.copytree(copy, again)
    assert train(again, 16, keep=9) == 15
    assert {"step-15", "step-20", "step-30"} < {p.name for p in again.glob("step-*")}, (
        "nothing that was copied is deleted"
    )
    assert train(again, 21, step=20, keep=9) == 20
    assert train(again, 22, keep=9) == 21


def test_what_is_copied_or_saved_later_does_not_change_what_a_copy_continues(tmp_path: Path) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    train(out, 20, persist=5, keep=9)
    assert train(out, 13, step=10, keep=9) == 10
    shutil.copytree(out, copy)
    state = {"weight": torch.ones(3)}
    dcp.save(state, storage_writer=everstep.dcp.Writer(copy / "step-40"), no_dist=True)
    assert train(copy, 14, keep=9) == 13
    # Back to the last step of a branch that goes on in the original.
    assert train(copy, 22, step=20, keep=9) == 20
    assert train(copy, 15, step=13, keep=9) == 13
    assert train(out, 30, keep=9) == 13
    shutil.copytree(out / "step-30", copy / "step-30")
    assert train(copy, 16, keep=9) == 15


def test_where_copies_are_mixed_the_user_names_the_step(tmp_path: Path) -> None:
    """The original is copied over its copy, which has trained since: the record of what ran last is
    gone."""
    out, copy = tmp_path / "out", tmp_path / "copy"
    train(out, 20, keep=99)
    train(out, 13, step=10, keep=99)
    shutil.copytree(out, copy)
    assert train(copy, 14, keep=99) == 13
    subprocess.run(["cp", "-r", f"{out}/.", copy], check=True)
    before = tree(copy)
    with pytest.raises(es.CheckpointError, match=r"checkpoints from several directories are mixed.*restore\(step=…\)"):
        train(copy, 15, keep=99)
    with pytest.raises(es.CheckpointError, match="mixed"):
        convert.load(copy)
    assert tree(copy) == before
    assert convert.load(copy, 14)
    assert train(copy, 16, step=14, keep=99) == 14
    assert train(copy, 17, keep=99) == 16


def test_a_checkpoint_of_another_run_beside_a_copy_is_not_continued(tmp_path: Path) -> None:
    out, copy, other = tmp_path / "out", tmp_path / "copy", tmp_path / "other"
    train(out, 4, keep=99)
    for back in (1, 2, 1):
        train(other, 6, keep=99)
        train(other, 7, step=back, keep=99)
    shutil.copytree(out, copy)
    newest = max(other.glob("step-7*"), key=lambda p: p.stat().st_mtime)
    shutil.copytree(newest, copy / "step-7")
    with pytest.raises(es.CheckpointError, match="mixed"):
        train(copy, 8, keep=99)
    shutil.rmtree(copy / "step-7")
    assert train(copy, 8, keep=99) == 4


def test_a_directory_that_began_with_another_run_s_checkpoint_may_be_copied(tmp_path: Path) -> None:
    out, copy, other = tmp_path / "out", tmp_path / "copy", tmp_path / "other"
    train(other, 6, keep=99)
    train(other, 7, step=2, keep=99)
    out.mkdir()
    shutil.copytree(other / "step-7", out / "step-7")
    assert train(out, 9, keep=99) == 7
    shutil.copytree(out, copy)
    assert train(copy, 10, keep=99) == 9


def test_a_copy_does_not_continue_from_what_was_saved_through_dcp(tmp_path: Path) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    train(out, 4)
    state = {"weight": torch.ones(3)}
    dcp.save(state, storage_writer=everstep.dcp.Writer(out / "step-9"), no_dist=True)
    assert train(out, 5) == 4
    shutil.copytree(out, copy)
    assert train(copy, 6) == 5
