"""The simulator reproduces Figure 11 of Unicron: four other systems, on two traces.

The efficiency of the old code bases is fitted on trace-a only.
"""

from __future__ import annotations

from collections.abc import Iterator

from figures.bound import Bound
from figures.papers import lines


def measure(soak: bool) -> Iterator[Bound]:
    found = lines("unicron-fig11 ablation fitted", 1000 if soak else 200)
    for line in found:
        if line["of"] == "ablation":
            print(f"Unicron by: {line['what']:<60} trace-a {line['trace_a']:.3f}, trace-b {line['trace_b']:.3f}")
        elif line["of"] == "fitted":
            print(f"efficiency of {line['what']}, fitted on trace-a: {line['efficiency']:.4f}")
    for line in found:
        if line["of"] != "unicron-fig11":
            continue
        part = line["what"].removeprefix("figure 11, ").replace(": Unicron by ", ".").lower()
        origin = "fitted" if line["fitted"] else "predicted"
        off = abs(line["ours"] / line["paper"] - 1) * 100
        yield Bound(
            part,
            round(off, 2),
            f"% from the paper's {line['paper']}: {line['ours']:.3f}, {origin}; {line['assumed']}",
            "<=",
            8,
        )
