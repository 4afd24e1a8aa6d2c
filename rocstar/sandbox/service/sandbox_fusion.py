"""The dialect of SandboxFusion (github.com/bytedance/SandboxFusion), which verl and many others speak.

| status | meaning |
| --- | --- |
| 200 | the program was run; `status` and `run_result` say what it did |
| 422 | a field has another shape, or the request needs what is not served here: `{"detail": sentence}` |
| 504 | we could not run it (overloaded, or a fault of ours): the one status that verl sends again |

Departures: only Python; `executor_pod_name` is null; `cell_timeout` is ignored, as it is there; a notebook that runs
out of time keeps the cells that ran, and one whose cell ended its process goes on as if that cell had not been. Not
served: the data sets of /submit.
"""

from __future__ import annotations

import base64
import binascii
import re
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from rocstar.sandbox import wire
from rocstar.sandbox.service.http import Path, Service, json_response, outcome_for, read_body, service_of
from rocstar.sandbox.service.native import retry_headers
from rocstar.sandbox.service.notebook_api import Played
from rocstar.sandbox.service.notebook_api import carried_out as carry_out_notebook
from rocstar.sandbox.service.shapes import BadRequest, decode, encode
from rocstar.sandbox.wire import Limits, Outcome, ProgramOutcome, Response, ServiceOutcome

ANSWER_SECONDS = 8.0  # verl gives up compile_timeout + run_timeout + 10 s after it asked: be earlier
NOTEBOOK_OUTPUT_BYTES = 2**20  # of each cell
MEBIBYTE = 2**20
TIMEOUTS: tuple[Outcome, ...] = (ProgramOutcome.WALL_TIMEOUT, ProgramOutcome.CPU_TIMEOUT)
TRACEBACK = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):$", re.MULTILINE)
CHAINED = (
    "\nThe above exception was the direct cause of the following exception:\n\n",
    "\nDuring handling of the above exception, another exception occurred:\n\n",
)
"""What stands between two tracebacks that belong together."""
Seconds = Annotated[float, Meta(gt=0)]
Encoded = dict[str, str | None]


class RunCode(Struct, frozen=True):
    code: str
    """The program."""
    language: str = "python"
    """Anything else is refused."""
    compile_timeout: Annotated[float, Meta(ge=0)] = 10.0
    """Nothing is compiled; it lengthens how long the call may wait for its turn, seconds."""
    run_timeout: Seconds = 10.0
    """Wall time of the program, seconds."""
    memory_limit_MB: int = -1
    """Address space on top of what is preloaded, MiB; -1 is the service's default."""
    stdin: str | None = None
    """Standard input."""
    files: Encoded = {}
    """Path to base64 of the content."""
    fetch_files: list[str] = []
    """Files to send back, relative to the working directory; those that are missing are left out."""


class RunJupyter(Struct, frozen=True):
    cells: list[str]
    """Run one after another; an error does not stop those after it."""
    cell_timeout: float = 0.0
    """Ignored, as there."""
    total_timeout: Seconds = 45.0
    """Wall time of the notebook, seconds."""
    memory_limit_MB: int = -1
    """See RunCode."""
    kernel: Literal["python3"] = "python3"
    """The only one."""
    files: Encoded = {}
    """See RunCode."""
    fetch_files: list[str] = []
    """See RunCode; as they are after the last cell."""


async def run_code(request: Request) -> HttpResponse:
    """POST /run_code."""
    service = service_of(request)
    asked = decode(await read_body(request), RunCode, 422)
    if asked.language != "python":
        raise BadRequest(f"language {asked.language!r} is not run here; only python is", 422)
    limits = limits_of(service, asked.run_timeout, asked.memory_limit_MB)
    call = wire.Request(
        id="",
        code=asked.code,
        stdin=asked.stdin or "",
        limits=limits,
        files=files_of(asked),
        fetch=asked.fetch_files,
    )
    response = await carried_out(request, call, asked.compile_timeout + ANSWER_SECONDS)
    if isinstance(response.outcome, ServiceOutcome):
        return at_fault(service, response, {"compile_result": None, "run_result": None})
    ran = {"compile_result": None, "run_result": command_result(response, response.stdout)}
    return answer(status_of(response), response.message, ran, files=response.files)


