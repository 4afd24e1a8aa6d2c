"""How a program is given to each kind of service, and what it says of it in words that all have.

here                    a sandbox of this process
python                  a fresh `python -c` for each program, without any walls
URL                     a service of ours: POST /v1/run
code-judge:URL          POST /run
sandbox-fusion:URL      POST /run_code
mcp:COMMAND             an MCP server on stdin and stdout: its first tool that takes code
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shlex
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, NamedTuple

from rocstar.adapters.sandbox_bench.programs import KnownProgram
from rocstar.errors import ConfigError, Unavailable

CODE_NAMES = ("code", "python_code", "source", "program", "script")
"""Of the argument of an MCP tool that is a program."""
INPUT_NAMES = ("input", "stdin")
MAX_OUTPUT = 2**26  # bytes that are read of what a bare interpreter printed
NOT_SERVED = (401, 403, 404, 405)  # HTTP: without or with another token, path or method
SERVICE_SECONDS = 120.0  # a service that takes longer for an answer has failed


class End(NamedTuple):
    """What a service says of a program."""

    ends: str
    """ok, failed, timeout; or refused, where the service could not run it."""
    stdout: str = ""


Runs = Callable[[KnownProgram], Awaitable[End]]


@asynccontextmanager
async def opened(system: str, token: str, slots: int) -> AsyncIterator[Runs]:
    """slots: programs at once, of those that start here. Raises ConfigError, SandboxDown, Unavailable."""
    kind, _, rest = system.partition(":")
    if system == "here" or kind in ("http", "https"):
        opens = _ours(None if system == "here" else system, token, slots)
    elif system == "python":
        opens = _python(slots)
    elif kind in DIALECTS and rest:
        opens = _http(rest.rstrip("/").removesuffix(DIALECTS[kind][0]), token, *DIALECTS[kind])
    elif kind == "mcp" and rest:
        opens = _mcp(rest)
    else:
        raise ConfigError(
            f"{system!r} is no service that can be asked; give here, python, http://HOST:PORT, "
            "code-judge:URL, sandbox-fusion:URL or mcp:COMMAND"
        )
    async with opens as runs:
        yield runs


@asynccontextmanager
async def _ours(url: str | None, token: str, slots: int) -> AsyncIterator[Runs]:
    from rocstar.sandbox.call import Call, Isolation, Limits, ProgramOutcome, ServiceOutcome
    from rocstar.sandbox.client import SandboxClient

    number = itertools.count()
    ends = dict.fromkeys((ProgramOutcome.WALL_TIMEOUT, ProgramOutcome.CPU_TIMEOUT), "timeout")

    async def runs(program: KnownProgram) -> End:
        limits = Limits(wall_seconds=program.seconds, cpu_seconds=4 * program.seconds)  # its wall limit is what ends it
        call = Call(id=f"bench-{next(number)}", code=program.code, stdin=program.stdin, limits=limits)
        response = await client.run(call)
        if isinstance(response.outcome, ServiceOutcome):
            return End("refused")
        return End(ends.get(response.outcome, "ok" if response.outcome == "ok" else "failed"), response.stdout)

    least = Isolation.L1  # what each system holds is what is measured
    if url is None:
        opens = SandboxClient.start(slots=slots, preload=(), min_isolation=least)
    else:
        opens = SandboxClient.connect([url], token=token, min_isolation=least)
    with opens as client:
        yield runs


@asynccontextmanager
async def _python(slots: int) -> AsyncIterator[Runs]:
    free = asyncio.Semaphore(slots)

    async def runs(program: KnownProgram) -> End:
        async with free:
            # pipes would be held open by what it leaves behind
            with TemporaryFile() as given, TemporaryFile() as out, TemporaryDirectory() as folder:
                given.write(program.stdin.encode())
                given.seek(0)
                command, nowhere = (sys.executable, "-c", program.code), asyncio.subprocess.DEVNULL
                child = await asyncio.create_subprocess_exec(
                    *command, stdin=given, stdout=out, stderr=nowhere, cwd=folder, start_new_session=True
                )
                try:
                    async with asyncio.timeout(program.seconds):
                        await child.wait()
                except TimeoutError:
                    return End("timeout")
                finally:
                    if child.returncode is None:  # it was not waited for
                        os.killpg(child.pid, signal.SIGKILL)
                        await child.wait()
                out.seek(0)
                return End("failed" if child.returncode else "ok", out.read(MAX_OUTPUT).decode(errors="replace"))

    yield runs


def _reported_by_code_judge(said: Mapping[str, Any]) -> End:
    if said.get("reason") in ("queue_timeout", "internal_error"):
        return End("refused")
    late = said.get("reason") == "worker_timeout"
    return End("timeout" if late else "ok" if said["run_success"] else "failed", said.get("stdout") or "")


def _reported_by_fusion(said: Mapping[str, Any]) -> End:
    ran = said.get("run_result")
    if ran is None:
        return End("refused")
    late = ran["status"] == "TimeLimitExceeded"
    return End("timeout" if late else "failed" if ran["return_code"] else "ok", ran.get("stdout") or "")


DIALECTS: Mapping[str, tuple[str, Callable[[KnownProgram], Mapping[str, Any]], Callable[[Mapping[str, Any]], End]]] = {
    "code-judge": (
        "/run",
        lambda program: {"type": "python", "solution": program.code, "input": program.stdin},
        _reported_by_code_judge,
    ),
    "sandbox-fusion": (
        "/run_code",
        lambda program: {
            "code": program.code,
            "language": "python",
            "stdin": program.stdin,
            "run_timeout": program.seconds,
        },
        _reported_by_fusion,
    ),
}
"""By name: path, request, and what an answer says."""


@asynccontextmanager
async def _http(
    url: str,
    token: str,
    path: str,
    asks: Callable[[KnownProgram], Mapping[str, Any]],
    parse: Callable[[Mapping[str, Any]], End],
) -> AsyncIterator[Runs]:
    import httpx

    async def runs(program: KnownProgram) -> End:
        try:
            answer = await client.post(path, json=asks(program))
            if answer.status_code in NOT_SERVED:
                raise Unavailable(f"{url}{path} can't be asked: its answer is HTTP {answer.status_code}")
            return parse(answer.json()) if answer.status_code == 200 else End("refused")
        except (httpx.ReadTimeout, httpx.RemoteProtocolError, KeyError, TypeError, ValueError):
            return End("refused")
        except httpx.HTTPError as error:
            raise Unavailable(f"{url}{path} can't be asked: {error}") from error

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=SERVICE_SECONDS, limits=unlimited) as client:
        yield runs


@asynccontextmanager
async def _mcp(command: str) -> AsyncIterator[Runs]:
    """What a program printed is the tool's text, or `stdout` where it is JSON; no server tells a timeout apart."""
    from mcp import ClientSession, MCPError
    from mcp.client.stdio import StdioServerParameters, stdio_client

    file, *arguments = shlex.split(command)
    if shutil.which(file) is None:
        raise ConfigError(f"{file} can't be started as an MCP server: there is no such command")
    server = StdioServerParameters(command=file, args=arguments)
    try:
        async with stdio_client(server, sys.__stderr__ or sys.stderr) as streams, ClientSession(*streams) as session:
            await session.initialize()
            tool, code, stdin = _tool((await session.list_tools()).tools)

            async def runs(program: KnownProgram) -> End:
                given = {code: program.code} | ({stdin: program.stdin} if stdin else {})
                try:
                    async with asyncio.timeout(SERVICE_SECONDS):
                        return _reported_by_tool(await session.call_tool(tool, given))
                except TimeoutError:
                    return End("refused")

            yield runs
    except ExceptionGroup as group:  # of the client's tasks
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, MCPError):
            error = Unavailable(f"{command} can't be asked as an MCP server: {error}")
        raise error from None


def _tool(tools: list[Any]) -> tuple[str, str, str]:
    """Names of the first tool that takes a program, of that argument, and of the one for standard input, "" without."""
    for tool in tools:
        takes = tool.input_schema.get("properties", {})
        if code := next((name for name in CODE_NAMES if name in takes), ""):
            return tool.name, code, next((name for name in INPUT_NAMES if name in takes), "")
    raise ConfigError(
        f"the MCP server has no tool that takes a program ({', '.join(CODE_NAMES)}); its tools are "
        f"{', '.join(tool.name for tool in tools) or 'none'}"
    )


def _reported_by_tool(answer: Any) -> End:
    text = "".join(part.text for part in answer.content if part.type == "text")
    said = answer.structured_content or {}
    outcome = str(said.get("outcome", said.get("status", "")))
    late = "timeout" in outcome
    failed = answer.is_error or outcome not in ("", "ok", "success")
    return End("timeout" if late else "failed" if failed else "ok", str(said.get("stdout", text)))
