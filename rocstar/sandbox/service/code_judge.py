"""The dialect of code-judge (github.com/0xWJ/code-judge), which rStar2-Agent's tools and rewards speak.

Status is 200 whatever became of the programs, 422 for a body of another shape. Departures: `cpp` and `math` are
`invalid_input` (only Python runs here); `cost` is measured outside the program; a call may wait 14 s where code-judge
forgets it after 4 s.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from rocstar.sandbox import wire
from rocstar.sandbox.service.batches import Job, run_jobs
from rocstar.sandbox.service.http import Endpoint, Path, Service, json_response, read_body, service_of
from rocstar.sandbox.service.pages import ping
from rocstar.sandbox.service.shapes import decode, encode, refuse_over
from rocstar.sandbox.wire import Outcome, ProgramOutcome, Response, ServiceOutcome

SHORT_PATIENCE_SECONDS = 14.0  # code-judge answers within 19 s, so its callers wait so long; 5 s of it are for running
LONG_PATIENCE_SECONDS = 3600.0
MAX_OUTPUT_CHARACTERS = 1000  # per stream: what models that learned with code-judge were shown
PREFIX = "/code-judge"
"""Everything is served here too. `/status` here holds the two fields of code-judge's own and no others: its client
takes no others."""

REASONS: dict[Outcome, str] = {
    ProgramOutcome.WALL_TIMEOUT: "worker_timeout",
    ProgramOutcome.CPU_TIMEOUT: "worker_timeout",
    ProgramOutcome.REJECTED: "invalid_input",
    ServiceOutcome.OVERLOADED: "queue_timeout",
    ServiceOutcome.CANCELLED: "internal_error",
    ServiceOutcome.INTERNAL: "internal_error",
}


class Submission(Struct, frozen=True):
    type: Literal["python", "cpp", "math"]
    """Only python is run."""
    solution: str
    """The program."""
    sub_id: str | None = None
    """Comes back; made up when missing."""
    options: dict[str, str] | None = None
    """Read by nobody."""
    input: str | None = None
    """Standard input."""
    expected_output: str | None = None
    """Compared with stdout, white space at both ends left out."""


class BatchSubmission(Struct, frozen=True):
    submissions: Annotated[list[Submission], Meta(min_length=1)]
    """Answered in this order."""
    sub_id: str | None = None
    """Comes back; made up when missing."""
    type: Literal["batch"] = "batch"
    """Always so."""


def single(keep_output: bool) -> Endpoint:
    async def serve(request: Request) -> HttpResponse:
        submission = decode(await read_body(request), Submission, 422)
        (result,) = await judged(request, [submission], SHORT_PATIENCE_SECONDS, keep_output)
        return json_response(encode(result))

    return serve


def batch(keep_output: bool, patience_seconds: float) -> Endpoint:
    async def serve(request: Request) -> HttpResponse:
        submitted = decode(await read_body(request), BatchSubmission, 422)
        refuse_over(len(submitted.submissions), service_of(request).settings.max_batch)
        results = await judged(request, submitted.submissions, patience_seconds, keep_output)
        return json_response(encode({"sub_id": submitted.sub_id or fresh_id(), "results": results}))

    return serve


async def judged(
    request: Request, submissions: list[Submission], patience_seconds: float, keep_output: bool
) -> list[dict[str, Any]]:
    service = service_of(request)
    results: list[dict[str, Any]] = [{}] * len(submissions)
    jobs = jobs_of(service, submissions, patience_seconds)
    async with aclosing(run_jobs(service, jobs, request)) as finished:
        async for index, response in finished:
            results[index] = result_of(submissions[index], response, keep_output)
    return results


def jobs_of(service: Service, submissions: Iterable[Submission], patience_seconds: float) -> Iterator[Job]:
    for submission in submissions:
        if submission.type == "python":
            request = wire.Request(
                id="", code=submission.solution, stdin=submission.input or "", limits=service.settings.limits
            )
            yield request, patience_seconds
        else:
            refused = f"type {submission.type} is not run here; only python is"
            yield Response(id="", outcome=ProgramOutcome.REJECTED, message=refused), patience_seconds


def result_of(submission: Submission, response: Response, keep_output: bool) -> dict[str, Any]:
    """code-judge's SubmissionResult, or its JudgeResult, which holds no output."""
    run_success = response.outcome is ProgramOutcome.OK
    expected = submission.expected_output
    success = run_success and (expected is None or response.stdout.strip() == expected.strip())
    ran = isinstance(response.outcome, ProgramOutcome)
    result: dict[str, Any] = {
        "sub_id": submission.sub_id or fresh_id(),
        "success": success,
        "run_success": run_success,
        "cost": response.run_seconds if ran else response.queue_seconds,
        "reason": REASONS.get(response.outcome, ""),
    }
    if keep_output:
        result["stdout"] = response.stdout[:MAX_OUTPUT_CHARACTERS] if ran else None
        result["stderr"] = (response.stderr or response.message)[:MAX_OUTPUT_CHARACTERS] if ran else None
    return result


def fresh_id() -> str:
    return str(uuid.uuid4())


async def status(request: Request) -> HttpResponse:
    """GET /code-judge/status: waiting calls and slots."""
    service = service_of(request)
    slots = service.info().slots * service.settings.workers
    return json_response(encode({"queue": int(service.ledger.total("waiting")), "num_workers": slots}))


def served(prefix: str) -> Iterator[Path]:
    for verb, keep_output in (("run", True), ("judge", False)):
        yield "POST", f"{prefix}/{verb}", single(keep_output)
        yield "POST", f"{prefix}/{verb}/batch", batch(keep_output, SHORT_PATIENCE_SECONDS)
        yield "POST", f"{prefix}/{verb}/long-batch", batch(keep_output, LONG_PATIENCE_SECONDS)


PATHS: list[Path] = [
    *served(""),
    *served(PREFIX),
    ("GET", f"{PREFIX}/ping", ping),
    ("GET", f"{PREFIX}/status", status),
]
