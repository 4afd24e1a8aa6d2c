"""From one worker to another: a request about a session goes on to the worker that holds it, over a Unix socket in a
folder that only the service's own user may look into.

The other worker serves it like any request, token and all; hanging up here hangs up there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rocstar.sandbox.service.connection import Address, Answer, Closed, Connection, Lost
from rocstar.sandbox.service.listeners import path_of
from rocstar.sandbox.service.shapes import BadRequest

RETRY_SECONDS = 1
ID = re.compile("([0-9]{1,5})-[0-9a-f]{32}")  # as `SessionTable` makes them


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One worker's way to the others."""

    number: int = 0
    """Our own."""
    workers: int = 1
    """How many there are."""
    folder: str = ""
    """Where their sockets are."""
    token: str = ""
    """The service's."""

    def other(self, session: str) -> int | None:
        """The worker whose session this is; None when it is ours, or nobody's."""
        known = ID.fullmatch(session)  # nothing else may get into the head of a request
        number = int(known[1]) if known else self.number
        return number if number != self.number and number < self.workers else None

    async def ask(self, worker: int, method: str, path: str, body: bytes) -> Answer:
        """Raises BadRequest when that worker cannot be reached."""
        try:
            connection = await Connection.open_local(
                Address(host="localhost", port=80, token=self.token), path_of(self.folder, worker)
            )
        except OSError as error:
            raise unreachable(worker, error) from None
        try:
            return await connection.ask(method, path, body)
        except (Closed, Lost) as error:
            raise unreachable(worker, error) from None
        finally:
            connection.close()


def unreachable(worker: int, error: Exception) -> BadRequest:
    told = f"worker {worker}, which holds this session, cannot be reached ({error}); come again in {RETRY_SECONDS} s"
    return BadRequest(told, 503, RETRY_SECONDS)
