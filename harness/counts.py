"""Checks that the counts in prose, such as "18 invariants", are those of the source.

Run as ``python3 -m harness.counts [DIRECTORY]``. It needs nothing but Python.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Prose. Measured figures and past decisions keep the counts of their day.
PROSE = ("*.md", "docs/code-map.md", "docs/guide/*.md", "figures/*.py", "harness/*.py")
#: Rust files, of which only the module docs are read.
MODULES = ("crates/**/*.rs", "python/src/*.rs")
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
        "classes": found("crates/core/src/severity/table.toml", r"^\[\[class\]\]$"),
        "categories": found("crates/core/src/ledger/mod.rs", r'^    \w+ = "\w+",$'),
        "alerting rules": found("crates/everstep/src/cli/alerts.yml", r"^ +- alert: "),
        "hardware files": len(list((root / "crates/planner/src/throughput/hardware").glob("*.toml"))),
        "command lines": found("figures/conformance/cases.py", r"^    _(?:one|two)\("),
    }


def prose(root: Path) -> Iterator[tuple[Path, str]]:
    """Yields each file with its prose; other lines are empty."""
    for path in sorted({p for glob in PROSE for p in root.glob(glob) if p.name not in PAST}):
        yield path, path.read_text()
    for path in sorted({p for glob in MODULES for p in root.glob(glob)}):
        lines = (line.strip() for line in path.read_text().splitlines())
        yield path, "\n".join(line[3:] if line.startswith("//!") else "" for line in lines)


def wrong(root: Path) -> Iterator[str]:
    """Yields the place of each count in prose that differs from the source."""
    there = counts(root)
    things = "|".join(re.sub(" ", r"\\s+", thing) for thing in there)
    # A count may stand at the end of a line, and what is counted at the beginning of the next one.
    pattern = re.compile(rf"\b(\d+|{'|'.join(WORDS)})\s+({things})\b(?!/)", re.IGNORECASE)
    for path, text in prose(root):

        def place(match: re.Match[str], path: Path = path, text: str = text) -> str:
            said = " ".join(match[0].split())
            return f"{path.relative_to(root)}:{text.count(chr(10), 0, match.start()) + 1}: {said}"

        for match in pattern.finditer(text):
            said, thing = match[1].lower(), " ".join(match[2].lower().split())
            value = int(said) if said.isdigit() else WORDS.index(said)
            if value != there[thing]:
                yield f"{place(match)}, but there are {there[thing]}"
        for match in re.finditer(r"\bINV-01 (?:…|to) INV-(\d+)\b", text):
            if int(match[1]) != there["invariants"]:
                yield f"{place(match)}, but the last is INV-{there['invariants']}"


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
