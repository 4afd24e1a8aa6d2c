"""Tools of an MCP server (modelcontextprotocol.io), by the official client, which needs the extra `mcp`.

`mcp:COMMAND` starts a program that speaks MCP on stdin and stdout, `mcp:URL` connects to one over streamable HTTP. Each
attempt has a server (over HTTP a session) of its own, from its first call to its end; `mcp-shared:` means one for all.

A tool's answer is data, its own errors included. A server that is gone, does not start, breaks the protocol or lists
other tools than before is an outage: it is restarted, the attempt's earlier calls are repeated, and then the call. So a
call may be made twice.

*Nothing* is limited: the server is the user's own program, with our rights and environment and outside the sandbox; it
gets the model's text as JSON only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any

import httpx2
import mcp
from jsonschema.validators import validator_for
from mcp.client._transport import TransportStreams
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import INVALID_PARAMS, jsonrpc_message_adapter

from rocstar.errors import Unavailable, first_line
from rocstar.protocols import Tool, ToolSpec
from rocstar.sandbox.call import Limits
from rocstar.support import tree
from rocstar.support.plugins import time_limit
from rocstar.support.processes import process_group, words_of
from rocstar.tools.arguments import bad_call, ran_here, schema_arguments
from rocstar.types import Status, ToolCall, ToolResult

SHARED = "mcp-shared"
START_SECONDS = 60.0  # until a server has listed its tools; npx and uvx first fetch it
PROBE_SECONDS = 2.0  # for the list of a server that runs
ENDED = "the server was ended: the state of earlier calls is lost\n"
END_SECONDS = 2.0  # for a server to end by itself once its input is closed
CLOSE_SECONDS = 5 * END_SECONDS  # for the whole shutdown; one at a URL may never answer the end of its session
MAX_LINE = 64 * 2**20  # bytes of one message
MOST_TOOLS = 1000
Specs = tuple[ToolSpec, ...]
NO_ANSWER = "it wrote a line that is not a JSON-RPC message, or that answers no request"


def mcp_tools(name: str, limits: Limits) -> Callable[[], Sequence[Tool]]:
    """Makes the tools of the server `name`; with `mcp:` new ones for each attempt, which have `close`.

    limits: `wall_seconds` and `output_bytes` of each call. Raises ConfigError, Unavailable if the server can't list its
    tools."""
    specs = listed(name)
    starts = asyncio.Semaphore(os.cpu_count() or 1)  # else many at once would slow each other past START_SECONDS
    first = _Server(name, limits, starts, specs)

    def tools() -> Sequence[Tool]:
        server = first if first.is_shared else _Server(name, limits, starts, specs)
        return [McpTool(server, spec) for spec in specs]

    return tools


@cache
def listed(name: str) -> Specs:
    """A server's tools. It is started for this once per process. Raises as `mcp_tools`."""
    for package in ("mcp", "client"):  # silence its logs of errors that are raised and reported here
        logging.getLogger(package).setLevel(logging.CRITICAL)
    server = _Server(name, Limits(), asyncio.Semaphore(), None)

    async def list_tools() -> Specs:
        async with aclosing(server), server.connected() as connection:
            return await connection.specs()

    with ThreadPoolExecutor(1) as thread:  # the caller may be on an event loop
        return thread.submit(asyncio.run, list_tools()).result()


class McpTool:
    """Implements `Tool`; `AttemptTool` if the server is the attempt's own, which `close` ends with all its tools."""

    def __init__(self, server: _Server, spec: ToolSpec) -> None:
        self.spec, self._server = spec, server
        if not server.is_shared:
            self.close = server.aclose

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        arguments = call.parse_error or schema_arguments(call.arguments, self.spec.parameters)
        if isinstance(arguments, str):
            return bad_call(call, arguments)
        checked, requested = replace(call, tool=self.spec.name, arguments=arguments), time.monotonic()
        try:
            return await self._server.run(checked, requested)
        except Unavailable:
            return await self._server.run(checked, requested)  # on a restarted server


