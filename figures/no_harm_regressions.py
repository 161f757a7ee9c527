"""Every defect found by outside reviewers has a test that failed before its fix and passes now."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import tomllib

from figures.bound import Bound

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "figures" / "no_harm.toml"


def _pytest(ids: list[str]) -> bool:
    line = [sys.executable, "-m", "pytest", "-q", "-x", *ids]
    return subprocess.run(line, cwd=ROOT, check=False).returncode == 0


def _cargo(test: str) -> bool:
    """Runs ``cargo:PACKAGE::TEST``. The test must exist and pass."""
    package, _, name = test.removeprefix("cargo:").partition("::")
    done = subprocess.run(
        ["cargo", "test", "-q", "-p", package, name], cwd=ROOT, check=False, capture_output=True, text=True
    )
    ran = [line for line in done.stdout.splitlines() if line.startswith("test result: ok.") and " 0 passed" not in line]
    return done.returncode == 0 and bool(ran)


def measure(soak: bool) -> Iterator[Bound]:
    del soak
    table = tomllib.loads(TABLE.read_text())
    untested, unproven, failed = [], [], []
    for line, row in table.items():
        tests = row["tests"]
        if not tests and not row.get("figure"):
            untested.append(line)
        if tests and not row["failed_at"]:
            unproven.append(line)
        ids = [t for t in tests if not t.startswith("cargo:")]
        good = (not ids or _pytest(ids)) and all(_cargo(t) for t in tests if t.startswith("cargo:"))
        if not good:
            failed.append(line)
    yield Bound("lines", len(table), "defects in figures/no_harm.toml", "=", 39)
    yield Bound("untested", len(untested), "without a test or a figure", "=", 0, samples=tuple(untested))
    yield Bound(
        "unproven", len(unproven), "whose tests were not seen to fail before the fix", "=", 0, samples=tuple(unproven)
    )
    yield Bound("failed", len(failed), "whose tests fail", "=", 0, samples=tuple(failed))
