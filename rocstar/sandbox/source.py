"""A program's text made ready to run: its statements, and apart from them the last expression, whose value is shown."""

from __future__ import annotations

import ast
from types import CodeType

FUTURE_FLAGS = 0x1FE0000  # those of a code object's flags that `from __future__` sets


def compiled(code: str, name: str) -> tuple[CodeType, CodeType | None]:
    """The program, and its last expression apart when it ends in one that no semicolon hides."""
    return compiled_by_lines(code, name) or compiled_by_tree(code, name)


def compiled_by_lines(code: str, name: str) -> tuple[CodeType, CodeType] | None:
    """Without a syntax tree, which costs 0.2 ms: when all lines but the last are a whole program and the last is a
    whole expression, then together they are that program followed by that expression."""
    head, _, last = code.rstrip().rpartition("\n")
    if not last or last[0] in " \t#)]}":
        return None
    try:
        body = compile(head + "\n", name, "exec", dont_inherit=True)
        lead = "\n" * (head.count("\n") + 1) if head else ""
        return body, compile(lead + last, name, "eval", body.co_flags & FUTURE_FLAGS, dont_inherit=True)
    except (SyntaxError, ValueError):
        return None


def compiled_by_tree(code: str, name: str) -> tuple[CodeType, CodeType | None]:
    tree = ast.parse(code, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not hidden_by_semicolon(code, tree.body[-1]):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]  # it is an Expr, just checked
    body = compile(tree, name, "exec", dont_inherit=True)
    flags = body.co_flags & FUTURE_FLAGS
    return body, compile(last, name, "eval", flags, dont_inherit=True) if last else None


def hidden_by_semicolon(code: str, last: ast.Expr) -> bool:
    line = code.encode("utf-8", "surrogatepass").split(b"\n")[(last.end_lineno or 1) - 1]
    return line[last.end_col_offset or 0 :].lstrip().startswith(b";")
