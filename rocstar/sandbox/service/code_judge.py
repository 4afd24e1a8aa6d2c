"""The API of code-judge (github.com/0xWJ/code-judge), which rStar2-Agent's tools and rewards use.

Status is 200 for all results of programs, 422 for a body of another shape. Departures: `cpp` and `math` are
`invalid_input` (only Python runs here); `cost` is measured outside the program; a call may wait 14 s, but 4 s in
code-judge.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from rocstar.sandbox.call import Call, Outcome, ProgramOutcome, Response, ServiceOutcome, failed
from rocstar.sandbox.service import core
from rocstar.sandbox.service.core import Endpoints, HttpRequest, Service, decode, encode
from rocstar.sandbox.service.native import HttpReply

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


def endpoints(prefix: str) -> Endpoints:
    found: Endpoints = {("GET", f"{prefix}/status"): status, ("GET", f"{prefix}/ping"): ping}
    for verb, keep_output in (("run", True), ("judge", False)):
        found |= {
            ("POST", f"{prefix}/{verb}"): partial(single, keep_output),
            ("POST", f"{prefix}/{verb}/batch"): partial(batch, keep_output, SHORT_PATIENCE_SECONDS),
            ("POST", f"{prefix}/{verb}/long-batch"): partial(batch, keep_output, core.BATCH_PATIENCE_SECONDS),
        }
    return found


ENDPOINTS = endpoints("") | endpoints("/code-judge")
