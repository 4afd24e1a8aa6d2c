"""OpenAI-compatible chat completions over an agent. Its tool calls run here; a client gets the agent's text as
`content`, and its programs with their output as `reasoning_content` and, as data, under `rocstar`.

    GET  /v1/models
    POST /v1/chat/completions    `stream` true or false
    GET  /health

`rocstar serve` is `serve`: the application at an address until Ctrl-C.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rocstar.errors import ConfigError, DataError
from rocstar.evaluation.subject import find_agent, opened_agent
from rocstar.parts.modelfolder import model_name
from rocstar.protocols import ToolSpec
from rocstar.rollout.collect import Roller
from rocstar.rollout.environment import ToolEnvironment
from rocstar.serving.agent import Event, Ran, answered, environment_for, history_ids
from rocstar.serving.requests import ChatRequest, read_request
from rocstar.serving.spec import ServeSpec
from rocstar.support.listen import (
    body_of,
    completion_of,
    ended_by_signals,
    event_of,
    is_loopback,
    key_in,
    listener,
    models_of,
    quiet_server,
    refusal,
    unknown_path,
    url_of,
    while_wanted,
)
from rocstar.types import Stop, Trajectory

BODY_BYTES = 8 << 20
END_SECONDS = 1  # for answers under way, once the server is asked to end
TOKEN = "ROCSTAR_SERVE_TOKEN"
FINISH = {Stop.ANSWERED: "stop"}  # every other end is OpenAI's `length`


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """What is served."""

    name: str
    """The model's name for clients."""
    roller: Roller
    specs: Sequence[ToolSpec]
    """The agent's tools, as shown to it."""
    positions: int
    """Tokens of the longest conversation, its answer included."""
    token: str | None
    """The token that clients must send; None: no token."""


def serve(spec: ServeSpec, say: Callable[[str], None]) -> None:
    """Serve a model folder or a run until SIGINT or SIGTERM. Raises ConfigError, also for a public address without a
    token."""
    token = os.environ.get(TOKEN) or None
    if token is None and not is_loopback(spec.host):
        raise ConfigError(
            f"{spec.host} may be reached by others; set {TOKEN} to a secret that clients send as their API key"
        )
    subject = find_agent(spec.model, spec.runs, spec.settings or (), spec.context)
    name = subject.run.name if subject.run else model_name(subject.model)
    positions = spec.context or subject.holds
    place = listener(spec.host, spec.port)

    async def run() -> None:
        async with opened_agent(subject, positions=positions, rows=spec.rows) as roller:
            agent = Agent(name=name, roller=roller, specs=subject.specs, positions=positions, token=token)
            server = quiet_server(app_of(agent), lifespan="off", timeout_graceful_shutdown=END_SECONDS)
            with ended_by_signals(server):
                say(f"{name} at {url_of(spec.host, place.getsockname()[1])}/v1 (Ctrl-C ends)")
                await server.serve(sockets=[place])
                await asyncio.gather(*server.server_state.tasks, return_exceptions=True)  # cancelled; see them out

    with place:
        asyncio.run(run())


def app_of(agent: Agent) -> Starlette:
    """The server's application."""

    async def models(request: Request) -> Response:
        return _refusal(agent, request) or models_of(agent.name)

    async def complete(request: Request) -> Response:
        return _refusal(agent, request) or await _complete(agent, request)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/health", health),
        ],
        exception_handlers={404: unknown_path},
    )


async def _complete(agent: Agent, request: Request) -> Response:
    try:
        asked = read_request(await body_of(request, BODY_BYTES), seed=secrets.randbits(62))
        opened = await asyncio.to_thread(_opened, agent, asked)  # a long text takes its time
        roller = _within(agent, asked, len(opened))
    except (ConfigError, DataError) as error:  # ConfigError: the model's template can't write such a conversation
        return refusal(400, str(error), "invalid_request_error")
    except ClientDisconnect:
        return Response()  # to nobody: the client has gone amid its request
    events = answered(roller, asked.question, opened, asked.sampling)
    if asked.stream:
        return StreamingResponse(_streamed(agent, asked, opened, events), media_type="text/event-stream")
    try:
        return await while_wanted(request, _whole(agent, opened, events))
    except ClientDisconnect:
        return refusal(499, "the client is gone", "client_closed_request")


