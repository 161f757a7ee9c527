"""Every torchrun command line means the same, but for documented differences.

Arguments, environment, exit codes and files are compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from figures.bound import Bound
from figures.conformance.cases import CASES
from figures.conformance.compare import DOCUMENTED, ROOT, differences, run

GOLDEN = ROOT / "python/tests/golden/torchrun-2.15.json"


def measure(soak: bool) -> Iterator[Bound]:
    found: dict[str, list[str]] = {}
    golden = {}
    for case in CASES:
        theirs, ours = run(case, "torchrun"), run(case, "everstep")
        golden[case.name] = theirs
        for difference in differences(case, theirs, ours):
            found.setdefault(difference, []).append(case.name)
    if soak:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
    undocumented = {d: names for d, names in found.items() if d not in DOCUMENTED}
    for difference, names in undocumented.items():
        print(f"undocumented: {difference} ({', '.join(names)})")
    yield Bound("command-lines", len(CASES), "", ">=", 60)
    yield Bound("two-nodes", sum(len(c.lines) == 2 for c in CASES), "", ">=", 12)
    yield Bound("that-fail", sum(c.fails for c in CASES), "", ">=", 12)
    yield Bound("documented-differences", len(found) - len(undocumented), "", "<=", 12, samples=tuple(found.items()))
    yield Bound("undocumented-differences", len(undocumented), "", "=", 0)
