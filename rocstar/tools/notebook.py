"""The stateful Python tool: cells of one attempt's notebook. A session of `rocstar.sandbox` runs them.

The release imitates it by running all earlier cells again with their output muted (`jupyter_code`); here the notebook
is one live process, and its earlier cells are run again only when the service has lost it.
"""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rocstar.errors import SandboxUnavailable
from rocstar.sandbox.call import Limits, SandboxDown
from rocstar.tools.arguments import bad_call, text_arguments
from rocstar.tools.python import result_of, spec_of, with_last_line
from rocstar.types import ToolCall, ToolResult

if TYPE_CHECKING:
    from rocstar.sandbox.client import SandboxClient, Session

DESCRIPTION = (
    "Runs a cell of a Python notebook and returns what it printed and the value of its last expression. Names and "
    "files of earlier cells are there."
)
PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The cell."}},
    "required": ["code"],
}
ENDED = "the notebook was ended: names and files of earlier cells are gone\n"


class NotebookTool:
    """Implements `Tool` for one attempt, and only one: calls share their names and run in the order they are made.

    The session opens with the first call, whose seed is the notebook's; `close`, also as an async context manager, ends
    it. Until then it holds memory in the sandbox, so the creator must always close it."""

    def __init__(
        self, client: SandboxClient, limits: Limits, name: str = "jupyter_code", *, waits: bool = False
    ) -> None:
        """limits: of each cell. waits: for room in the sandbox (`Session`)."""
        self._client = client
        self._limits = limits
        self._session: Session | None = None
        self._closed = False
        self._waits = waits
        self.spec = spec_of(name, DESCRIPTION, PARAMETERS)

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        """Raises SandboxUnavailable when the sandbox failed, independent of the cell."""
        complaint = text_arguments(call, PARAMETERS)
        if complaint is not None:
            return bad_call(call, complaint)
        if self._closed:
            raise SandboxUnavailable("this notebook is closed; each attempt opens its own")
        if self._session is None:
            self._session = self._client.open_session(limits=self._limits, seed=seed, replay=True, waits=self._waits)
        try:
            response = await self._session.run(call.arguments["code"])
        except SandboxDown as error:
            raise SandboxUnavailable(str(error)) from error
        result = result_of(call, response)
        if not response.state_lost:
            return result
        return replace(result, stderr=with_last_line(result.stderr, ENDED))

    async def fork(self, count: int) -> list[NotebookTool]:
        """That many notebooks for other attempts, which begin with what this one has: see `Session.fork`. Before the
        first cell there is nothing to copy. Raises ForkRefused for state that can't be copied; else as `run`."""
        tools = [NotebookTool(self._client, self._limits, self.spec.name) for _ in range(count)]
        if self._session is not None:
            try:
                sessions = await self._session.fork(count)
            except SandboxDown as error:
                raise SandboxUnavailable(str(error)) from error
            for tool, session in zip(tools, sessions, strict=True):
                tool._session = session
        return tools

    async def close(self) -> None:
        """End the session. May be called twice."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
