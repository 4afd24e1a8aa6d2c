"""What stands outside of the package imports only names that the package has; most of these files no test runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.test_imports import PACKAGE, modules, parsed

ROOT = PACKAGE.parent
SCRIPTS = sorted(
    file for place in ("benchmarks", "examples", "recipes", "scripts") for file in (ROOT / place).rglob("*.py")
)


@cache
def names_in(module: str) -> frozenset[str]:
    """Names that stand at the top of a module, under conditions too, and its submodules."""
    submodules = {name.rpartition(".")[2] for name in modules() if name.rpartition(".")[0] == module}
    return frozenset(submodules.union(_bound(parsed(modules()[module]))))


def _bound(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            continue
        if isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        yield from _bound(node)


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_script_imports_what_there_is(file: Path) -> None:
    taken = [
        (node.module, alias.name)
        for node in ast.walk(parsed(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rocstar"
        for alias in node.names
    ]
    missing = [(module, name) for module, name in taken if module not in modules() or name not in names_in(module)]
    assert missing == []