def _opened(agent: Agent, asked: ChatRequest) -> tuple[int, ...]:
    """The conversation as tokens. A custom environment of the recipe renders its question itself."""
    roller, messages = agent.roller, asked.messages.messages
    if roller.environment is ToolEnvironment:
        return history_ids(asked.messages, roller, agent.specs, agent.positions)
    if len(messages) > 1:
        raise DataError("this agent has an environment of its own, which takes one question and no system message")
    return environment_for(roller, asked.question, asked.sampling.seed).opening()


def _within(agent: Agent, asked: ChatRequest, prompt: int) -> Roller:
    """The roller with a limit that the conversation leaves room for. Raises DataError where it leaves too little."""
    room = agent.positions - prompt
    if room < (asked.max_tokens or 1):
        more = f"{asked.max_tokens} more were asked for" if asked.max_tokens else "the answer needs some more"
        raise DataError(
            f"the conversation has {prompt} tokens and {more}, which is more than the context length of "
            f"{agent.positions}; shorten it" + (", or lower max_tokens" if asked.max_tokens else "")
        )
    limits = replace(agent.roller.limits, max_response_tokens=asked.max_tokens or room)
    return replace(agent.roller, limits=limits)


async def _whole(agent: Agent, opened: Sequence[int], events: AsyncIterator[Event]) -> Response:
    content, thoughts, ran, trajectory = "", "", [], None
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, str):
                content += event
            elif isinstance(event, Ran):
                thoughts += event.shown()
                ran.append(event.as_data())
            else:
                trajectory = event
    assert trajectory is not None
    if trajectory.fault is not None:
        return refusal(503, trajectory.fault, "server_error")
    message = {"role": "assistant", "content": content, "reasoning_content": thoughts or None}
    choice = {"index": 0, "message": message, "finish_reason": _finish(trajectory)}
    head = completion_of(agent.name, "chat.completion")
    reported = {"rocstar": {"calls": ran, "response_tokens": trajectory.num_response_tokens}}
    return JSONResponse({**head, "choices": [choice], "usage": _usage(opened, trajectory), **reported})


async def _streamed(
    agent: Agent, asked: ChatRequest, opened: Sequence[int], events: AsyncIterator[Event]
) -> AsyncIterator[str]:
    head = completion_of(agent.name, "chat.completion.chunk")

    def piece(delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return event_of({**head, "choices": [choice], **more})

    yield piece({"role": "assistant", "content": ""})
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, str):
                yield piece({"content": event})
            elif isinstance(event, Ran):
                yield piece({"reasoning_content": event.shown()}, rocstar={"call": event.as_data()})
            elif event.fault is not None:
                yield event_of({"error": {"message": event.fault, "type": "server_error", "code": 503}})
            else:
                yield piece({}, _finish(event))
                if asked.include_usage:
                    yield event_of({**head, "choices": [], "usage": _usage(opened, event)})
    yield "data: [DONE]\n\n"


def _finish(trajectory: Trajectory) -> str:
    return FINISH.get(trajectory.stop, "length")


def _usage(opened: Sequence[int], trajectory: Trajectory) -> dict[str, int]:
    written = trajectory.num_sampled_tokens
    read = len(opened) + sum(len(turn.reply_ids) for turn in trajectory.turns)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _refusal(agent: Agent, request: Request) -> Response | None:
    """Refuse a request without the token, or by a page of another site, which browsers allow on loopback."""
    if agent.token is not None and not hmac.compare_digest(key_in(request).encode(), agent.token.encode()):
        return refusal(401, "this server needs its token: send it as the API key", "authentication_error")
    if request.headers.get("origin"):
        return refusal(403, "web pages may not ask this server", "permission_error")
    return None
