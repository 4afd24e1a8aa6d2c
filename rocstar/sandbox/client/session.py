"""The caller's side of a notebook in the sandbox: cells run one after another and share their names and files.

A session is one live process at one daemon. When a cell itself ends that process (`Response.state_lost`), the next cell
starts with empty state, with `replay` or without. When the *service* loses it (SessionLost), a session opened with
`replay` runs its earlier cells again, with the same seed and their output discarded, before the current cell.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from rocstar.sandbox.call import (
    MAX_BRANCHES,
    Call,
    ForkRefused,
    Limits,
    ProgramOutcome,
    Response,
    SandboxDown,
    ServiceOutcome,
    SessionLost,
)

if TYPE_CHECKING:
    from rocstar.sandbox.client import SandboxClient

DEFAULT_PATIENCE = Call(id="", code="").patience_seconds
NOT_RUN = (ProgramOutcome.REJECTED, *ServiceOutcome)


class Session:
    """Created by `SandboxClient.open_session`; usable as an async context manager."""

    def __init__(
        self, client: SandboxClient, limits: Limits, seed: int | None, *, replay: bool = False, waits: bool = False
    ) -> None:
        """limits: of each cell. seed: of the whole session; None draws one. waits: its first cell waits until the
        daemons have room, instead of ending an idle session; whoever opens such sessions closes each of them."""
        self.name = os.urandom(16).hex()
        self.closed = False
        self.cells = 0
        """Cells whose state the daemon holds, as far as is known."""
        self._client = client
        self._limits = limits
        self._seed = int.from_bytes(os.urandom(4)) if seed is None else seed
        self.replay = replay
        self._waits = waits
        self._room: asyncio.Semaphore | None = None
        self._history: list[Call] = []
        """Cells since the state was last empty, for replay."""
        self._turn = asyncio.Lock()

    async def run(
        self,
        code: str,
        *,
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        wall_seconds: float | None = None,
        patience_seconds: float | None = None,
    ) -> Response:
        """Run one cell; concurrent calls run in their order. The effects of a failed cell stay. `files` are written
        before it, `fetch` is read after it, relative to the working directory. wall_seconds: this cell's own limit;
        patience_seconds: see Call. Cancelling the awaiting task ends the cell.

        Raises SandboxDown when the session is closed or no daemon is available, and SessionLost when the service lost
        the session and it is not replayed; the next cell then starts with empty state."""
        limits = self._limits if wall_seconds is None else replace(self._limits, wall_seconds=wall_seconds)
        call = Call(
            id=f"{self.name}-{len(self._history) + 1}",
            code=code,
            limits=limits,
            seed=self._seed,
            files=dict(files or {}),
            fetch=tuple(fetch),
            session=self.name,
            patience_seconds=DEFAULT_PATIENCE if patience_seconds is None else patience_seconds,
        )
        async with self._turn:
            if self._waits and not self.closed and self._room is None:
                room = self._client.session_room()
                await room.acquire()
                self._room = room
                if self.closed:  # meanwhile
                    room.release()
            try:
                return await self._run(call)
            except SessionLost:
                if not self.replay:
                    raise
                return await self._run(call)

    async def fork(self, count: int) -> list[Session]:
        """Make `count` further notebooks with the names, memory and files that this one has now; each is a separate
        session, with another seed, and is not replayed. Concurrent cells and forks run in their order.

        Raises ForkRefused if this one cannot be copied in its present state; else as `run`."""
        if type(count) is not int or not 1 <= count <= MAX_BRANCHES:
            raise ForkRefused(f"a session is forked into 1 to {MAX_BRANCHES} branches at once, got {count!r}")
        branches = [Session(self._client, self._limits, self._seed) for _ in range(count)]
        async with self._turn:
            cells = self.cells
            call = Call(id=f"{self.name}-fork", code="", limits=self._limits, seed=self._seed, session=self.name)
            try:
                response = await self._run_one(call, tuple(branch.name for branch in branches))
                if response.outcome is not ProgramOutcome.OK:
                    kind = SandboxDown if isinstance(response.outcome, ServiceOutcome) else ForkRefused
                    raise kind(response.message or f"the session was not forked ({response.outcome})")
            except BaseException:
                for branch in branches:
                    await branch.close()
                raise
            for branch in branches:
                branch.cells = cells
        return branches

    async def close(self) -> None:
        """End the session's process and delete its files. May be called twice."""
        if not self.closed:
            self.closed = True
            self._client.close_session(self.name)
            if self._room is not None:
                self._room.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _run(self, call: Call) -> Response:
        """Run the cell, after running the earlier ones again if the daemon has lost them."""
        replayed = self._history[self.cells :]
        for earlier in replayed:
            again = await self._run_one(earlier)
            if again.outcome in NOT_RUN or again.state_lost:
                why = again.message or again.outcome  # such as that the session was closed meanwhile
                raise SandboxDown(f"the session was lost, and a cell of it could not be run again ({why})")
        response = await self._run_one(call)
        if response.outcome not in NOT_RUN and not response.state_lost and self.replay:
            self._history.append(call)
        return replace(response, replayed_cells=len(replayed)) if replayed else response

    async def _run_one(self, call: Call, branches: tuple[str, ...] = ()) -> Response:
        if self.closed:
            raise SandboxDown("this session is closed; open another")
        try:
            response = await self._client.run(replace(call, cell=self.cells + 1, branches=branches))
        except SessionLost:
            self.cells = 0
            raise
        if response.state_lost:
            self.cells = 0
            self._history.clear()
        elif response.outcome not in NOT_RUN and not branches:
            self.cells += 1
        return response