class _Server:
    def __init__(self, name: str, limits: Limits, starts: asyncio.Semaphore, specs: Specs | None) -> None:
        """specs: the tools it must list; None: any. Raises ConfigError."""
        kind, _, place = name.partition(":")
        self.said, place = f"sandbox.tools = {name!r}", place.strip()
        self.url = place if place.startswith(("http://", "https://")) else None
        remedy = "write mcp:COMMAND ARGUMENTS or mcp:URL"
        self.command = () if self.url else words_of(place, said=self.said, remedy=remedy)
        self.limits, self.starts, self.specs, self.is_shared = limits, starts, specs, kind == SHARED
        self.made: list[ToolCall] = []  # calls of the attempt, to repeat on a restarted server
        self._connections: list[_Connection] = []  # the last one is in use, those before it are ending
        self._is_closed = False

    async def run(self, call: ToolCall, requested: float) -> ToolResult:
        """requested: when. Raises Unavailable for an outage; the next call restarts the server."""
        async with self.connected() as connection:
            began = time.monotonic()
            status, text = await connection.answer(call)
            ended = time.monotonic()
            self.made += [] if self.is_shared else [call]
            if status is not Status.OK and not await connection.is_well():
                if self.is_shared:  # perhaps it hangs in another attempt's call
                    raise Unavailable(f"{self.said} no longer answers")
                connection.retired = True
                if status is Status.TIMEOUT:
                    self.made, text = [], ENDED
        most = self.limits.output_bytes
        return ran_here(call, status, text, asked=requested, began=began, ended=ended, most=most)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[_Connection]:
        """A started connection. Raises Unavailable; an outage within the context retires it."""
        if self._is_closed:
            raise Unavailable(f"{self.said} is closed; each attempt has one of its own")
        if not self._connections or self._connections[-1].retired:
            self._connections = [*(one for one in self._connections if not one.task.done()), _Connection(self)]
        connection = self._connections[-1]
        connection.users += 1
        try:
            await connection.begun.wait()
            if connection.failed:
                raise connection.failed
            yield connection
        except Unavailable:
            connection.retired = True
            raise
        finally:
            connection.users -= 1
            if connection.retired and not connection.users:
                connection.task.cancel()

    async def aclose(self) -> None:
        self._is_closed = True
        for connection in self._connections:
            connection.task.cancel()
            await asyncio.wait([connection.task], timeout=CLOSE_SECONDS)


