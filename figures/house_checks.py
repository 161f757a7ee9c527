"""`make check` passes, and each of its tools finds a violation planted for it.

Violations are planted in a copy of the tree, one at a time. A tool counts as run only if its own
message about the violation is printed.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from figures.bound import Bound
from harness.cluster import ROOT

RUST = "crates/rng/src/lib.rs"
#: Lines of a function that clippy.toml does not allow.
LONG = 90
#: Joined here, or the tool would find it in this file.
MISSPELT = "t" + "eh"
FEW = 3
#: A sentence that is too long for one line.
SENTENCE = "one two three four five " * 5


@dataclass(frozen=True)
class Violation:
    """What is planted for one tool, and what the tool says about it."""

    path: str
    text: str
    said: str
    #: What the text replaces. Without it the text is added at the end.
    instead: str = ""

    def plant(self, root: Path) -> None:
        """Plants it below ``root``."""
        path = root / self.path
        before = path.read_text() if path.exists() else ""
        if self.instead not in before:
            raise RuntimeError(f"{self.path} has no {self.instead!r}: correct what figure house-checks plants")
        path.write_text(before.replace(self.instead, self.text, 1) if self.instead else before + self.text)


#: By tool, and what follows a hyphen where a tool has several.
VIOLATIONS = {
    "format": Violation(RUST, "\nfn  planted( ) {}\n", "Diff in"),
    "clippy": Violation(
        RUST,
        "\npub fn planted() {\n" + "    println!();\n" * LONG + "}\n",
        "this function has too many lines",
    ),
    "doc": Violation(RUST, "\n/// As [`Nowhere`].\npub struct Planted;\n", "unresolved link"),
    # Not stable yet, as what is younger than the promised compiler is not for that one.
    "msrv": Violation(
        RUST, "\npub fn planted(it: std::vec::IntoIter<u8>) {\n    it.array_chunks::<2>();\n}\n", "E0658"
    ),
    "deny": Violation("Cargo.toml", 'license = "GPL-3.0-only"', "GPL-3.0-only", 'license = "Apache-2.0"'),
    "python": Violation("python/everstep/planted.py", "import os\n", "F401"),
    "types": Violation("python/everstep/planted.py", 'number: int = "one"\n', "Incompatible types"),
    "spelling": Violation("README.md", f"\nIn {MISSPELT} tree.\n", MISSPELT),
    "links": Violation("README.md", "\n[Nowhere](nowhere.md)\n", "nowhere.md"),
    "counts": Violation("README.md", f"\nIt has {FEW} invariants.\n", f"{FEW} invariants"),
    "counts-module": Violation(RUST, f"//! It has {FEW}\n//! classes.\n//!", f"{FEW} classes", "//!"),
    "wrap": Violation("README.md", f"\n{SENTENCE}\n", "README.md:"),
    "wrap-comment": Violation(RUST, f"    // {SENTENCE}\n", f"{RUST}:"),
    "wrap-docstring": Violation("python/everstep/planted.py", f'"""{SENTENCE}"""\n', "python/everstep/planted.py:1:"),
}


def _copy(to: Path) -> None:
    """Copies the tree, and links what is built."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    archive = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    tar = subprocess.Popen(["tar", "-c", "--null", "-T", "-"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    unpack = subprocess.Popen(["tar", "-x", "-C", to], stdin=tar.stdout)
    assert tar.stdin is not None
    tar.stdin.write(archive)
    tar.stdin.close()
    if tar.wait() or unpack.wait():
        raise RuntimeError("cannot copy the tree")
    for built in (".venv", "target"):
        (to / built).symlink_to(ROOT / built)
    for line in (["git", "init", "-q"], ["git", "add", "-A"]):
        subprocess.run(line, cwd=to, check=True)


def _check(root: Path, tool: str) -> tuple[int, str]:
    line = ["make", "--no-print-directory", f"check-{tool}"]
    done = subprocess.run(line, cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def measure(soak: bool) -> Iterator[Bound]:
    makefile = (ROOT / "Makefile").read_text()
    tools = next(line for line in makefile.splitlines() if line.startswith("CHECKS := ")).split()[2:]
    planted = {tool: [name for name in VIOLATIONS if name.partition("-")[0] == tool] for tool in tools}
    few = len({name.partition("-")[0] for name in VIOLATIONS})
    yield Bound("tools", len(tools), "tools of `make check`", ">=", few, samples=tuple(tools))
    yield Bound("tools-without-a-violation", sum(not names for names in planted.values()), "tools", "=", 0)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        _copy(root)
        for tool in tools:
            code, output = _check(root, tool)
            yield Bound(tool, int(code != 0), "findings in the tree", "=", 0, samples=(output[-2000:],) if code else ())
            for name in planted[tool]:
                VIOLATIONS[name].plant(root)
                code, output = _check(root, tool)
                unit = "violations found where one is planted"
                caught = code != 0 and VIOLATIONS[name].said in output
                yield Bound(f"planted-{name}", int(caught), unit, "=", 0, control=True)
                subprocess.run(["git", "checkout", "-q", "."], cwd=root, check=True)
                subprocess.run(["git", "clean", "-qfd"], cwd=root, check=True)
