"""The tests that take most processor time: they decide how long CI takes, because few of them wait.

A process counts once its parent has waited for it, so what outlives its test is missing.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from harness import ranks

#: Number of tests, and of files, that are shown.
SHOWN = 15
_PROPERTY = "processor-seconds"


def _spent() -> float:
    """Returns the processor time of this process, its ended children and warm ranks, in seconds."""
    return sum(os.times()[:4]) + ranks.spent()


class Measuring:
    """Notes what each phase of a test took, where the test runs."""

    def __init__(self) -> None:
        self._last = _spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = _spent()
        report.user_properties.append((_PROPERTY, now - self._last))
        self._last = now
        return report


class Showing:
    """Adds up what all tests took, where their reports arrive."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _PROPERTY and isinstance(value, float):
                self._spent[report.nodeid] = self._spent.get(report.nodeid, 0.0) + value

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"{SHOWN} tests that took most processor time")
        most = sorted(self._spent.items(), key=lambda item: item[1], reverse=True)
        for name, seconds in most[:SHOWN]:
            terminalreporter.write_line(f"{seconds:.1f} s {name}")
        files: dict[str, float] = {}
        for name, seconds in most:
            file = name.partition("::")[0]
            files[file] = files.get(file, 0.0) + seconds
        for name, seconds in sorted(files.items(), key=lambda item: item[1], reverse=True)[:SHOWN]:
            terminalreporter.write_line(f"{seconds:.0f} s {name}")
        terminalreporter.write_line(f"{sum(self._spent.values()):.0f} s all {len(self._spent)} tests")
