"""The API of SandboxFusion (github.com/bytedance/SandboxFusion), which verl and many other libraries use.

200: it was run, `status` and `run_result` report the result; 422: a field has another shape, or the request needs an
unsupported feature; 504: the service could not run it (overloaded or failed), the only status that verl retries.

Departures: only Python; `executor_pod_name` is null; `cell_timeout` is ignored, as in SandboxFusion; a notebook that
runs out of time returns the cells that ran. Absolute paths below /mnt and /tmp mean the working directory, which is
mounted there for programs with their own file system. With another absolute path in `files` the program fails, and one
in `fetch_files` is not returned. Not served: the data sets of /submit.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from rocstar.sandbox import check
from rocstar.sandbox.call import Call, Limits, Outcome, ProgramOutcome, Response, ServiceOutcome, SessionLost, fault
from rocstar.sandbox.service import native
from rocstar.sandbox.service.core import MEBIBYTE, BadRequest, Endpoints, HttpRequest, Service, decode, encode
from rocstar.sandbox.service.native import HttpReply

ANSWER_SECONDS = 8.0  # verl gives up compile_timeout + run_timeout + 10 s after its request: be earlier
NOTEBOOK_OUTPUT_BYTES = 2**20  # of each cell
MAX_CELLS = 1000
MIN_CELL_SECONDS = check.BOUNDS["wall_seconds"][0]
TIMEOUTS: tuple[Outcome, ...] = (ProgramOutcome.WALL_TIMEOUT, ProgramOutcome.CPU_TIMEOUT)
OUR_PLACES = re.compile(r"^(?:/mnt/|/tmp/)(?=[^/])")
TRACEBACK = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):$", re.MULTILINE)
CHAINED = (
    "\nThe above exception was the direct cause of the following exception:\n\n",
    "\nDuring handling of the above exception, another exception occurred:\n\n",
)
"""The text between two chained tracebacks."""


class Common(Struct, frozen=True, kw_only=True):
    memory_limit_MB: int = -1
    """In addition to preloaded modules, MiB; -1 is the service's default."""
    files: Annotated[dict[str, bytes | None], Meta(max_length=check.MAX_FILES)] = {}
    fetch_files: Annotated[tuple[str, ...], Meta(max_length=check.MAX_FILES)] = ()
    """Missing files are skipped."""

    def limits(self, service: Service, wall_seconds: float) -> Limits:
        """The requested limits, reduced to what the operator allows instead of refused."""
        settings, requested = service.settings, self.memory_limit_MB
        wall = min(wall_seconds, settings.max_wall_seconds)
        memory = min(requested if requested > 0 else settings.memory_mb, settings.max_memory_mb) * MEBIBYTE
        return Limits(wall_seconds=wall, cpu_seconds=wall, memory_bytes=memory)

    def contents(self) -> dict[str, bytes]:
        return {OUR_PLACES.sub("", path): content for path, content in self.files.items() if content is not None}

    def fetched(self) -> dict[str, str]:
        """Requested path -> path in the working directory."""
        inside = {path: OUR_PLACES.sub("", path) for path in self.fetch_files}
        return {path: name for path, name in inside.items() if not name.startswith("/")}


class RunCode(Common, frozen=True, kw_only=True):
    code: str
    language: str = "python"
    compile_timeout: Annotated[float, Meta(ge=0)] = 10.0
    """Nothing is compiled; it is added to the call's patience, seconds."""
    run_timeout: native.Seconds = 10.0
    """Wall time of the program."""
    stdin: str | None = None


class RunJupyter(Common, frozen=True, kw_only=True):
    cells: Annotated[list[str], Meta(max_length=MAX_CELLS)]
    cell_timeout: float = 0.0
    """Ignored, as in SandboxFusion."""
    total_timeout: native.Seconds = 45.0
    """Wall time of the notebook."""
    kernel: Literal["python3"] = "python3"


async def run_code(request: HttpRequest) -> HttpReply:
    service, shape = request.service, decode(request.body, RunCode, 422)
    if shape.language != "python":
        raise BadRequest(f"language {shape.language!r} is not run here; only python is", 422)
    fetched = shape.fetched()
    call = Call(
        id="",
        code=shape.code,
        stdin=shape.stdin or "",
        limits=shape.limits(service, shape.run_timeout),
        files=shape.contents(),
        fetch=tuple(dict.fromkeys(fetched.values())),
        patience_seconds=shape.compile_timeout + ANSWER_SECONDS,
    )
    response = await service.run(call)
    ran = {"compile_result": None, "run_result": command_result(response, response.run_seconds)}
    return answer(service, response, response.outcome, ran, fetched)


