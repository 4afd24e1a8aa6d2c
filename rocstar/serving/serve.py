"""`rocstar serve`: an agent behind an OpenAI-compatible address until Ctrl-C."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from rocstar.errors import ConfigError
from rocstar.evaluation.subject import conversation_of, find_subject, loaded, opened, settings_in_force
from rocstar.learning.threads import use_threads
from rocstar.machines import started_sandbox
from rocstar.modelfolder import model_facts
from rocstar.parts import specs_of
from rocstar.serving.app import Agent, app_of

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
    if token is None and not _is_loopback(host):
        raise ConfigError(
            f"{host} may be reached by others; set {TOKEN} to a secret that clients send as their API key"
        )
    subject = find_subject(model, runs)
    recipe = settings_in_force(subject.recipe, settings, {})
    holds = model_facts(subject.model).positions
    if context is not None and context > holds:
        raise ConfigError(f"--context {context} is more than the {holds} tokens that the model holds; lower it")
    conversation_of(subject, recipe)  # a folder that will not do is told before anything is loaded
    listener = _listener(host, port)

    async def _serve() -> None:
        use_threads(recipe.run.threads)
        weights = loaded(subject, recipe)
        positions = context or holds
        with started_sandbox(recipe.sandbox) as sandbox:
            async with opened(weights, subject, recipe, sandbox, positions=positions, rows=rows) as roller:
                name = subject.run.name if subject.run else subject.model.name
                specs = specs_of(recipe) if recipe.rollout.max_turns > 1 else ()
                agent = Agent(name=name, roller=roller, specs=specs, positions=positions, token=token)
                config = uvicorn.Config(
                    app_of(agent),
                    log_level="error",
                    access_log=False,
                    lifespan="off",
                    timeout_graceful_shutdown=END_SECONDS,
                )
                shown = f"[{host}]" if ":" in host else host
                say(f"{name} at http://{shown}:{listener.getsockname()[1]}/v1 (Ctrl-C ends)")
                await uvicorn.Server(config).serve(sockets=[listener])

    with listener:
        asyncio.run(_serve())


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen at {host} port {port} ({error.strerror}); give another --port") from None
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
