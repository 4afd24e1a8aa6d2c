"""`rocstar serve`: an agent behind an OpenAI-compatible address until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from rocstar.errors import ConfigError
from rocstar.parts.modelfolder import model_name
from rocstar.serving.app import Agent, app_of
from rocstar.serving.ready import ready
from rocstar.support.listen import ended_by_signals, is_loopback, listener, url_of

END_SECONDS = 1  # for answers under way, once the server is asked to end
TOKEN = "ROCSTAR_SERVE_TOKEN"


def serve(
    *,
    model: str,
    settings: Sequence[str],
    host: str,
    port: int,
    rows: int,
    context: int | None,
    runs: Path,
    say: Callable[[str], None],
) -> None:
    """Serve a model folder or a run until SIGINT or SIGTERM.

    rows: answers written at once; more wait. context: tokens of the longest conversation, None for what the model
    holds. Raises ConfigError, among others for an address that others reach while no token is set."""
    token = os.environ.get(TOKEN) or None
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{host} may be reached by others; set {TOKEN} to a secret that clients send as their API key"
        )
    agent = ready(model, settings, runs, context)
    name = agent.subject.run.name if agent.subject.run else model_name(agent.subject.model)
    positions = context or agent.holds
    place = listener(host, port)

    async def _serve() -> None:
        async with agent.opened(positions=positions, rows=rows) as roller:
            served = Agent(name=name, roller=roller, specs=agent.specs, positions=positions, token=token)
            config = uvicorn.Config(
                app_of(served),
                log_level="error",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=END_SECONDS,
            )
            server = uvicorn.Server(config)
            with ended_by_signals(server):
                say(f"{name} at {url_of(host, place.getsockname()[1])}/v1 (Ctrl-C ends)")
                await server.serve(sockets=[place])

    with place:
        asyncio.run(_serve())
