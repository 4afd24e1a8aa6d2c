"""The native API: one call, a batch, and a batch whose results are streamed.

| status | meaning |
| --- | --- |
| 200 | the program was run, whatever it did; `outcome` says what |
| 400 | the request cannot be served as it is: `{"error": sentence}`, or a Response with outcome `rejected` |
| 401, 403 | no or a wrong token; a web page of another site |
| 404, 405 | no such path; not by this method |
| 408, 413, 431 | the request came too slowly; it, its batch or its headers are too long |
| 500 | we failed (`internal`); safe to send again |
| 503 | `overloaded`: the call was not run; `Retry-After` says in how many seconds to come again |

A batch is always 200: its calls have outcomes of their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse

from rocstar.sandbox.service.batches import jobs_of, run_jobs
from rocstar.sandbox.service.http import Path, Service, json_response, outcome_for, read_body, service_of
from rocstar.sandbox.service.shapes import BadRequest, Call, decode, decode_batch, encode, request_of
from rocstar.sandbox.wire import Outcome, ProgramOutcome, Response, ServiceOutcome

MAX_REPLY_BYTES = 256 * 2**20  # a batch's results are held until the last one

STATUS: dict[Outcome, int] = {
    ProgramOutcome.REJECTED: 400,
    ServiceOutcome.INTERNAL: 500,
    ServiceOutcome.OVERLOADED: 503,
}


async def run(request: Request) -> HttpResponse:
    """POST /v1/run: a `Call` in, a `Response` out."""
    service = service_of(request)
    call = decode(await read_body(request), Call)
    patience = call.patience_seconds or service.settings.patience_seconds
    ticket = service.admission.submit(request_of(call, service.settings), patience)
    return answer(service, await outcome_for(request, ticket))


def answer(service: Service, response: Response) -> HttpResponse:
    """The response to one program or cell, with the HTTP status that goes with its outcome."""
    return json_response(encode(response), STATUS.get(response.outcome, 200), retry_headers(service, response.outcome))


def retry_headers(service: Service, outcome: Outcome) -> dict[str, str] | None:
    if outcome is not ServiceOutcome.OVERLOADED:
        return None
    return {"retry-after": str(service.admission.retry_after_seconds())}


async def batch(request: Request) -> HttpResponse:
    """POST /v1/batch: `{"calls": [Call, ...]}` in, `{"results": [Response, ...]}` out, in the order of the calls."""
    service = service_of(request)
    calls = decode_batch(await read_body(request), service.settings.max_batch)
    results, size = [b""] * len(calls), 0
    async with aclosing(run_jobs(service, jobs_of(service, calls), request)) as finished:
        async for index, response in finished:
            results[index] = encode(response)
            size += len(results[index])
            if size > MAX_REPLY_BYTES:
                raise BadRequest(f"the results passed {MAX_REPLY_BYTES} bytes; ask for them by POST /v1/stream", 413)
    return json_response(b'{"results":[' + b",".join(results) + b"]}")


async def stream(request: Request) -> HttpResponse:
    """POST /v1/stream: same as a batch; out come lines `{"index": i, "result": Response}` as the calls finish."""
    service = service_of(request)
    calls = decode_batch(await read_body(request), service.settings.max_batch)

    async def lines() -> AsyncIterator[bytes]:
        async for index, response in run_jobs(service, jobs_of(service, calls), request):
            yield b'{"index":%d,"result":%b}\n' % (index, encode(response))

    return StreamingResponse(lines(), media_type="application/x-ndjson")


PATHS: list[Path] = [("POST", "/v1/run", run), ("POST", "/v1/batch", batch), ("POST", "/v1/stream", stream)]
