"""Runs the cells of a notebook one after another in one namespace. Its source is sent to the sandbox as a program:
the standard library only, no import of ours, nothing typed beyond what helps to read it.

Each cell ends with one line on the true stdout: a mark, then a JSON object of what the cell printed, showed and raised.
The mark keeps what programs write past `sys.stdout` apart; it is no secret, for a notebook can only fool itself.
"""

import ast
import io
import json
import linecache
import os
import sys
import traceback
import types
from typing import Any


def main(cells: list[str], mark: str) -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    for number, source in enumerate(cells, 1):
        print(f"\n{mark}{json.dumps(run_cell(source, f'<cell {number}>', module))}", file=out, flush=True)
    out.close()


def run_cell(source: str, name: str, module: types.ModuleType) -> dict[str, Any]:
    shown: list[dict[str, str]] = []
    errors: list[dict[str, Any]] = []
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = captured = io.StringIO(), io.StringIO()
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    try:
        shown += [{"text/plain": text} for text in execute(source, name, module)]
    except BaseException as error:  # whatever a cell raises is its result, SystemExit too
        errors.append(told(error, name))
    finally:
        sys.stdout, sys.stderr = stdout, stderr
    return {"stdout": captured[0].getvalue(), "stderr": captured[1].getvalue(), "display": shown, "error": errors}


def execute(source: str, name: str, module: types.ModuleType) -> list[str]:
    """The value of a last expression, as text, unless it is None or a semicolon hides it."""
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, name, "exec"), module.__dict__)
    if not isinstance(last, ast.Expr):
        return []
    value = eval(compile(ast.Expression(last.value), name, "eval"), module.__dict__)
    module.__dict__["_"] = value
    hidden = value is None or source.rstrip().endswith(";")
    return [] if hidden else [repr(value)]


def told(error: BaseException, name: str) -> dict[str, Any]:
    """Only the cells' own lines of the traceback."""
    report = traceback.TracebackException.from_exception(error)
    own = [frame for frame in report.stack if frame.filename.startswith("<cell ")]
    report.stack = traceback.StackSummary.from_list(own)
    return {"ename": type(error).__name__, "evalue": str(error), "traceback": "".join(report.format()).splitlines()}
