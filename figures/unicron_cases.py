"""In all five cases of Unicron's Table 3, no equal, weighted or sized split beats our plan."""

from __future__ import annotations

from collections.abc import Iterator

from figures.bound import Bound
from figures.papers import lines


def measure(soak: bool) -> Iterator[Bound]:
    found = lines("unicron-cases", 1)
    for mode in ("floor", "paper"):
        for case in range(1, 6):
            ways = {line["way"]: line for line in found if (line["mode"], line["case"]) == (mode, case)}
            print(
                f"case {case}, {mode}: "
                + "; ".join(f"{name} {way['nodes']} {way['waf']:.2f} PFLOP/s" for name, way in ways.items())
            )
            ours = ways.pop("ours")["waf"]
            best = max(ways.values(), key=lambda way: way["waf"])
            yield Bound(
                f"{mode}.case-{case}", round(ours / best["waf"], 4), f"of the best other split ({best['way']})", ">=", 1
            )
