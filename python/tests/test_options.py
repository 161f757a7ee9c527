"""Options of a manager that cannot be what was meant are refused by name, before anything is
trained."""

from __future__ import annotations

import math
from datetime import timedelta

import numpy as np
import pytest
import torch

import everstep as es


def _manager(directory, **options):
    return es.CheckpointManager(directory, model=torch.nn.Linear(2, 2), **options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(
            ("persist", v)
            for v in (2.0, 2.5, math.inf, "2", "often", None, True, -5, timedelta(0), timedelta(seconds=-1))
        ),
        *(("every", v) for v in (2.0, None, "x", 0, -1, True, timedelta(seconds=1))),
        *(("stall_budget", v) for v in (math.nan, -1, "1%", 2.0, True)),
        *(("persist_bandwidth", v) for v in ("1M", -1, 1e6, None)),
        *(("keep", v) for v in (-1, 0, 2.0, None, "3")),
        *(("keep_every", v) for v in (24, timedelta(seconds=-5), timedelta(0), "1h")),
        *((name, v) for name in ("overlap", "replicated") for v in ("yes", 1, None)),
        *((name, v) for name in ("pacing", "keep_epochs") for v in ("yes", 1, None)),
    ],
)
def test_a_wrong_option_is_refused_by_name(tmp_path, option, value):
    with pytest.raises((TypeError, ValueError), match=f"^{option}="):
        _manager(tmp_path / "out", **{option: value})
    assert not (tmp_path / "out").exists(), "nothing was created"


def test_numbers_of_numpy_and_paths_of_bytes_are_what_they_say(tmp_path):
    ckpt = _manager(bytes(tmp_path / "out"), persist=np.int64(2), every=np.int32(1), keep=np.int64(100))
    ckpt.restore()
    for step in range(1, 6):
        ckpt.step(step)
    ckpt.close()
    assert {p.name for p in (tmp_path / "out").glob("step-*")} == {"step-2", "step-4", "step-5"}


@pytest.mark.parametrize(
    "kept",
    ['{"seconds": null}', '{"seconds": "x", "rate": 5}', '{"failures": -1}', '{"rate": {}, "closed": 3}', "[]", "{"],
)
def test_measurements_that_are_damaged_are_taken_again(tmp_path, kept):
    out = tmp_path / "out"
    out.mkdir()
    (out / "everstep-frequency.json").write_text(kept)
    ckpt = _manager(out)
    ckpt.restore()
    ckpt.step(1)
    ckpt.close()
    assert (out / "step-1" / "manifest.json").exists()
