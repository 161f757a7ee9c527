"""The shape of the source: lengths of files and functions, public fields, and imports between
files.

Read from syntax trees (``ast`` for Python, tree-sitter for Rust), so that comments and strings do
not count as code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tree_sitter_rust
from tree_sitter import Language, Node, Parser

#: Directories of the repository that contain its own source.
SOURCES = ("crates", "examples", "figures", "fuzz", "harness", "python")
#: Directories below them that do not.
FOREIGN = frozenset(("__pycache__", "everstep.data", "target"))
#: Derives whose fields are the options of a command line.
COMMAND_LINE = frozenset(("Args", "Parser"))
#: Types that are a row of a schema in ``docs/schema``.
ROWS = frozenset(("Incident", "JobGoodput"))


@dataclass(frozen=True)
class Finding:
    """Something measured at a place: lines of a function, public fields of a type."""

    path: Path
    name: str
    size: int


def files(root: Path, *suffixes: str) -> list[Path]:
    """Returns the source files below ``root`` with one of these suffixes, sorted."""
    found = (p for directory in SOURCES for p in (root / directory).rglob("*") if p.suffix in suffixes)
    return sorted(p for p in found if not FOREIGN.intersection(p.relative_to(root).parts))


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_rust.language()))


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.named_children:
        yield from _walk(child)


def _text(node: Node | None) -> str:
    return node.text.decode() if node is not None and node.text is not None else ""


@cache
def rust_tree(path: Path) -> Node:
    """Returns the syntax tree of a Rust file."""
    return _parser().parse(path.read_bytes()).root_node


def functions(path: Path) -> list[Finding]:
    """Returns every function of a file with its number of lines.

    Signature and braces count; attributes and comments above it do not.
    """
    if path.suffix == ".py":
        nodes = (
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        return [Finding(path, n.name, (n.end_lineno or n.lineno) - n.lineno + 1) for n in nodes]
    nodes = (n for n in _walk(rust_tree(path)) if n.type == "function_item")
    return [Finding(path, _text(n.child_by_field_name("name")), n.end_point.row - n.start_point.row + 1) for n in nodes]


def _derives(struct: Node) -> set[str]:
    """Returns the traits that a type derives."""
    names: set[str] = set()
    before = struct.prev_named_sibling
    while before is not None and before.type in ("attribute_item", "line_comment", "block_comment"):
        names |= {_text(n) for n in _walk(before) if n.type == "identifier"}
        before = before.prev_named_sibling
    return names


def public_fields(path: Path) -> list[Finding]:
    """Returns the number of public fields of every Rust struct.

    Left out are command-line options and rows of schemas.
    """
    found = []
    for node in _walk(rust_tree(path)):
        if node.type == "struct_item" and not COMMAND_LINE & _derives(node):
            body = node.child_by_field_name("body")
            fields = [f for f in body.named_children if f.type == "field_declaration"] if body is not None else []
            public = [f for f in fields if any(c.type == "visibility_modifier" for c in f.children)]
            name = _text(node.child_by_field_name("name"))
            if name not in ROWS:
                found.append(Finding(path, name, len(public)))
    return found


def text_errors(path: Path) -> list[Finding]:
    """Returns the public functions of a Rust file that return ``Result<_, String>``, also within
    another type. ``pub(crate)`` and ``pub(super)`` count as public.
    """
    found = []
    for node in (n for n in _walk(rust_tree(path)) if n.type == "function_item"):
        if not any(c.type == "visibility_modifier" for c in node.children):
            continue
        generic = (n for n in _within(node.child_by_field_name("return_type")) if n.type == "generic_type")
        results = (n for n in generic if _text(n.child_by_field_name("type")).split("::")[-1] == "Result")
        arguments = [n.child_by_field_name("type_arguments") for n in results]
        if any(a is not None and [_text(c) for c in a.named_children[1:]] == ["String"] for a in arguments):
            found.append(Finding(path, _text(node.child_by_field_name("name")), 1))
    return found


def unsound(path: Path) -> list[Finding]:
    """Returns the safe functions of a Rust file through which safe code could share or change what
    others read in place.

    It searches the trait ``Memory``, and the ``impl`` blocks that implement it or are generic over
    it, for safe functions that give out byte slices or the memory itself, and for public ones that
    write to it. A guard may give out slices that cannot be written, and may write; see ``_guards``.
    """
    found = []
    guards = _guards(rust_tree(path))
    for block in (n for n in _walk(rust_tree(path)) if n.type in ("trait_item", "impl_item")):
        body = block.child_by_field_name("body")
        if body is None or not any(_text(n) == "Memory" for c in block.named_children if c != body for n in _walk(c)):
            continue
        guard = _base(block.child_by_field_name("type")) in guards
        parameters = block.child_by_field_name("type_parameters")
        memories = (
            {_text(n) for n in _walk(parameters) if n.type == "type_identifier"} if parameters is not None else set()
        )
        for node in (n for n in body.named_children if n.type in ("function_item", "function_signature_item")):
            if _is_unsafe(node):
                continue
            references = [r for r in _within(node.child_by_field_name("return_type")) if r.type == "reference_type"]
            slices = [r for r in references if "[u8]" in _text(r)]
            writable = any(c.type == "mutable_specifier" for r in slices for c in r.children)
            whole = any(_text(r.child_by_field_name("type")) in memories for r in references)
            public = any(_text(c) == "pub" for c in node.children if c.type == "visibility_modifier")
            if writable or whole or (not guard and (slices or (public and _writes(node)))):
                found.append(Finding(path, _text(node.child_by_field_name("name")), 1))
    return found


def _within(node: Node | None) -> Iterator[Node]:
    return _walk(node) if node is not None else iter(())


def _is_unsafe(function: Node) -> bool:
    return any("unsafe" in _text(c) for c in function.children if c.type == "function_modifiers")


def _base(kind: Node | None) -> str:
    """Returns the name of a type without its parameters."""
    return _text(kind).split("<")[0]


def _writes(function: Node) -> bool:
    """Returns whether a function stores bytes into a slot or its memory."""
    calls = (n.child_by_field_name("function") for n in _walk(function) if n.type == "call_expression")
    called = [_text(c) for c in calls if c is not None and c.type == "field_expression"]
    return any(c.split(".")[-1] == "store" and c.split(".")[-2] in ("memory", "slot") for c in called)


def _guards(tree: Node) -> set[str]:
    """Returns the types whose values show that their owner may use a slot's bytes.

    A guard has no public fields. Each place that makes one is an ``unsafe`` function, whose caller
    promises that nobody else writes; or it takes something from the state word
    (``state_word().read()``), which dropping the guard gives back (``state_word().end_read()``).
    """
    fields = ("field_declaration", "ordered_field_declaration_list")
    structs = {_text(n.child_by_field_name("name")): n for n in _walk(tree) if n.type == "struct_item"}
    closed = {
        name
        for name, struct in structs.items()
        if not any(c.type == "visibility_modifier" for f in _walk(struct) if f.type in fields for c in f.children)
    }
    drops = {
        _base(n.child_by_field_name("type")): _text(n)
        for n in _walk(tree)
        if n.type == "impl_item" and _text(n.child_by_field_name("trait")) == "Drop"
    }
    made: dict[str, list[bool]] = {}
    for node in _walk(tree):
        name = _made(node)
        if name in closed:
            made.setdefault(name, []).append(_is_earned(node, drops.get(name, "")))
    return {name for name, earned in made.items() if all(earned)}


def _made(node: Node) -> str:
    """Returns the type that an expression makes a value of, or an empty string."""
    if node.type == "struct_expression":
        name = _base(node.child_by_field_name("name"))
    elif node.type == "call_expression":
        name = _base(node.child_by_field_name("function"))
    else:
        return ""
    block = _enclosing(node, "impl_item")
    return _base(block.child_by_field_name("type")) if name == "Self" and block is not None else name


def _enclosing(node: Node, kind: str) -> Node | None:
    parent = node.parent
    while parent is not None and parent.type != kind:
        parent = parent.parent
    return parent


def _is_earned(made: Node, drop: str) -> bool:
    function = _enclosing(made, "function_item")
    if function is None:
        return False
    taken = re.findall(r"state_word\(\)\s*\.(\w+)\(\)", _text(function))
    return _is_unsafe(function) or any(f"state_word().end_{name}()" in drop for name in taken)


class Crate:
    """The modules of a crate, and what each of their files imports from the others."""

    def __init__(self, root: Path) -> None:
        #: File by module path. The root is ``()``.
        self.modules: dict[tuple[str, ...], Path] = {}
        for path in sorted(root.rglob("*.rs")):
            parts = path.relative_to(root).with_suffix("").parts
            self.modules[parts[:-1] if parts[-1] in ("mod", "lib", "main") else parts] = path
        self._trees = {module: rust_tree(path) for module, path in self.modules.items()}
        self._exports = {module: dict(self._exported(module)) for module in self.modules}

    def _exported(self, module: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yields what a module imports from another one: the name and where it comes from."""
        for node in self._trees[module].named_children:
            if node.type == "use_declaration":
                for path in _leaves(node.child_by_field_name("argument")):
                    if (absolute := self._absolute(module, path)) is not None:
                        yield path[-1], absolute

    def _absolute(self, module: tuple[str, ...], path: tuple[str, ...]) -> tuple[str, ...] | None:
        """Returns a path from the root of the crate, or ``None`` for a path into another crate."""
        if path[0] == "crate":
            return path[1:]
        if path[0] == "self":
            return (*module, *path[1:])
        if path[0] == "super":
            up = next((n for n, word in enumerate(path) if word != "super"), len(path))
            return (*module[: len(module) - up], *path[up:])
        return (*module, *path) if (*module, path[0]) in self.modules else None

    def _module_of(self, path: tuple[str, ...], seen: frozenset[tuple[str, ...]] = frozenset()) -> tuple[str, ...]:
        """Returns the module that defines what a path names, following re-exports."""
        module = next(path[:n] for n in range(len(path), -1, -1) if path[:n] in self.modules)
        rest = path[len(module) :]
        if rest and rest[0] in self._exports[module] and path not in seen:
            return self._module_of((*self._exports[module][rest[0]], *rest[1:]), seen | {path})
        return module

    def imports(self) -> dict[Path, set[Path]]:
        """Returns for each file the files of this crate whose items it names."""
        found: dict[Path, set[Path]] = {}
        for module, path in self.modules.items():
            targets = found.setdefault(path, set())
            for named in _named(self._trees[module]):
                if (absolute := self._absolute(module, named)) is not None:
                    target = self._module_of(absolute)
                    if target != module:
                        targets.add(self.modules[target])
        return found


