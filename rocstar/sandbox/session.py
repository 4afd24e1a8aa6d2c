"""A notebook in the sandbox, as its caller sees it: cells run one after another and share their names.

The history of committed cells is kept here. Between cells a session is a stopped process; where that is gone (evicted,
killed, its host dead), the history is run again in a new one, with the same seeds and its output thrown away."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from rocstar.sandbox import wire
from rocstar.sandbox.wire import Limits, Request, Response, SandboxDown


class SessionLost(Exception):
    """The host holds nothing of this session any more; its history has to come along."""


class Caller(Protocol):
    """What a session needs of `SandboxClient`."""

    async def call(self, message: Mapping[str, Any]) -> Response: ...

    def tell(self, message: Mapping[str, Any]) -> None: ...


class Session:
    """Made by `SandboxClient.open_session` and by `branch`. `history`: messages of the committed cells."""

    def __init__(self, client: Caller, limits: Limits, seed: int, history: Sequence[Mapping[str, Any]] = ()) -> None:
        self.client = client
        self.limits = limits
        self.seed = seed
        self.history = list(history)
        self.key = os.urandom(12).hex()
        self.turn = asyncio.Lock()
        self.closed = False

    async def run(
        self,
        code: str,
        *,
        commit: bool = True,
        files: Mapping[str, str | bytes] | None = None,
        fetch: Sequence[str] = (),
        wall_seconds: float | None = None,
    ) -> Response:
        """Run one cell; `Response.committed` tells whether later cells start from what it left. That is so when
        `commit` is true and the cell came to its end, be it by an exception: one that a limit ended, or that ended its
        process, leaves nothing. `files` are written before it, `fetch` read after it, relative to the working
        directory. `wall_seconds`: this cell's own limit, in place of the session's. Cancelling the awaiting task ends
        the cell.

        Raises SandboxDown."""
        limits = self.limits if wall_seconds is None else replace(self.limits, wall_seconds=wall_seconds)
        request = Request(id="cell", code=code, limits=limits, seed=self.seed, files=files or {})
        message = {**wire.request_message(request), "kind": "cell", "session": self.key, "commit": commit}
        message["fetch"] = list(fetch)
        async with self.turn:
            if self.closed:
                raise SandboxDown("this session is closed")
            try:
                response = await self.client.call({**message, "cells": len(self.history)})
            except SessionLost:
                response = await self.client.call({**message, "cells": len(self.history), "history": self.history})
            if response.committed:
                self.history.append(message)
        return response

    async def branch(self) -> Session:
        """Another session with the same past. Costs nothing before its first cell."""
        async with self.turn:
            twin = Session(self.client, self.limits, self.seed, self.history)
            self.client.tell({"kind": "branch", "session": self.key, "new": twin.key})
        return twin

    async def close(self) -> None:
        """End its processes and files. May be called twice."""
        if not self.closed:
            self.closed = True
            self.client.tell({"kind": "close", "session": self.key})

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
