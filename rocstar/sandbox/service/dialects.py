"""The APIs of two other services, which their callers may use unchanged.

code-judge (github.com/0xWJ/code-judge), which rStar2-Agent's tools and rewards use. Status is 200 for all results of
programs, 422 for a body of another shape. Departures: `cpp` and `math` are `invalid_input` (only Python runs here);
`cost` is measured outside the program; a call may wait 14 s, but 4 s in code-judge.

SandboxFusion (github.com/bytedance/SandboxFusion), which verl and many other libraries use. 200: it was run, `status`
and `run_result` report the result; 422: a field has another shape, or the request needs an unsupported feature; 504:
the service could not run it (overloaded or failed), the only status that verl retries. Departures: only Python;
`executor_pod_name` is null; `cell_timeout` is ignored, as in SandboxFusion; a notebook that runs out of time returns
the cells that ran. Absolute paths below /mnt and /tmp mean the working directory, which is mounted there for programs
with their own file system. With another absolute path in `files` the program fails, and one in `fetch_files` is not
returned. Not served: the data sets of /submit.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from rocstar.sandbox import check
from rocstar.sandbox.call import (
    Call,
    Limits,
    Outcome,
    ProgramOutcome,
    Response,
    ServiceOutcome,
    SessionLost,
    failed,
    fault,
)
from rocstar.sandbox.service import core, native
from rocstar.sandbox.service.core import MEBIBYTE, BadRequest, Endpoints, HttpRequest, Service, decode, encode
from rocstar.sandbox.service.native import HttpReply

WINDOW_PER_SLOT = 4  # pending calls of a batch: no slot idles, and calls of others are not delayed
MAX_BATCH = 50_000  # calls in one batch, with up to thirty parts each
BATCH_PATIENCE_SECONDS = 3600.0  # of each call of a long batch
SHORT_PATIENCE_SECONDS = 14.0  # code-judge answers within 19 s, so its callers wait as long; 5 s of it are for running
MAX_OUTPUT_CHARACTERS = 1000  # per stream, as shown to models that were trained with code-judge
TIMEOUT_LINE = "Suicide from timeout.\n"  # code-judge's wrapper prints it into the program's output
REASONS: dict[Outcome, str] = {
    ProgramOutcome.WALL_TIMEOUT: "worker_timeout",
    ProgramOutcome.CPU_TIMEOUT: "worker_timeout",
    ProgramOutcome.REJECTED: "invalid_input",
    ServiceOutcome.OVERLOADED: "queue_timeout",
    ServiceOutcome.CANCELLED: "internal_error",
    ServiceOutcome.INTERNAL: "internal_error",
}

ANSWER_SECONDS = 8.0  # verl gives up compile_timeout + run_timeout + 10 s after its request: be earlier
NOTEBOOK_OUTPUT_BYTES = 2**20  # of each cell
MAX_CELLS = 1000
MAX_REPLY_BYTES = 64 * 2**20  # results of a notebook are held until its last cell
MIN_CELL_SECONDS = check.BOUNDS["wall_seconds"][0]
TIMEOUTS: tuple[Outcome, ...] = (ProgramOutcome.WALL_TIMEOUT, ProgramOutcome.CPU_TIMEOUT)
OUR_PLACES = re.compile(r"^(?:/mnt/|/tmp/)(?=[^/])")
TRACEBACK = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):$", re.MULTILINE)
CHAINED = (
    "\nThe above exception was the direct cause of the following exception:\n\n",
    "\nDuring handling of the above exception, another exception occurred:\n\n",
)
"""The text between two chained tracebacks."""


class Submission(Struct, frozen=True, gc=False):
    type: Literal["python", "cpp", "math"]
    solution: str
    """The program."""
    sub_id: str | None = None
    """Returned in the result; generated when missing."""
    input: str | None = None
    """Standard input."""
    expected_output: str | None = None
    """Compared with stdout, both without white space at the ends."""


class BatchSubmission(Struct, frozen=True):
    submissions: Annotated[list[Submission], Meta(min_length=1, max_length=MAX_BATCH)]
    sub_id: str | None = None
    type: Literal["batch"] = "batch"


async def single(keep_output: bool, request: HttpRequest) -> HttpReply:
    submission = decode(request.body, Submission, 422)
    (result,) = await judged(request.service, [submission], SHORT_PATIENCE_SECONDS, keep_output)
    return HttpReply(encode(result))


async def batch(keep_output: bool, patience_seconds: float, request: HttpRequest) -> HttpReply:
    submitted = decode(request.body, BatchSubmission, 422)
    results = await judged(request.service, submitted.submissions, patience_seconds, keep_output)
    return HttpReply(encode({"sub_id": submitted.sub_id or str(uuid.uuid4()), "results": results}))


async def judged(
    service: Service, submissions: Sequence[Submission], patience_seconds: float, keep_output: bool
) -> list[dict[str, Any]]:
    """A window of calls is pending at a time. Patience counts from now on. Cancelling ends the running programs."""
    arrived, rest = time.monotonic(), iter(enumerate(submissions))
    limits, results = core.default_limits(service.settings), dict[int, dict[str, Any]]()

    async def work() -> None:
        for index, each in rest:
            service.held_back -= 1
            if each.type == "python":
                left = max(0.0, patience_seconds - (time.monotonic() - arrived))
                stdin, name = each.input or "", str(index)
                call = Call(id=name, code=each.solution, stdin=stdin, limits=limits, patience_seconds=left)
                response = await service.run(call, waits=len(submissions) > 1)
            else:
                await asyncio.sleep(0)  # other tasks run between any two refused calls
                refusal = f"type {each.type} is not run here; only python is"
                response = failed("", ProgramOutcome.REJECTED, refusal)
            results[index] = result_of(each, response, keep_output)

    window = min(len(submissions), WINDOW_PER_SLOT * service.client.info().slots)
    service.held_back += len(submissions)
    workers = [asyncio.create_task(work()) for _ in range(window)]
    try:
        await asyncio.gather(*workers)
    finally:
        service.held_back -= sum(1 for _ in rest)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[index] for index in range(len(submissions))]


def result_of(submission: Submission, response: Response, keep_output: bool) -> dict[str, Any]:
    """code-judge's SubmissionResult, or its JudgeResult, which has no output."""
    run_success = response.outcome is ProgramOutcome.OK
    expected = submission.expected_output
    ran = isinstance(response.outcome, ProgramOutcome)
    reason = REASONS.get(response.outcome, "")
    result: dict[str, Any] = {
        "sub_id": submission.sub_id or str(uuid.uuid4()),
        "success": run_success and (expected is None or response.stdout.strip() == expected.strip()),
        "run_success": run_success,
        "cost": response.run_seconds if ran else response.queue_seconds,
        "reason": reason,
    }
    if keep_output:
        stdout = response.stdout + (TIMEOUT_LINE if reason == "worker_timeout" else "")
        result["stdout"] = stdout[:MAX_OUTPUT_CHARACTERS] if ran else None
        result["stderr"] = (response.stderr or response.message)[:MAX_OUTPUT_CHARACTERS] if ran else None
    return result


