"""The tree keeps its shape: small files, functions, types and import circles, typed errors.

The product's binary contains none of the test machinery.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures import structure
from figures.bound import Bound
from harness.cluster import ROOT

FILE_LINES, FUNCTION_LINES, PUBLIC_FIELDS, CIRCLE = 500, 80, 15, 4
#: Crates that exist for development only.
DEVELOPMENT = ("everstep-sim", "everstep-fleet")
#: Where errors become texts for users.
CLI = Path("crates/everstep/src/cli")


#: A guard that is counted before it reads in place, as in
#: ``crates/checkpoint/src/arena/region.rs``.
SOUND = """
pub struct Reader<M: Memory> { slot: Arc<Slot<M>> }
impl<M: Memory> Reader<M> {
    pub fn region(&self) -> Option<&[u8]> { unsafe { self.slot.still_region() } }
}
impl<M: Memory> Drop for Reader<M> {
    fn drop(&mut self) { self.slot.state_word().end_read(); }
}
impl<M: Memory> Slot<M> {
    pub fn read(self: &Arc<Self>) -> Option<Reader<M>> {
        self.state_word().read().then(|| Reader { slot: Arc::clone(self) })
    }
    pub unsafe fn memory(&self) -> &M { &self.memory }
}
"""
#: What makes it unsound, each to be found in it.
UNSOUND = {
    "uncounted": ("self.state_word().read()", "self.is_sealed()"),
    "never-ended": ("self.slot.state_word().end_read();", ""),
    "ended-otherwise": ("end_read", "end_repair"),
    "open": ("{ slot: Arc<Slot<M>> }", "{ pub slot: Arc<Slot<M>> }"),
    "writable": ("Option<&[u8]>", "Option<&mut [u8]>"),
    "memory": ("pub unsafe fn memory", "pub fn memory"),
    "store": ("    pub unsafe fn", "    pub fn store(&self) { self.memory.store(0, &[]) }\n    pub unsafe fn"),
    "slot": ("impl<M: Memory> Reader<M> {", "impl<M: Memory> Slot<M> {"),
}


def _long_files(root: Path) -> list[str]:
    sizes = ((p, len(p.read_text().splitlines())) for p in structure.files(root, ".rs", ".py"))
    return [f"{p.relative_to(root)}: {n}" for p, n in sizes if n > FILE_LINES]


def _long_functions(root: Path) -> list[str]:
    found = (f for p in structure.files(root, ".rs", ".py") for f in structure.functions(p))
    return [f"{f.path.relative_to(root)}: {f.name}, {f.size}" for f in found if f.size > FUNCTION_LINES]


def _wide_types(root: Path) -> list[str]:
    found = (f for p in structure.files(root, ".rs") for f in structure.public_fields(p))
    return [f"{f.path.relative_to(root)}: {f.name}, {f.size}" for f in found if f.size > PUBLIC_FIELDS]


def _text_errors(root: Path) -> list[str]:
    sources = [c / "src" for c in [*sorted((root / "crates").iterdir()), root / "python"]]
    rust = (p for p in structure.files(root, ".rs") if any(p.is_relative_to(s) for s in sources))
    found = (f for p in rust if not p.is_relative_to(root / CLI) for f in structure.text_errors(p))
    return [f"{f.path.relative_to(root)}: {f.name}" for f in found]


def _unsound(root: Path) -> list[str]:
    found = (f for p in structure.files(root, ".rs") for f in structure.unsound(p))
    return [f"{f.path.relative_to(root)}: {f.name}" for f in found]


def _circles(root: Path) -> list[str]:
    crates = [c / "src" for c in [*sorted((root / "crates").iterdir()), root / "python"] if (c / "src").is_dir()]
    graphs = [*(structure.Crate(c).imports() for c in crates), structure.python_imports(root / "python" / "everstep")]
    found = (circle for graph in graphs for circle in structure.circles(graph))
    return [", ".join(str(p.relative_to(root)) for p in c) for c in found if len(c) > CIRCLE]


def _linked() -> list[str]:
    """Returns the development crates among the binary's dependencies."""
    line = ["cargo", "tree", "-p", "everstep", "-e", "normal", "--prefix", "none", "--format", "{p}"]
    tree = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted({name for name in DEVELOPMENT for row in tree.splitlines() if row.split(" ")[0] == name})


def _planted(root: Path) -> None:
    """Makes a tree with one violation of each kind."""
    source = root / "crates" / "planted" / "src"
    source.mkdir(parents=True)
    names = [f"part_{n}" for n in range(CIRCLE + 1)]
    for n, name in enumerate(names):
        (source / f"{name}.rs").write_text(f"use crate::{names[n - 1]}::Part as Before;\npub struct Part(Before);\n")
    fields = "".join(f"    pub field_{n}: u8,\n" for n in range(PUBLIC_FIELDS + 1))
    body = "    let _ = 1;\n" * FUNCTION_LINES
    text = "".join(f"mod {name};\n" for name in names) + f"pub struct Wide {{\n{fields}}}\nfn long() {{\n{body}}}\n"
    text += "pub(crate) fn open() -> Option<Result<u8, String>> {\n    None\n}\n"
    memory = (
        "pub unsafe trait Memory {\n    fn bytes(&self) -> Option<&[u8]>;\n    unsafe fn slice(&self) -> &[u8];\n}\n"
    )
    (source / "memory.rs").write_text(memory)
    (source / "lib.rs").write_text(text + "// A line.\n" * FILE_LINES)


def _guard(root: Path, source: str) -> int:
    """Returns the number of unsound functions that are found in ``source``."""
    path = root / "guard.rs"
    path.write_text(source)
    structure.rust_tree.cache_clear()
    return len(structure.unsound(path))


def measure(soak: bool) -> Iterator[Bound]:
    measures = {
        "files": (_long_files, f"files of more than {FILE_LINES} lines"),
        "functions": (_long_functions, f"functions of more than {FUNCTION_LINES} lines"),
        "types": (
            _wide_types,
            f"types with more than {PUBLIC_FIELDS} public fields, command-line options and rows of schemas left out",
        ),
        "errors": (
            _text_errors,
            "public functions whose error is a String, outside the command line, tests, examples and fuzz targets",
        ),
        "unsound": (_unsound, "safe functions that share or change memory that others read in place"),
        "circles": (_circles, f"import circles of more than {CIRCLE} files"),
    }
    for part, (find, unit) in measures.items():
        found = find(ROOT)
        yield Bound(part, len(found), unit, "=", 0, samples=tuple(found))
    linked = _linked()
    yield Bound(
        "linked", len(linked), "development crates that the product's binary links", "=", 0, samples=tuple(linked)
    )
    with tempfile.TemporaryDirectory() as planted:
        _planted(Path(planted))
        for part, (find, unit) in measures.items():
            yield Bound(f"planted-{part}", len(find(Path(planted))), unit, "=", 0, control=True)
        yield Bound("guard", _guard(Path(planted), SOUND), measures["unsound"][1], "=", 0)
        for name, (sound, mistake) in UNSOUND.items():
            found = _guard(Path(planted), SOUND.replace(sound, mistake))
            yield Bound(f"planted-guard-{name}", found, measures["unsound"][1], "=", 0, control=True)