class _Connection(AbstractAsyncContextManager["_Connection", None]):
    """A started server and its client, whose two streams it is if the server is a program. Its own task holds them,
    because the package's contexts must be exited in the task that entered them. If it is never retired, the end of the
    event loop ends it."""

    def __init__(self, server: _Server) -> None:
        self.retired = False  # then it ends with its last user
        self.begun = asyncio.Event()
        self.failed: Unavailable | None = Unavailable(f"{server.said} was closed before it had started")
        self._server, self._errors, self._unanswered = server, b"", set[str | None]()
        self.users = self._garbled = 0
        self.task = asyncio.create_task(self._live(tuple(server.made)))

    async def answer(self, call: ToolCall) -> tuple[Status, str]:
        """Raises Unavailable."""
        garbled = self._garbled
        try:
            async with time_limit(self._server.limits.wall_seconds) as limit:
                answer = await self._client.call_tool(call.tool, dict(call.arguments))
        except Exception as error:  # the package may raise anything for an answer
            if isinstance(error, mcp.MCPError) and error.code == INVALID_PARAMS:
                return Status.BAD_CALL, error.message
            if not (isinstance(error, TimeoutError) and limit.expired()):
                raise self._outage(error) from error
            if self._garbled > garbled:
                raise self._outage(ValueError(NO_ANSWER)) from error
            return Status.TIMEOUT, ""
        return Status.CODE_ERROR if answer.is_error else Status.OK, _text(answer)

    async def is_well(self) -> bool:
        """Whether it still answers. Raises Unavailable if its tools have changed, perhaps the one that failed."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                return bool(await self.specs())
        except Unavailable:
            raise
        except Exception:  # as above
            return False

    async def specs(self) -> Specs:
        """Its list of tools. Raises Unavailable if the list changed, and the package's own errors."""
        page = await self._client.list_tools()
        tools = [*page.tools]
        while page.next_cursor is not None:
            page = await self._client.list_tools(cursor=page.next_cursor)
            tools += page.tools
            if len(tools) > MOST_TOOLS:
                raise ValueError(f"it lists more than {MOST_TOOLS} tools")
        if not tools:
            raise ValueError("it lists no tool")
        specs = tuple(map(_spec, tools))
        if self._server.specs is None:  # once, for it takes 0.5 ms for each argument
            for spec in specs:
                validator_for(spec.parameters).check_schema(spec.parameters, format_checker=None)
        elif self._server.specs != specs:
            raise self._outage(ValueError("it lists other tools than at first; start a new run"))
        return specs

    async def _live(self, calls_made: Sequence[ToolCall]) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with self._server.starts, asyncio.timeout(START_SECONDS) as limit:
                    transport = self._started()
                    if url := self._server.url:
                        limits = httpx2.Timeout(30.0, read=300.0)  # as the package's own
                        http = await stack.enter_async_context(_Http(timeout=limits))
                        transport = streamable_http_client(url, http_client=http, max_sse_event_size=MAX_LINE)
                    self._client = await stack.enter_async_context(Client(transport, cache=None))
                    await self.specs()
                for call in calls_made:
                    await self.answer(call)
                self.failed = None
                self.begun.set()
                await asyncio.Event().wait()
        except Exception as error:  # as above; an error at its end concerns no call
            why = f"; {NO_ANSWER}" if self._garbled else ""
            late = TimeoutError(f"it did not list its tools within {START_SECONDS:g} s{why}")
            self.failed = self._outage(late if limit.expired() else error)
        finally:
            self.retired = True
            self.begun.set()

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[TransportStreams]:
        """A server on stdin and stdout, which the package's own transport may leave behind when the event loop ends."""
        pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "limit": MAX_LINE}
        words = tree.command(*self._server.command)  # its children would keep the pipes open
        async with process_group(*words, ends=signal.SIGTERM, **pipes) as process:
            assert process.stdin and process.stdout and process.stderr
            self._stdin, self._stdout = process.stdin, process.stdout
            reading = asyncio.create_task(self._read_errors(process.stderr))
            try:
                yield self, self
            finally:
                process.stdin.close()
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), END_SECONDS)
                reading.cancel()

    async def _read_errors(self, stderr: asyncio.StreamReader) -> None:
        while some := await stderr.read(4096):
            self._errors = (self._errors + some)[-4096:]

    async def send(self, sent: SessionMessage) -> None:
        if hasattr(sent.message, "method"):
            self._unanswered.add(str(getattr(sent.message, "id", "")))
        self._stdin.write(sent.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
        await self._stdin.drain()

    async def receive(self) -> SessionMessage:
        try:
            while line := await self._stdout.readline():
                message, answered = _message(line)
                if message is None or answered not in (None, *self._unanswered):
                    self._garbled += 1
                elif hasattr(message, "id"):  # nothing here reads notifications; the client takes 0.2 ms for each
                    self._unanswered.discard(answered)
                    return SessionMessage(message)
        except ValueError:  # of `readline`
            self._errors += f"\na line above {MAX_LINE >> 20} MiB".encode()
        raise StopAsyncIteration

    __anext__ = receive

    def __aiter__(self) -> _Connection:
        return self

    async def aclose(self) -> None: ...

    async def __aexit__(self, *error: object) -> None: ...

    def _outage(self, error: BaseException) -> Unavailable:
        while isinstance(error, BaseExceptionGroup):  # of the client's tasks
            error = error.exceptions[0]
        if isinstance(error, Unavailable):
            return error
        last = self._errors.decode(errors="replace").strip().rpartition("\n")[2][:200]
        wrote = f"; it last wrote: {last}" if last else ""
        return Unavailable(f"{self._server.said} can't be asked: {first_line(error)}{wrote}")


class _Http(httpx2.AsyncClient):
    """Bounds answers in JSON. One that answers no request becomes an error: the package would go on waiting."""

    async def send(self, request: httpx2.Request, **how: Any) -> httpx2.Response:
        answer = await super().send(request, **how)
        if request.method != "POST" or not answer.headers.get("content-type", "").startswith("application/json"):
            return answer
        body, headers, asked = bytearray(), answer.headers.copy(), json.loads(await request.aread()).get("id")
        async with aclosing(answer):
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > MAX_LINE:
                    break
        headers.pop("content-encoding", None)
        if answer.is_success and asked is not None and str(asked) != _message(body)[1]:
            error = {"code": mcp.types.INTERNAL_ERROR, "message": NO_ANSWER}
            body[:] = json.dumps({"jsonrpc": "2.0", "id": asked, "error": error}).encode()
        whole = httpx2.Response(answer.status_code, headers=headers, content=bytes(body), request=request)
        whole.next_request = answer.next_request
        return whole


def _message(line: bytes | bytearray) -> tuple[Any, str | None]:
    """(a JSON-RPC message, None if it is none; the id of the request that it answers, if it does)."""
    with suppress(ValueError):
        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        return message, None if hasattr(message, "method") else str(message.id)
    return None, None


def _spec(tool: mcp.Tool) -> ToolSpec:
    schema = {"type": "object", "properties": {}, "required": [], **tool.input_schema}
    return ToolSpec(name=tool.name, description=tool.description or tool.title or tool.name, parameters=schema)


def _text(answer: mcp.types.CallToolResult) -> str:
    """All parts, one below the other; structured content too, unless a text repeats it, or repeats the value that the
    official server wraps as `result` because it is not an object."""
    text, structured = "\n".join(map(_part, answer.content)), answer.structured_content
    values = [structured, *(structured.values() if structured and list(structured) == ["result"] else ())]
    with suppress(ValueError, RecursionError):  # for a text that is not JSON, or nested a thousand times
        if structured is None or text in values or json.loads(text) in values:
            return text
    return "\n".join(filter(None, (text, json.dumps(structured, ensure_ascii=False))))


def _part(part: Any) -> str:
    """A text; of anything else the kind and the size: `[image, 12 kB]`."""
    resource = getattr(part, "resource", part)
    if hasattr(resource, "text"):
        return str(resource.text)
    data = getattr(resource, "data", getattr(resource, "blob", None))
    return f"[{part.type}, {resource.uri if data is None else f'{max(1, round(len(data) * 3 / 4000))} kB'}]"