async def status(request: HttpRequest) -> HttpReply:
    service = request.service
    return HttpReply(encode({"queue": service.usage().waiting, "num_workers": service.client.info().slots}))


async def ping(request: HttpRequest) -> HttpReply:
    return HttpReply(b'"pong"')


def endpoints(prefix: str) -> Endpoints:
    found: Endpoints = {("GET", f"{prefix}/status"): status, ("GET", f"{prefix}/ping"): ping}
    for verb, keep_output in (("run", True), ("judge", False)):
        found |= {
            ("POST", f"{prefix}/{verb}"): partial(single, keep_output),
            ("POST", f"{prefix}/{verb}/batch"): partial(batch, keep_output, SHORT_PATIENCE_SECONDS),
            ("POST", f"{prefix}/{verb}/long-batch"): partial(batch, keep_output, BATCH_PATIENCE_SECONDS),
        }
    return found


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
            if size > MAX_REPLY_BYTES:
                raise BadRequest(f"the results passed {MAX_REPLY_BYTES} bytes; send fewer cells at once", 413)
            if size > core.SMALL_BYTES:
                request.held.resize(len(request.body) + size)
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


ENDPOINTS = endpoints("") | endpoints("/code-judge")
ENDPOINTS |= {("POST", "/run_code"): run_code, ("POST", "/run_jupyter"): run_jupyter}
