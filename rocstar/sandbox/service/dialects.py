"""The APIs of two other services, as views of ours.

**code-judge** (github.com/0xWJ/code-judge), which rStar2-Agent's tools and rewards use. Status is 200 for all results
of programs, 422 for a body of another shape. Departures: `cpp` and `math` are `invalid_input` (only Python runs here);
`cost` is measured outside the program; a call may wait 14 s, but 4 s in code-judge.

**SandboxFusion** (github.com/bytedance/SandboxFusion), which verl and many other libraries use. 200: it was run,
`status` and `run_result` report the result; 422: a field has another shape, or the request needs an unsupported
feature; 504: the service could not run it (overloaded or failed), the only status that verl retries. Departures: only
Python; `executor_pod_name` is null. Absolute paths below /mnt and /tmp mean the working directory, which is mounted
there for programs with their own file system. With another absolute path in `files` the program fails, and one in
`fetch_files` is not returned. Not served: notebooks (/run_jupyter), and the data sets of /submit.
"""

from __future__ import annotations

import re
import signal
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from rocstar.sandbox import check
from rocstar.sandbox.call import Call, Limits, Outcome, ProgramOutcome, Response, ServiceOutcome, failed
from rocstar.sandbox.service import core
from rocstar.sandbox.service.core import BadRequest, Endpoints, HttpRequest, Service, decode, encode
from rocstar.sandbox.service.native import HttpReply, Seconds
from rocstar.sandbox.settings import Settings

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
TIMEOUTS: tuple[Outcome, ...] = (ProgramOutcome.WALL_TIMEOUT, ProgramOutcome.CPU_TIMEOUT)
OUR_PLACES = re.compile(r"^(?:/mnt/|/tmp/)(?=[^/])")


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
    submissions: Annotated[list[Submission], Meta(min_length=1, max_length=core.MAX_BATCH)]
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
    def call_of(submission: Submission) -> Call | Response:
        if submission.type != "python":
            return failed("", ProgramOutcome.REJECTED, f"type {submission.type} is not run here; only python is")
        stdin, limits = submission.input or "", core.default_limits(service.settings)
        return Call(id="", code=submission.solution, stdin=stdin, limits=limits, patience_seconds=patience_seconds)

    return await service.run_all(submissions, call_of, lambda each, response: result_of(each, response, keep_output))


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


class RunCode(Struct, frozen=True, kw_only=True):
    code: str
    language: str = "python"
    compile_timeout: Annotated[float, Meta(ge=0)] = 10.0
    """Nothing is compiled; it is added to the call's patience, seconds."""
    run_timeout: Seconds = 10.0
    """Wall time of the program."""
    memory_limit_MB: int = -1
    """In addition to preloaded modules, MiB; -1 is the service's default."""
    stdin: str | None = None
    files: Annotated[dict[str, bytes | None], Meta(max_length=check.MAX_FILES)] = {}
    fetch_files: Annotated[tuple[str, ...], Meta(max_length=check.MAX_FILES)] = ()
    """Missing files are skipped."""

    def limits(self, settings: Settings) -> Limits:
        """The requested limits, reduced to what the operator allows instead of refused."""
        wall, memory = min(self.run_timeout, settings.max_wall_seconds), self.memory_limit_MB
        memory = min(memory if memory > 0 else settings.memory_mb, settings.max_memory_mb) * core.MEBIBYTE
        return Limits(wall_seconds=wall, cpu_seconds=wall, memory_bytes=memory)


async def run_code(request: HttpRequest) -> HttpReply:
    service, shape = request.service, decode(request.body, RunCode, 422)
    if shape.language != "python":
        raise BadRequest(f"language {shape.language!r} is not run here; only python is", 422)
    inside = {path: OUR_PLACES.sub("", path) for path in shape.fetch_files}
    fetched = {path: name for path, name in inside.items() if not name.startswith("/")}
    call = Call(
        id="",
        code=shape.code,
        stdin=shape.stdin or "",
        limits=shape.limits(service.settings),
        files={OUR_PLACES.sub("", path): content for path, content in shape.files.items() if content is not None},
        fetch=tuple(dict.fromkeys(fetched.values())),
        patience_seconds=shape.compile_timeout + ANSWER_SECONDS,
    )
    return answer(service, await service.run(call), fetched)


def answer(service: Service, response: Response, fetched: Mapping[str, str]) -> HttpReply:
    """RunCodeResponse. fetched: requested path -> path in the working directory."""
    status, code = "Success" if response.outcome is ProgramOutcome.OK else "Failed", 200
    if isinstance(response.outcome, ServiceOutcome):
        status, code = "SandboxError", 504
    body = {
        "status": status,
        "compile_result": None,
        "run_result": command_result(response) if code == 200 else None,
        "message": response.message,
        "executor_pod_name": None,
        "files": {path: response.files[name] for path, name in fetched.items() if name in response.files},
    }
    return HttpReply(encode(body), code, service.retry_headers(response.outcome))


def command_result(response: Response) -> dict[str, Any]:
    """CommandRunResult; both streams are always strings, because verl concatenates them."""
    timeout = response.outcome in TIMEOUTS
    return {
        "status": "TimeLimitExceeded" if timeout else "Finished",
        "execution_time": response.run_seconds,
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


def endpoints(prefix: str) -> Endpoints:
    found: Endpoints = {("GET", f"{prefix}/status"): status, ("GET", f"{prefix}/ping"): ping}
    for verb, keep_output in (("run", True), ("judge", False)):
        found |= {
            ("POST", f"{prefix}/{verb}"): partial(single, keep_output),
            ("POST", f"{prefix}/{verb}/batch"): partial(batch, keep_output, SHORT_PATIENCE_SECONDS),
            ("POST", f"{prefix}/{verb}/long-batch"): partial(batch, keep_output, core.BATCH_PATIENCE_SECONDS),
        }
    return found


ENDPOINTS: Endpoints = {("POST", "/run_code"): run_code} | endpoints("") | endpoints("/code-judge")