async def run_jupyter(request: HttpRequest) -> HttpReply:
    service, shape = request.service, decode(request.body, RunJupyter, 422)
    limits = shape.limits(service, shape.total_timeout)
    fetched = shape.fetched()
    limits = structs.replace(limits, output_bytes=max(limits.output_bytes, NOTEBOOK_OUTPUT_BYTES))
    responses = await play(request, shape.cells, limits, shape.contents(), tuple(dict.fromkeys(fetched.values())))
    last = responses[-1] if responses else Response(id="", outcome=ProgramOutcome.OK, exit_code=0)
    undone = (*TIMEOUTS, ProgramOutcome.REJECTED)
    bad = next((each for each in responses if each.state_lost or each.outcome in undone), None)
    summary = bad or Response(id="", outcome=ProgramOutcome.OK, exit_code=0)
    driver = command_result(structs.replace(summary, stdout="", stderr=""), sum(each.run_seconds for each in responses))
    ran = {"driver": driver, "cells": [cell_result(response) for response in responses]}
    failure = last.outcome if isinstance(last.outcome, ServiceOutcome) else summary.outcome
    return answer(service, last, failure, ran, fetched)


async def play(
    request: HttpRequest, cells: Sequence[str], limits: Limits, files: Mapping[str, bytes], fetch: Sequence[str]
) -> list[Response]:
    """One response for each cell that was run: the last may be a failure of the service, and no cell starts once all
    together have run for `limits.wall_seconds`. `files` are written before the first cell, `fetch` is read after the
    last. Raises BadRequest."""
    responses: list[Response] = []
    left, size = limits.wall_seconds, 0
    service = request.service
    async with service.client.open_session(limits=limits) as session:
        for number, code in enumerate(cells, 1):
            running = session.run(
                code,
                files=files if number == 1 else {},
                fetch=fetch if number == len(cells) else (),
                wall_seconds=max(MIN_CELL_SECONDS, left),
                patience_seconds=ANSWER_SECONDS,
            )
            try:
                last = await service.outcome_of("", running)
            except SessionLost as error:
                last = fault("", str(error))
            responses.append(last)
            left -= last.run_seconds
            size += sum(map(len, (last.stdout, last.stderr, last.value or "", *last.images, *last.files.values())))
            request.hold(size)
            if left <= 0 or isinstance(last.outcome, ServiceOutcome):
                break
    return responses


def answer(
    service: Service, last: Response, outcome: Outcome, ran: Mapping[str, Any], fetched: Mapping[str, str]
) -> HttpReply:
    """`ran`: this API's fields, emptied if the service failed; the files are those of the last response."""
    files = {path: last.files[name] for path, name in fetched.items() if name in last.files}
    status, code = "Success" if outcome is ProgramOutcome.OK else "Failed", 200
    if isinstance(outcome, ServiceOutcome):
        status, code = "SandboxError", 504
        ran = {name: [] if isinstance(value, list) else None for name, value in ran.items()}
    body = {"status": status, **ran, "message": last.message, "executor_pod_name": None, "files": files}
    return HttpReply(encode(body), code, service.retry_headers(outcome))


def command_result(response: Response, run_seconds: float) -> dict[str, Any]:
    """CommandRunResult; both streams are always strings, because verl concatenates them."""
    timeout = response.outcome in TIMEOUTS
    return {
        "status": "TimeLimitExceeded" if timeout else "Finished",
        "execution_time": run_seconds,
        "return_code": None if timeout else return_code(response),
        "stdout": response.stdout,
        "stderr": response.stderr or response.message,
    }


def return_code(response: Response) -> int:
    """As in `subprocess`: the exit code, or minus the number of the signal. The sandbox's limits count as SIGKILL."""
    if response.exit_code is not None:
        return response.exit_code
    name = response.signal or "SIGKILL"
    number = name.removeprefix("SIG")  # a signal without a name is SIG37
    return -int(number) if number.isdecimal() else -int(signal.Signals[name])


def cell_result(response: Response) -> dict[str, Any]:
    """A cell's result as in Jupyter, where the traceback is not part of stderr."""
    printed, traceback = split_traceback(response.stderr) if response.exception else (response.stderr, "")
    shown: list[dict[str, Any]] = [] if response.value is None else [{"text/plain": response.value}]
    shown += [{"image/png": image} for image in response.images]
    error = error_of(response, traceback)
    return {"stdout": response.stdout, "stderr": printed, "display": shown, "error": error}


def error_of(response: Response, traceback: str) -> Sequence[dict[str, Any]]:
    """An empty list, or a list with one error."""
    failure = response.exception
    if response.outcome is ProgramOutcome.OK:
        return []
    if failure is not None:
        name, value = failure.type.rpartition(".")[2], failure.message
    elif response.outcome is ProgramOutcome.EXIT_NONZERO and not response.state_lost:
        name, value = "SystemExit", str(response.exit_code)
    elif response.outcome in TIMEOUTS:
        name, value = "TimeoutError", f"the cell was ended after {response.run_seconds:.1f} s"
    else:
        name, value = "DeadKernelError", response.message or f"the cell ended its process ({response.outcome})"
    return [{"ename": name, "evalue": value, "traceback": traceback.splitlines()}]


def split_traceback(stderr: str) -> tuple[str, str]:
    """The cell's own output, and the traceback at its end, with chained ones."""
    start = len(stderr)
    for head in reversed(list(TRACEBACK.finditer(stderr))):
        if start != len(stderr) and not stderr.endswith(CHAINED, 0, start):
            break
        start = head.start()
    return stderr[:start], stderr[start:]


ENDPOINTS: Endpoints = {("POST", "/run_code"): run_code, ("POST", "/run_jupyter"): run_jupyter}
