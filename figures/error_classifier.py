"""`everstep classify` gives nearly all real error messages the class that a person does.

The messages, with their sources, are in ``crates/core/tests/errors``: those for which the rules
were written, and those collected from other projects after the rules were fixed.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import tomllib

from figures.bound import Bound
from figures.snapshot_blocking import EVERSTEP
from harness.cluster import ROOT

TEXTS = ROOT / "crates" / "core" / "tests" / "errors"
#: What the rules were written on and improved with.
KNOWN = ("pytorch_stack", "training_frameworks", "once_held_out")
#: Collected after the rules were fixed.
HELD_OUT = "held_out"


def _read(name: str) -> list[dict[str, Any]]:
    with (TEXTS / f"{name}.toml").open("rb") as f:
        return list(tomllib.load(f)["text"])


def _said(text: str) -> dict[str, Any]:
    done = subprocess.run(
        [EVERSTEP, "classify", "--json"], input=text, capture_output=True, text=True, check=False, timeout=60
    )
    return dict(json.loads(done.stdout))


def _share(texts: list[dict[str, Any]]) -> tuple[float, int, list[str]]:
    wrong = []
    for t in texts:
        said = _said(t["text"])
        if said.get("class") not in {t["class"], *t.get("or", [])}:
            wrong.append(f"{t['class']} called {said.get('class')}: {t['source']}")
    return 100 * (1 - len(wrong) / len(texts)), len(texts), wrong


def measure(soak: bool) -> Iterator[Bound]:
    known = [t for name in KNOWN for t in _read(name)]
    for name, texts, least in (("known", known, 95), ("held-out", _read(HELD_OUT), 90)):
        share, count, wrong = _share(texts)
        print("\n".join(wrong))
        yield Bound(
            name, round(share, 1), f"% of {count} texts are given the class that a person gives them", ">=", least
        )
    yield Bound("texts", len(known) + len(_read(HELD_OUT)), "texts, each with its source", ">=", 80)
