"""Checks that the counts in prose, such as "17 invariants", are those of the source.

Run as ``python3 -m harness.counts [DIRECTORY]``. It needs nothing but Python.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Prose. Measured figures and past decisions keep the counts of their day.
PROSE = ("*.md", "docs/code-map.md", "docs/guide/*.md", "crates/*/src/lib.rs", "figures/*.py", "harness/*.py")
PAST = ("CHANGELOG.md",)
WORDS = [
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]


def counts(root: Path) -> dict[str, int]:
    """Returns how many there are of each thing, by the words that prose has for it."""

    def found(path: str, pattern: str, end: str | None = None) -> int:
        text = (root / path).read_text()
        return len(re.findall(pattern, text[: text.index(end)] if end else text, re.MULTILINE))

    return {
        "invariants": found("crates/core/src/invariant.rs", r"^    /// INV-\d+: "),
        "planted bugs": found("crates/core/src/planted_bugs.rs", r"^    [A-Z]\w+,$", "impl Bug"),
        # One target has a planted bug.
        "fuzz targets": len(list((root / "fuzz" / "targets").glob("*.rs"))) - 1,
        "crates": len(list((root / "crates").glob("*/Cargo.toml"))),
        "commands": found("CONTRIBUTING.md", r"^make \w+"),
    }


def wrong(root: Path) -> Iterator[str]:
    """Yields the place of each count in prose that differs from the source."""
    there = counts(root)
    things = "|".join(there)
    pattern = re.compile(rf"\b(\d+|{'|'.join(WORDS)}) ({things})\b", re.IGNORECASE)
    for path in sorted({p for glob in PROSE for p in root.glob(glob)}):
        if path.name in PAST:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in pattern.finditer(line):
                said, thing = match[1].lower(), match[2].lower()
                value = int(said) if said.isdigit() else WORDS.index(said)
                if value != there[thing]:
                    yield f"{path.relative_to(root)}:{number}: {match[0]}, but there are {there[thing]}"
            for last in re.findall(r"\bINV-01 (?:…|to) INV-(\d+)\b", line):
                if int(last) != there["invariants"]:
                    yield f"{path.relative_to(root)}:{number}: INV-{last}, but the last is INV-{there['invariants']}"


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    for thing, count in counts(root).items():
        if count == 0:
            print(f"harness/counts.py finds no {thing}: correct where it looks for them")
            return 1
    found = list(wrong(root))
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