def _named(tree: Node) -> Iterator[tuple[str, ...]]:
    """Yields every path that a file names, in ``use`` and elsewhere, except in inline modules."""
    for node in tree.named_children:
        if node.type == "use_declaration":
            yield from _leaves(node.child_by_field_name("argument"))
        elif node.type != "mod_item":
            for inner in _walk(node):
                if inner.type in ("scoped_identifier", "scoped_type_identifier"):
                    path = tuple(_text(inner).split("<")[0].replace("\n", "").replace(" ", "").split("::"))
                    if path[0] in ("crate", "super", "self"):
                        yield path


def _leaves(node: Node | None, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the paths of a ``use`` tree. A glob stands for its module."""
    if node is None:
        return
    match node.type:
        case "scoped_use_list":
            path = (*before, *_text(node.child_by_field_name("path")).split("::"))
            yield from _leaves(node.child_by_field_name("list"), path)
        case "use_list":
            for child in node.named_children:
                yield from _leaves(child, before)
        case "use_as_clause":
            yield from _leaves(node.child_by_field_name("path"), before)
        case "use_wildcard":
            yield from _leaves(node.named_children[0], before)
        case "self" if before:
            yield before
        case _:
            yield (*before, *_text(node).split("::"))


def python_imports(package: Path) -> dict[Path, set[Path]]:
    """Returns for each file of a package the package's files that importing it imports.

    Imports for type checkers only do not count.
    """
    modules = {_python_name(package, p): p for p in sorted(package.rglob("*.py"))}
    found: dict[Path, set[Path]] = {}
    for name, path in modules.items():
        here = name if path.name == "__init__.py" else name[:-1]
        targets: set[Path] = set()
        for node in _imports(ast.parse(path.read_text()).body):
            if isinstance(node, ast.ImportFrom):
                base = (*here[: len(here) - node.level + 1], *(node.module or "").split(".")) if node.level else ()
                base = tuple(part for part in base if part)
                for alias in node.names:
                    target = modules.get((*base, alias.name)) or (modules.get(base) if node.level else None)
                    if target is not None and target != path:
                        targets.add(target)
        found[path] = targets
    return found


def _python_name(package: Path, path: Path) -> tuple[str, ...]:
    parts = (package.name, *path.relative_to(package).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def _imports(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the import statements of a module's top level, except in ``if TYPE_CHECKING``."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _imports([*node.body, *node.orelse])


def circles(imports: dict[Path, set[Path]]) -> list[list[Path]]:
    """Returns strongly connected groups of files, largest first (Tarjan, 1972).

    Each file of a group reaches all others of its group.
    """
    index: dict[Path, int] = {}
    low: dict[Path, int] = {}
    stack: list[Path] = []
    found: list[list[Path]] = []

    def visit(node: Path) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in imports.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            group, stack[at:] = stack[at:], []
            if len(group) > 1:
                found.append(sorted(group))

    for node in imports:
        if node not in index:
            visit(node)
    return sorted(found, key=len, reverse=True)
