"""A notebook as one program: cells in, what each printed, showed and raised out. One fresh process per notebook."""

from __future__ import annotations

import inspect
import json
import secrets
from dataclasses import replace
from typing import Any

from rocstar.sandbox.service import notebook_driver
from rocstar.sandbox.wire import Request, Response


def program_of(cells: list[str]) -> tuple[str, str]:
    """The program, and the mark its results carry."""
    mark = f"@cell-{secrets.token_hex(8)}:"
    return f"{inspect.getsource(notebook_driver)}\n\nmain({json.dumps(cells)}, {mark!r})\n", mark


def request_of(cells: list[str], request: Request) -> tuple[Request, str]:
    """`request` with the notebook as its code, and the mark."""
    code, mark = program_of(cells)
    return replace(request, code=code), mark


def results_of(response: Response, mark: str) -> tuple[list[dict[str, Any]], str]:
    """The cells that finished, and what was written past `sys.stdout`."""
    cells: list[dict[str, Any]] = []
    rest: list[str] = []
    for line in response.stdout.splitlines(keepends=True):
        cell = parsed(line, mark)
        if cell is not None:
            cells.append(cell)
        elif line != "\n":
            rest.append(line)
    return cells, "".join(rest)


def parsed(line: str, mark: str) -> dict[str, Any] | None:
    """None for a line that is not a whole result: a killed program may leave half of one."""
    if not line.startswith(mark):
        return None
    try:
        cell = json.loads(line.removeprefix(mark))
    except ValueError:
        return None
    return cell if isinstance(cell, dict) else None
