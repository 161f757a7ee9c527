"""Checks that prose in Markdown, comments and docstrings is wrapped at 100 columns.

Run as ``python3 -m harness.wrap [DIRECTORY]``. It needs nothing but Python and git. Code blocks,
table rows, and lines with nothing to break at are exempt. Of comments, those that have a line of
their own are checked.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 100
#: Pages whose lines are printed by programs.
PRINTED = re.compile(r"docs/figures\.md|docs/benchmarks/")
#: Files whose docstrings stay as they are: `code` in figures/exact_kills.py hashes them, and counts
#: kills anew if they change. Rewrap them when such a file changes anyway.
HASHED = {f"python/everstep/{name}.py" for name in ("checkpoint", "common_state", "tensor_places")}
#: What precedes the words of a line: marks of comments, lists and quotations.
MARK = re.compile(r"\s*(?:(?://[/!]?|#:?|>|[-*+]|\d+\.)\s+)*")


def _words(line: str) -> str:
    return MARK.sub("", line, count=1)


def _too_long(line: str) -> bool:
    words = _words(line)
    return len(line) > COLUMNS and not words.startswith("|") and " " in line[len(line) - len(words) : COLUMNS + 1]


def prose(lines: list[tuple[int, str]]) -> Iterator[int]:
    """Yields the numbers of the lines that are too long, outside code blocks."""
    fenced, before = False, 0
    for number, line in lines:
        # No code block goes on in another comment.
        fenced, before = fenced and number == before + 1, number
        if _words(line).startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced and _too_long(line):
            yield number


def _python(path: str, text: str) -> Iterator[int]:
    lines = text.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    alone = [t.start[0] for t in tokens if t.type == tokenize.COMMENT and not t.line[: t.start[1]].strip()]
    yield from prose([(n, lines[n - 1]) for n in alone])
    for node in [] if path in HASHED else ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node) is not None:
            of = node.body[0]
            # What is indented further is a literal block.
            literal = " " * (of.col_offset + 4)
            documents = [(n, lines[n - 1]) for n in range(of.lineno, of.end_lineno + 1)]
            yield from prose([(n, line) for n, line in documents if not line.startswith(literal)])


def long_lines(path: str, text: str) -> Iterator[int]:
    """Yields the numbers of a file's lines that are too long."""
    numbered = list(enumerate(text.splitlines(), 1))
    if path.endswith(".py"):
        yield from _python(path, text)
    elif path.endswith(".rs"):
        yield from prose([(n, line) for n, line in numbered if line.lstrip().startswith("//")])
    elif not PRINTED.match(path):
        yield from prose(numbered)


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md", "*.py", "*.rs"]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout
    found = 0
    for path in sorted(filter(None, names.split("\0"))):
        text = (root / path).read_text() if (root / path).is_file() else ""
        for number in sorted(long_lines(path, text)):
            found += 1
            print(f"{path}:{number}: prose beyond column {COLUMNS}")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
