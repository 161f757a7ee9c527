"""Of several machines at fault at once, most are named, and hardly any other.

On sealed seeds. Faults that no metric shows do not count. 2 to 5 machines of a fleet, a switch with
32 of 600 machines behind it, and which machine was first, at 100 samples per second.
"""

from __future__ import annotations

from collections.abc import Iterator

from figures import example_runs
from figures.bound import Bound


def measure(soak: bool) -> Iterator[Bound]:
    found_by = example_runs.lines("everstep-fleet", "detector_sets", 500 if soak else 120)
    of = {found["of"]: found for found in found_by}
    for name, what in (
        ("some", "2 to 5 machines of 16 to 1,024"),
        ("switch", "32 of 600 behind one switch"),
        ("looks", "2 to 5 of 4 to 64, at 100 Hz"),
    ):
        found = of[name]
        yield Bound(
            f"{name}.recall", round(found["recall"], 3), f"of the set, {what}, {found['cases']} episodes", ">=", 0.8
        )
        yield Bound(f"{name}.precision", round(found["precision"], 3), "of the set", ">=", 0.95)
    switch, some = of["switch"], of["some"]
    yield Bound(
        "switch.called", round(switch["groups"] / switch["cases"], 3), "of switch events called a group", ">=", 0.9
    )
    yield Bound("some.called", round(some["groups"] / some["cases"], 3), "of 2 to 5 machines called a group", "<=", 0.1)
    yield Bound(
        "quiet",
        of["quiet"]["named"],
        f"of {of['quiet']['cases']} minutes in which nobody was slow, named at 100 Hz",
        "=",
        0,
    )
