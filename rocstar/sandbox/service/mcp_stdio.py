"""`rocstar sandbox mcp`: one MCP client on stdin and stdout, a sandbox of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.service.admission import Admission, Policy
from rocstar.sandbox.service.hop import Hop
from rocstar.sandbox.service.ledger import Ledger
from rocstar.sandbox.service.sessions import SessionTable
from rocstar.sandbox.service.settings import Settings

SLOTS = 2  # one model asks; now and then two calls at once


def serve_stdio(*, preload: Sequence[str], min_isolation: str) -> None:
    """Until stdin ends. Raises SandboxDown when the sandbox cannot be started."""
    with SandboxClient.start(slots=SLOTS, preload=preload, min_isolation=min_isolation) as client:
        # after the sandbox: it forks more cheaply while small
        from rocstar.sandbox.service.mcp_runner import runner_of
        from rocstar.sandbox.service.mcp_tool import server_of

        settings, row = Settings(slots=SLOTS, runnable=SLOTS), Ledger(1).row(0)
        policy = Policy(slots=SLOTS, runnable=SLOTS, young_seconds=settings.young_seconds, max_queue=settings.max_queue)
        admission = Admission(client, policy, row)
        table = SessionTable(client, admission, settings, row)
        asyncio.run(server_of(runner_of(settings, admission, table, Hop())).run_stdio_async())
