"""Many calls of one caller: a window of them waits in the queue at a time, so that a long batch does not hold up the
calls of others, and a caller that reads its results slowly slows down itself only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from functools import partial

from starlette.requests import Request as HttpRequest

from rocstar.sandbox.service.admission import Admission, Ticket
from rocstar.sandbox.service.http import Service, while_connected
from rocstar.sandbox.service.shapes import BadRequest, Call, request_of
from rocstar.sandbox.wire import ProgramOutcome, Request, Response

WINDOW_PER_SLOT = 4  # calls of a batch in the queue, running or unread: no slot idles while the next call is sent


Job = tuple[Request | Response, float]
"""A request with its patience in seconds; or the response it has already."""


def jobs_of(service: Service, calls: Iterable[Call]) -> Iterator[Job]:
    patience = service.settings.batch_patience_seconds
    for call in calls:
        yield request_or_rejected(call, service), call.patience_seconds or patience


async def run_jobs(
    service: Service, jobs: Iterable[Job], http_request: HttpRequest
) -> AsyncGenerator[tuple[int, Response], None]:
    """(index, response) of every job, as they finish. Ends early only when the caller disconnects."""
    flight = Flight(service.admission)
    async with while_connected(http_request, flight.cancel):
        async for index, response in flight.results(jobs):
            yield index, response


def request_or_rejected(call: Call, service: Service) -> Request | Response:
    """One bad call does not spoil its batch."""
    try:
        return request_of(call, service.settings)
    except BadRequest as error:
        return Response(id=call.id, outcome=ProgramOutcome.REJECTED, message=str(error))


class Flight:
    """The calls of one batch that are under way."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.window = WINDOW_PER_SLOT * admission.policy.slots
        self.tickets: dict[int, Ticket] = {}
        self.done: asyncio.Queue[tuple[int, Response]] = asyncio.Queue()
        self.cancelled = False

    async def results(self, jobs: Iterable[Job]) -> AsyncIterator[tuple[int, Response]]:
        arrived = time.monotonic()
        rest = enumerate(jobs)
        out = 0
        try:
            while True:
                while out < self.window and not self.cancelled and (job := next(rest, None)) is not None:
                    self.send(*job, arrived)
                    out += 1
                if out == 0:
                    return
                result = await self.done.get()
                out -= 1
                yield result
        finally:
            self.cancel()

    def send(self, index: int, job: Job, arrived: float) -> None:
        request, patience = job
        if isinstance(request, Response):
            self.done.put_nowait((index, request))
            return
        ticket = self.tickets[index] = self.admission.submit(request, patience, arrived)
        ticket.future.add_done_callback(partial(self.finished, index))

    def finished(self, index: int, future: asyncio.Future[Response]) -> None:
        del self.tickets[index]
        self.done.put_nowait((index, future.result()))

    def cancel(self) -> None:
        """No call is started any more, and those under way end as cancelled."""
        self.cancelled = True
        for ticket in list(self.tickets.values()):
            self.admission.cancel(ticket)
