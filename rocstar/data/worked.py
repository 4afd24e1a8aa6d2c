"""What the Python tool would answer to our own little programs, worked out in this process.

For programs that rocstar itself wrote and nothing else: they run unguarded. A cold start shows tens of thousands of
them, and a sandbox call each would cost more than learning from them. A test holds the answers equal to the sandbox's.
"""

from __future__ import annotations

import io
import linecache
import traceback
from contextlib import redirect_stdout

from rocstar.types import Status, ToolCall, ToolResult

NAME = "<program>"  # as the sandbox calls a program in its tracebacks


def work_out(call: ToolCall) -> ToolResult:
    """The result of a call whose `code` is a program of our own that ends by itself. Source: ours."""
    code = call.arguments["code"]
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            exec(compile(code, NAME, "exec"), {"__name__": "__main__"})
    except Exception as error:
        linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
        within = error.__traceback__.tb_next if error.__traceback__ else None
        told = "".join(traceback.format_exception(type(error), error, within))
        return ToolResult(call_id=call.id, status=Status.CODE_ERROR, stdout=output.getvalue(), stderr=told)
    return ToolResult(call_id=call.id, status=Status.OK, stdout=output.getvalue())
