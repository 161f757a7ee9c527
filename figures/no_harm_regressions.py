"""Every defect found by outside reviewers has a test that failed before its fix and passes now."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import tomllib

from figures.bound import Bound

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "figures" / "no_harm.toml"
# As `make test` builds them, so that nothing is compiled twice.
CARGO = "cargo test --profile checked --workspace --exclude everstep-python --lib --bins --tests --no-fail-fast --"
PYTEST = "-m pytest -q -n 2 --dist worksteal"


class Outcomes:
    """Which tests ran, and whether all cases of each passed."""

    def __init__(self) -> None:
        self._passed: dict[str, bool] = {}

    def add(self, test: str, passed: bool) -> None:
        self._passed[test] = passed and self._passed.get(test, True)

    def passed(self, test: str) -> bool:
        """False also for a test that did not run."""
        return self._passed.get(test, False)


def run_python(ids: list[str], outcomes: Outcomes) -> None:
    """Runs tests by pytest's names for them; one without parameters stands for all of its cases,
    and a file for all of its tests."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        subprocess.run([sys.executable, *PYTEST.split(), f"--junit-xml={report}", *ids], cwd=ROOT, check=False)
        for case in ElementTree.parse(report).iter("testcase"):
            # pytest names files from python/, where its settings are.
            file = f"python/{case.attrib['classname'].replace('.', '/')}.py"
            name = f"{file}::{case.attrib['name']}"
            passed = not any(case.findall(wrong) for wrong in ("failure", "error", "skipped"))
            for test in {file, name, name.partition("[")[0]}:
                outcomes.add(test, passed)


def run_cargo(tests: list[str], outcomes: Outcomes) -> None:
    """Runs tests of the form ``cargo:PACKAGE::TEST``, which are told apart by their names."""
    by_name = {test.rpartition("::")[2]: test for test in tests}
    done = subprocess.run(
        [*CARGO.split(), *by_name], cwd=ROOT, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in done.stdout.splitlines():
        ended = re.fullmatch(r"test (?:\w+::)*(\w+) \.\.\. (\w+)", line)
        if ended and ended[1] in by_name:
            outcomes.add(by_name[ended[1]], ended[2] == "ok")


def measure(soak: bool) -> Iterator[Bound]:
    del soak
    table = tomllib.loads(TABLE.read_text())
    tests = {test for row in table.values() for test in row["tests"]}
    outcomes = Outcomes()
    run_cargo(sorted(test for test in tests if test.startswith("cargo:")), outcomes)
    run_python(sorted(test for test in tests if not test.startswith("cargo:")), outcomes)
    untested = [line for line, row in table.items() if not row["tests"] and not row.get("figure")]
    unproven = [line for line, row in table.items() if row["tests"] and not row["failed_at"]]
    failed = [f"{line}: {test}" for line, row in table.items() for test in row["tests"] if not outcomes.passed(test)]
    yield Bound("lines", len(table), "defects in figures/no_harm.toml", "=", 39)
    yield Bound("tests", len(tests), "tests of these defects", ">=", 118)
    yield Bound("untested", len(untested), "without a test or a figure", "=", 0, samples=tuple(untested))
    yield Bound(
        "unproven", len(unproven), "whose tests were not seen to fail before the fix", "=", 0, samples=tuple(unproven)
    )
    yield Bound("failed", len(failed), "of these tests fail", "=", 0, samples=tuple(failed))
