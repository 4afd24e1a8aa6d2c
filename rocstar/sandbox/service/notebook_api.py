"""A notebook in one call: a session for as long as its cells take, one response per cell.

It is admitted once, for all of its cells: were they admitted one by one, more notebooks would be under way than there
are slots for sessions, and each would have to be run again from its start when its turn came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from rocstar.sandbox.service.http import Path, json_response, outcome_for, read_body, service_of
from rocstar.sandbox.service.native import retry_headers
from rocstar.sandbox.service.sessions import MAX_HISTORY_BYTES, Opener, cell_bytes
from rocstar.sandbox.service.shapes import BadRequest, Notebook, decode, encode, files_of, limits_of, seed_of
from rocstar.sandbox.wire import Limits, ProgramOutcome, Request, Response, ServiceOutcome

MAX_OUTPUT_BYTES = 128 * 2**20  # of all cells together: they are held until the last one


@dataclass(slots=True, kw_only=True)
class Played:
    """A notebook and what has become of it."""

    cells: Sequence[str]
    limits: Limits
    """Of each cell."""
    seed: int | None = None
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Written before the first cell."""
    fetch: Sequence[str] = ()
    """Read after the last one."""
    total_seconds: float = float("inf")
    """Time of all cells together, waiting excluded: what the last ones get is what the first ones left."""
    responses: list[Response] = field(default_factory=list)
    """One per cell that was run."""

    async def play(self, opener: Opener) -> Response:
        """All cells; what is told of them together: OK, or why one did not come to its end. Raises SandboxDown."""
        written = 0
        async with opener.open_session(limits=self.limits, seed=self.seed) as session:
            for number, code in enumerate(self.cells, 1):
                left = self.total_seconds - self.run_seconds()
                if left <= 0:
                    break
                response = await session.run(
                    code,
                    files=self.files if number == 1 else None,
                    fetch=self.fetch if number == len(self.cells) else (),
                    wall_seconds=min(left, self.limits.wall_seconds),
                )
                self.responses.append(response)
                written += len(response.stdout) + len(response.stderr) + len(response.value or "")
                if isinstance(response.outcome, ServiceOutcome) or written > MAX_OUTPUT_BYTES:
                    break
        return self.summary()

    def run_seconds(self) -> float:
        return sum(response.run_seconds for response in self.responses)

    def summary(self) -> Response:
        """The first cell that was not committed tells; without one, the last. Times are sums."""
        bad = next((response for response in self.responses if not response.committed), None)
        told = bad or Response(id="", outcome=ProgramOutcome.OK, exit_code=0)
        return replace(
            told,
            run_seconds=self.run_seconds(),
            cpu_seconds=sum(response.cpu_seconds for response in self.responses),
            queue_seconds=sum(response.queue_seconds for response in self.responses),
        )


async def carried_out(http_request: HttpRequest, played: Played, patience_seconds: float) -> Response:
    """Its summary, when its turn has come and it is over. Raises BadRequest."""
    service = service_of(http_request)
    size = sum(cell_bytes(code, {}, ()) for code in played.cells) + cell_bytes("", played.files, played.fetch)
    if size > MAX_HISTORY_BYTES:
        told = f"the notebook takes {size} bytes on its way to the sandbox, and at most {MAX_HISTORY_BYTES} are taken"
        raise BadRequest(f"{told}; send less at once", 413)
    ticket = service.admission.submit(
        Request(id="", code=""), patience_seconds, run=lambda: played.play(service.sessions.opener)
    )
    return await outcome_for(http_request, ticket)


async def notebook(request: HttpRequest) -> HttpResponse:
    """POST /v1/notebook: a `Notebook` in, `{"results": [Response, ...]}` out, one for each cell in their order."""
    service = service_of(request)
    asked = decode(await read_body(request), Notebook)
    played = Played(
        cells=asked.cells,
        limits=limits_of(asked.limits, service.settings),
        seed=seed_of(asked.seed),
        files=files_of(asked.files),
        fetch=asked.fetch,
    )
    told = await carried_out(request, played, asked.patience_seconds or service.settings.patience_seconds)
    if isinstance(told.outcome, ServiceOutcome):
        status = 503 if told.outcome is ServiceOutcome.OVERLOADED else 500
        return json_response(encode(replace(told, id=asked.id)), status, retry_headers(service, told.outcome))
    if len(played.responses) < len(asked.cells):
        raise BadRequest(f"the cells printed more than {MAX_OUTPUT_BYTES} bytes together; send fewer at once", 413)
    results = [replace(response, id=asked.id) for response in played.responses]
    return json_response(encode({"results": results}))


PATHS: list[Path] = [("POST", "/v1/notebook", notebook)]