async def run_jupyter(request: Request) -> HttpResponse:
    """POST /run_jupyter."""
    service = service_of(request)
    asked = decode(await read_body(request), RunJupyter, 422)
    limits = limits_of(service, asked.total_timeout, asked.memory_limit_MB)
    limits = replace(limits, output_bytes=max(limits.output_bytes, NOTEBOOK_OUTPUT_BYTES))
    played = Played(
        cells=asked.cells,
        limits=limits,
        files=files_of(asked),
        fetch=asked.fetch_files,
        total_seconds=limits.wall_seconds,
    )
    told = await carry_out_notebook(request, played, ANSWER_SECONDS)
    if isinstance(told.outcome, ServiceOutcome):
        return at_fault(service, told, {"driver": None, "cells": []})
    parts = {"driver": command_result(replace(told, stderr=""), ""), "cells": list(map(cell_result, played.responses))}
    files = played.responses[-1].files if played.responses else {}
    return answer(status_of(told), told.message, parts, files=files)


def cell_result(response: Response) -> dict[str, Any]:
    """What Jupyter says of a cell: the traceback is no part of stderr there."""
    printed, traceback = split_traceback(response.stderr) if response.exception else (response.stderr, "")
    shown = [] if response.value is None else [{"text/plain": response.value}]
    return {"stdout": response.stdout, "stderr": printed, "display": shown, "error": errors_of(response, traceback)}


def errors_of(response: Response, traceback: str) -> list[dict[str, Any]]:
    failure = response.exception
    if response.outcome is ProgramOutcome.OK:
        return []
    if failure is not None:
        name, value = failure.type.rpartition(".")[2], failure.message
    elif response.outcome is ProgramOutcome.EXIT_NONZERO and response.committed:
        name, value = "SystemExit", str(response.exit_code)
    elif response.outcome in TIMEOUTS:
        name, value = "TimeoutError", f"the cell was ended after {response.run_seconds:.1f} s"
    else:
        name, value = "DeadKernelError", response.message or f"the cell ended its process ({response.outcome})"
    return [{"ename": name, "evalue": value, "traceback": traceback.splitlines()}]


def split_traceback(stderr: str) -> tuple[str, str]:
    """What the cell printed, and the traceback at the end of it, with those it is chained to."""
    start = len(stderr)
    for head in reversed(list(TRACEBACK.finditer(stderr))):
        if start != len(stderr) and not stderr[:start].endswith(CHAINED):
            break
        start = head.start()
    return stderr[:start], stderr[start:]


async def carried_out(request: Request, call: wire.Request, patience_seconds: float) -> Response:
    return await outcome_for(request, service_of(request).admission.submit(call, patience_seconds))


def limits_of(service: Service, wall_seconds: float, memory_mb: int) -> Limits:
    """What is asked for, within what the operator allows; nobody is told no for asking too much."""
    settings = service.settings
    memory = settings.limits.memory_bytes if memory_mb <= 0 else memory_mb * MEBIBYTE
    wall = min(wall_seconds, settings.max_wall_seconds)
    return replace(
        settings.limits, wall_seconds=wall, cpu_seconds=wall, memory_bytes=min(memory, settings.max_memory_bytes)
    )


def files_of(asked: RunCode | RunJupyter) -> dict[str, bytes]:
    """Raises BadRequest for what is not base64."""
    try:
        return {path: base64.b64decode(text, validate=True) for path, text in asked.files.items() if text is not None}
    except (binascii.Error, ValueError):
        raise BadRequest("files must be base64", 422) from None


def status_of(response: Response) -> str:
    return "Success" if response.outcome is ProgramOutcome.OK else "Failed"


def command_result(response: Response, stdout: str) -> dict[str, Any]:
    """CommandRunResult; both streams are always strings, for verl adds them up."""
    late = response.outcome in TIMEOUTS
    return {
        "status": "TimeLimitExceeded" if late else "Finished",
        "execution_time": response.run_seconds,
        "return_code": None if late else return_code(response),
        "stdout": stdout,
        "stderr": response.stderr or response.message,
    }


def return_code(response: Response) -> int:
    """As `subprocess` tells it: minus the number of the signal. A limit of ours is a SIGKILL."""
    if response.exit_code is not None:
        return response.exit_code
    return -int(signal.Signals[response.signal]) if response.signal else -int(signal.SIGKILL)


def answer(
    status: str, message: str, parts: dict[str, Any], http_status: int = 200, files: Mapping[str, bytes] | None = None
) -> HttpResponse:
    body = {"status": status, "message": message, **parts, "executor_pod_name": None, "files": files or {}}
    return json_response(encode(body), http_status)


def at_fault(service: Service, response: Response, parts: dict[str, Any]) -> HttpResponse:
    reply = answer("SandboxError", response.message or str(response.outcome), parts, 504)
    for name, value in (retry_headers(service, response.outcome) or {}).items():
        reply.headers[name] = value
    return reply


PATHS: list[Path] = [("POST", "/run_code", run_code), ("POST", "/run_jupyter", run_jupyter)]
