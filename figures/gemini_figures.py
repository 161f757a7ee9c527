"""The model reproduces Gemini's worked figures 9 to 15.

Probabilities, wasted time, frequency, recovery and effective time.
"""

from __future__ import annotations

from collections.abc import Iterator

from figures.bound import Bound
from figures.papers import lines


def measure(soak: bool) -> Iterator[Bound]:
    found = lines("gemini-figures", 1)
    placement = [line for line in found if "machines, " in line["what"] and "cop" in line["what"]]
    # To as many digits as the table has.
    wrong = [line for line in placement if abs(line["ours"] - line["paper"]) > 0.00005001]
    for line in found:
        print(f"{line['what']}: paper {line['paper']}, ours {line['ours']:.4f}")
    yield Bound(
        "probabilities", len(wrong), f"of {len(placement)} probabilities of figure 9 differ in the fourth digit", "=", 0
    )
    for line in found:
        if line in placement:
            continue
        part = line["what"].split(" (")[0].replace(": ", ".").replace(" ", "-").replace(",", "").lower()
        share = line["paper"] < 1
        if "at least" in line["what"]:
            yield Bound(part, round(line["ours"], 1), f"times ({line['assumed']})", ">=", line["paper"])
        else:
            off = abs(line["ours"] - line["paper"]) * 100 if share else abs(line["ours"] / line["paper"] - 1) * 100
            yield Bound(
                part,
                round(off, 2),
                f"{'points' if share else '%'} from {line['paper']}: {line['ours']:.4g} ({line['assumed']})",
                "<=",
                2,
            )
