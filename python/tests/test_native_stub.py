"""The stub of the native half, which mypy believes, has the names of the module itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from everstep import _internal

STUB = Path(__file__).parent.parent / "everstep" / "_internal.pyi"


def _declared(body: list[ast.stmt]) -> set[str]:
    names = {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    names |= {n.target.id for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return {n for n in names if not n.startswith("_")}


def _public(of: object) -> set[str]:
    return {n for n in vars(of) if not n.startswith("_")}


def test_the_stub_has_every_name_of_the_module():
    assert _declared(ast.parse(STUB.read_text()).body) == _public(_internal)


@pytest.mark.parametrize("node", [n for n in ast.parse(STUB.read_text()).body if isinstance(n, ast.ClassDef)])
def test_the_stub_has_every_member_of_a_class(node: ast.ClassDef):
    assert _declared(node.body) == _public(getattr(_internal, node.name))
