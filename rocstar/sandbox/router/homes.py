"""Sessions over a router: a session lives in the node that ran its last cell, and its cells follow it there.

Nothing hangs on it: a node that no longer knows a session says so, and one that died says nothing; either way the
cell comes again with the session's history (`rocstar.sandbox.session`) and any node may run it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from rocstar.sandbox.session import SessionLost
from rocstar.sandbox.wire import ProgramOutcome, Response

MAX_HOMES = 100_000  # sessions that nobody closed and nobody uses must not add up; the one used longest ago goes first

Send = Callable[[Mapping[str, Any], str], Coroutine[Any, Any, tuple[Response, str]]]
"""(message, the node it is for or "") -> its response and the node that gave it. Raises SessionLost."""


class Homes:
    """Carries a session's messages; the `Caller` of `Session`."""

    def __init__(
        self, send: Send, tell_node: Callable[[str, Mapping[str, Any]], None], is_there: Callable[[str], bool]
    ) -> None:
        self.send = send
        self.tell_node = tell_node
        self.is_there = is_there
        self.nodes: OrderedDict[str, str] = OrderedDict()
        """Session -> name of the node, the one used last at the end."""

    async def call(self, message: Mapping[str, Any]) -> Response:
        """Run a cell where its session lives, or anywhere when it brings its history or has none. Raises SessionLost,
        and SandboxDown when the router is closed."""
        session = message["session"]
        home = "" if "history" in message else self.nodes.get(session, "")
        if message["cells"] and "history" not in message and not self.is_there(home):
            raise SessionLost
        response, node = await self.send(message, home)
        if isinstance(response.outcome, ProgramOutcome):
            self.settle(session, node)
        return response

    def tell(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "close":
            home = self.nodes.pop(message["session"], "")
        else:
            home = self.nodes.get(message["session"], "")
            if home:
                self.settle(message["new"], home)
        if home:
            self.tell_node(home, message)

    def settle(self, session: str, node: str) -> None:
        before = self.nodes.pop(session, node)
        if before != node:
            self.tell_node(before, {"kind": "close", "session": session})
        self.nodes[session] = node
        if len(self.nodes) > MAX_HOMES:
            self.nodes.popitem(last=False)
