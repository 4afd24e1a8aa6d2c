"""Agents of the user's own (`rollout.agent`): a function or a program that gets a problem and an address of the model.
Its requests form the attempt.

    function    package.module:name    (problem, client), async or not; a plain one is run in a thread
    program     python my_agent.py     the problem as JSON on stdin; OPENAI_BASE_URL, OPENAI_API_KEY and their like
                                       for Anthropic in an otherwise clean environment; sandboxed

The address is a gateway over the run's engines. A key names an attempt; requests without a key, or with that of an
ended attempt, are refused.

    GET  /v1/models
    POST /v1/chat/completions, /v1/responses, /v1/messages    see wire.py
    POST /v1/tools/NAME    one of the recipe's tools: its arguments as a JSON object; its output as `content`

docs/agents.md says what the agent's answer counts as, and how an attempt ends. Source: ours."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from rocstar.agents.attempt import AgentAttempt, AgentFailed, AttemptOver
from rocstar.agents.wire import MODEL, WIRES, Body, read_chat, write_chat
from rocstar.answers.extract import boxed
from rocstar.answers.reward import LARGEST, RewardParts, number_of, parts_in
from rocstar.config.sections import RolloutSection
from rocstar.errors import ConfigError, DataError, Unavailable, is_shortage
from rocstar.rollout.collect import Roller, verified
from rocstar.sandbox import container, walled
from rocstar.sandbox.walls.folders import FILE_BYTES, remove
from rocstar.support import listen, plugins
from rocstar.support.processes import how_ended, run_to_end, words_of
from rocstar.types import Completion, Finish, FormatFacts, Outcome, Problem, Sampling, Stop, Trajectory, Verdict

END_SECONDS = 5.0  # for an agent to end after its cancellation
ANSWER_CHARACTERS = 1 << 16  # of an agent's answer: the run is blocked while it is encoded
RAISED = re.compile(r"^\w[\w.]*(?:Error|Exception|Exit|Interrupt|Iteration|Group)\b.*", re.MULTILINE)
"""The first line of a Python program's exception; its text may have more."""
UNREAD = re.compile(r"ermission denied|No module named")
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second as shells and the sandbox report it
BODY_BYTES = 32 << 20
REST_SECONDS = 86_400  # idle time of a connection, longer than attempts last: data sent while we close it would be lost
SERVING = {"lifespan": "off", "timeout_keep_alive": REST_SECONDS}
MOST_CONNECTIONS = 64  # of a sandboxed program, so that it can't exhaust the run's descriptors
KEPT_VARIABLES = ("LANG", "LC_ALL", "TZ", "PYTHONPATH", "SSL_CERT_FILE")  # of the environment, for programs
Answer = str | tuple[float, RewardParts]  # a text to be judged, or a reward and its parts


class Gateway:
    """One address for all attempts under way, open while there are any."""

    def __init__(self) -> None:
        self._attempts: dict[str, AgentAttempt] = {}
        self.port, self.origin = 0, ""

    @asynccontextmanager
    async def opened(self, attempt: AgentAttempt) -> AsyncIterator[str]:
        """The key of an attempt, valid within the context."""
        key = f"rocstar-{secrets.token_urlsafe(24)}"
        if not self._attempts:
            place = socket.create_server(("127.0.0.1", 0), backlog=1024)
            self._server = listen.quiet_server(app_of(self._attempts.get), **SERVING)
            self._serving = asyncio.create_task(self._server.serve(sockets=[place]))
            self.port = place.getsockname()[1]
            self.origin = f"http://127.0.0.1:{self.port}"
        self._attempts[key] = attempt
        try:
            yield key
        finally:
            del self._attempts[key]
            if not self._attempts:
                self._server.should_exit = self._server.force_exit = True
                await asyncio.shield(self._serving)  # cancelling it here would leave the address listening

    async def listen(self, place: socket.socket) -> asyncio.Server:
        """Answer there too, while an attempt is under way; connections beyond MOST_CONNECTIONS are refused, since each
        is a descriptor of the run. The caller closes the returned server."""
        config, state = self._server.config, ServerState()
        answers = partial(listen.Bounded, MOST_CONNECTIONS, config=config, server_state=state, app_state={})
        return await asyncio.get_running_loop().create_server(answers, sock=place)


def app_of(find: Callable[[str], AgentAttempt | None]) -> Starlette:
    """The gateway's application. find: the attempt under way that has a key."""

    async def answered(request: Request) -> Response:
        attempt = find(request.headers.get("x-api-key", listen.key_in(request)))
        if attempt is None:
            return listen.refusal(401, "no attempt under way has this key", "authentication_error")
        try:
            async with attempt.reading:
                body = listen.object_in(await listen.body_of(request, BODY_BYTES))
            if name := request.path_params.get("name"):
                return JSONResponse({"content": await listen.while_wanted(request, attempt.call(name, body))})
            return await _completed(request, attempt, body)
        except ClientDisconnect:
            return Response()  # the client has gone
        except AttemptOver as over:
            return listen.refusal(400, str(over), "context_length_exceeded")
        except (DataError, RecursionError) as wrong:  # RecursionError: nested a thousand times
            return listen.refusal(400, str(wrong), "invalid_request_error")
        except Unavailable as fault:
            return listen.refusal(503, str(fault), "server_error")
        except Exception as mistake:
            if mistake is not attempt.broken:
                raise
            return listen.refusal(500, f"the run ends: {mistake!r:.200}", "server_error")  # reports the reason, once

    paths = ("/v1/tools/{name}", *WIRES)
    posts = [Route(path, answered, methods=["POST"]) for path in paths]
    models = Route("/v1/models", listen.models_of(MODEL), methods=["GET"])
    return Starlette(routes=[models, *posts], exception_handlers={404: listen.unknown_path})


async def _completed(request: Request, attempt: AgentAttempt, body: Body) -> Response:
    wire = WIRES[request.scope["path"]]
    try:
        request_fields = wire.read(body)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DataError(f"the request has another form than this protocol has: {error!r:.100}") from None
    found = wire.write(await listen.while_wanted(request, attempt.complete(*request_fields)))
    if not body.get("stream"):
        return JSONResponse(found)
    events = map(listen.event_of, wire.stream(found, body))
    return StreamingResponse(iter([*events, wire.end]), media_type="text/event-stream")


@dataclass(frozen=True, slots=True)
class Client:
    """A function's access to the model: by any library, at `base_url` with `api_key`, or by `chat`. Libraries for
    Anthropic's protocol need `origin`, the address without its path."""

    gateway: Gateway
    api_key: str
    attempt: AgentAttempt
    row: Mapping[str, Any]
    """The columns of the problem's row, and its reference as `answer` unless a column left over has that name, for
    functions that answer the model as an environment or judge it. A copy, of which the model sees what they send."""
    model: str = MODEL

    @property
    def origin(self) -> str:
        return self.gateway.origin

    @property
    def base_url(self) -> str:
        return f"{self.origin}/v1"

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """A chat completion in OpenAI's form. Raises as `AgentAttempt.complete`."""
        return write_chat(await self.attempt.complete(*read_chat({"messages": list(messages), **options})))

    async def call(self, tool: str, **arguments: Any) -> str:
        """Run one of the recipe's tools; returns the text that the model would see. Raises likewise."""
        return await self.attempt.call(tool, arguments)


class GatewayAgent:
    """Makes attempts with an agent; for `Roller.agent`."""

    def __init__(
        self, runs: Callable[[Client], Awaitable[Any]], *, seconds: float, at_once: int | None, right_above: float
    ) -> None:
        """runs: runs the agent, returns its answer and raises AgentFailed, Unavailable. at_once: the most attempts
        under way; None: no limit."""
        self._runs, self._seconds, self._right_above, self._gateway = runs, seconds, right_above, Gateway()
        self._places = asyncio.Semaphore(at_once) if at_once else nullcontext()

    async def __call__(self, roller: Roller, problem: Problem, index: int, sampling: Sampling) -> Trajectory:
        started = time.monotonic()
        name = f"{sampling.seed:x}/{problem.id}/{index}"
        attempt = AgentAttempt(roller, problem, sampling, name)
        roller.note(name, "an agent")
        try:
            async with self._places, self._gateway.opened(attempt) as key:
                row = {"answer": problem.answer} | plugins.copied(dict(problem.metadata))
                given, stop, why = await self._ended(Client(self._gateway, key, attempt, row))
                await attempt.end(self._seconds)
        finally:
            await asyncio.shield(attempt.close())
            roller.note(name, None)
        if attempt.broken:
            raise attempt.broken
        trajectory = attempt.trajectory(index, stop, why, time.monotonic() - started)
        if trajectory.turns and given is not None and trajectory.stop is not Stop.ENVIRONMENT_FAILED:
            return await self._judged(roller, problem, trajectory, given)
        if trajectory.turns or trajectory.stop is not Stop.ANSWERED:  # its first request was refused, or it failed
            return trajectory
        ending = "ended" if given is None else f"gave back {given if isinstance(given, str) else given[0]!r:.60}"
        return replace(trajectory, stop=Stop.AGENT_FAILED, fault=f"it {ending} without an answer of the model")

    async def _ended(self, client: Client) -> tuple[Answer | None, Stop | None, str | None]:
        """(the agent's answer, the stop reason if it did not end normally, its description). An agent that swallows its
        cancellation is abandoned after END_SECONDS: its later requests are refused."""
        attempt = client.attempt
        attempt.ends = time.monotonic() + self._seconds
        running = asyncio.ensure_future(self._runs(client))
        asyncio._unregister_task(running)  # `asyncio.run` would wait for a registered task without limit
        try:
            while not running.done() and (rest := attempt.ends - (attempt.since or time.monotonic())) > 0:
                # At most a tick passes while the run is stopped or busy, and no time while the run answers it.
                tick = inf if attempt.since else min(rest, self._seconds / plugins.TICKS)
                asked, timeout = time.monotonic(), tick if tick < inf else None
                await asyncio.wait([running, *attempt.asking], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                attempt.ends += max(0.0, time.monotonic() - asked - tick)
            attempt.is_late = not running.done()
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait([running], timeout=END_SECONDS)
                running.add_done_callback(lambda task: task.cancelled() or task.exception())
                running._log_destroy_pending = False  # type: ignore[attr-defined]  # `why` reports it
        given = why = None
        try:
            given = _checked_answer(running.result()) if running.done() else None
        except asyncio.CancelledError:
            why = "the agent cancelled itself"
        except (AgentFailed, Unavailable) as failed:  # perhaps an outage during which it exceeded its time
            attempt.blame(failed)
            why = str(failed)
        if not attempt.is_late:
            return given, Stop.AGENT_FAILED if why else None, why
        who = "environment" if attempt.in_environment else "agent"
        left = "" if running.done() else f", nor {END_SECONDS:g} s after it was cancelled; it is left to itself"
        why = f"the {who} did not end within rollout.agent_seconds = {self._seconds:g}{left}"
        if attempt.in_environment and not attempt.refused:  # which delayed the attempt
            attempt.blame(Unavailable(why))
        return None, Stop.AGENT_TIMEOUT, why

    async def _judged(self, roller: Roller, problem: Problem, trajectory: Trajectory, given: Answer) -> Trajectory:
        """The attempt with the outcome of its agent's answer."""
        if not isinstance(given, str):
            facts, (reward, parts) = FormatFacts(answer_asked=False), given
            verdict = Verdict.RIGHT if reward > self._right_above else Verdict.WRONG
            own = Outcome(
                verdict=verdict, reward=reward, parts=parts, extracted=None, method="agent", format_facts=facts
            )
            return replace(trajectory, outcome=own)
        answer_ids = tuple(roller.codec.encode(f"<answer>{boxed(given)}</answer>"))
        words = Completion(token_ids=answer_ids, logprobs=(0.0,) * len(answer_ids), finish=Finish.STOP)
        *before, last = trajectory.turns
        with_words = replace(trajectory, turns=(*before, replace(last, completion=words)), stop=Stop.ANSWERED)
        (judged,) = await verified(roller.verifier, problem, [with_words])
        if judged.outcome and judged.outcome.extracted is None:  # a reward function finds none
            judged = replace(judged, outcome=replace(judged.outcome, extracted=given))
        return replace(judged, turns=trajectory.turns, stop=trajectory.stop if judged.outcome else judged.stop)


def agent_named(
    reference: str, rollout: RolloutSection, *, right_above: float, folders: Sequence[plugins.PathLike] = ()
) -> GatewayAgent:
    """The agent that `rollout.agent` names. right_above: a larger reward from it is RIGHT. Raises ConfigError."""
    setting = f"rollout.agent = {reference!r}"
    bound: int | None = rollout.agents_at_once
    if plugins.is_function(reference):
        function = plugins.load(reference, folders=folders, setting="rollout.agent")
        plugins.check_call(function, ("problem", "client"), said=setting)
        bound = None if inspect.iscoroutinefunction(function) else bound
        runs = partial(by_function, function)
    else:
        remedy = "write a command ('python a.py'), package.module:name or a.py:name"
        words = words_of(reference, said=setting, remedy=remedy)
        script = next((word for word in words if word.endswith(".py")), None)
        if script and not Path(script).is_file():
            raise ConfigError(f"{setting}: there is no file {script!r} in {os.getcwd()}")
        reads = rollout.agent_reads if rollout.agent_walls else None
        if lost := [path for path in reads or () if not Path(path).exists()]:
            raise ConfigError(f"rollout.agent_reads names {lost[0]!r}, which does not exist; name files and folders")
        if reads is not None and (why := walled.why_not()):
            raise ConfigError(
                f"rollout.agent_walls cannot work here ({why}); permit namespaces (docs/sandbox.md says under 'In a "
                "container' which option does), or if the agent and all that it runs may have your rights, set "
                "rollout.agent_walls = false"
            )
        runs = partial(by_program, words, reads)
    return GatewayAgent(runs, seconds=rollout.agent_seconds, at_once=bound, right_above=right_above)


def _checked_answer(given: Any) -> Answer | None:
    """A text, a finite number, alone or as the `reward` of a dict, or None. Raises AgentFailed for anything else."""
    if isinstance(given, str) and len(given) > ANSWER_CHARACTERS:
        raise AgentFailed(f"rollout.agent gave {len(given)} characters; let it give {ANSWER_CHARACTERS} at most")
    found = given if isinstance(given, Mapping) and "answer" not in given else {"reward": given}
    with suppress(UnicodeEncodeError):
        if isinstance(reward := found.get("reward"), int | float) and isfinite(number_of(reward)):
            return float(reward), parts_in(found, "reward")
        if given is None or (isinstance(given, str) and given.encode()):
            return given
    raise AgentFailed(f"rollout.agent gave {given!r:.60}; let it give a text, a number up to {LARGEST:g} or nothing")


async def by_function(function: Any, client: Client) -> Any:
    """The return value of a user's function; one that is not async runs in a thread, which can't be stopped. Raises
    AgentFailed, Unavailable."""
    call = partial(function, client.attempt.problem, client)
    try:
        if inspect.iscoroutinefunction(function):
            return await call()
        return await asyncio.wrap_future(plugins.run_in_daemon_thread(call, "agent"))
    except Unavailable:
        raise
    except (Exception, SystemExit) as error:
        raise (Unavailable if is_shortage(error) else AgentFailed)(plugins.raised_by(function, error)) from error


async def by_program(words: Sequence[str], reads: Sequence[str] | None, client: Client) -> Any:
    """The answer of a user's program, run in its own process group and home, sandboxed if `reads` names the paths that
    it may read. Raises AgentFailed, Unavailable."""
    problem = client.attempt.problem
    messages = {"messages": [dict(message) for message in problem.messages]} if problem.messages else {}
    given = json.dumps({"id": problem.id, "question": problem.question, **messages}).encode()
    home = mkdtemp(prefix="rocstar-agent-")
    environment = _environment(client, home)
    kills, refused = container.kills(), container.refused_processes()
    try:
        if reads is None:
            code, stdout, stderr = await run_to_end(*words, given=given, env=environment)
        else:
            code, stdout, stderr = await _walled(words, reads, home, client.gateway, given, environment)
        no_room = container.is_full(home, FILE_BYTES)
    except OSError as error:
        raise Unavailable(f"{words[0]} could not be started: {error}") from error
    finally:
        with suppress(OSError):  # processes that remain without a sandbox may write there
            await asyncio.to_thread(remove, home)  # it may hold a million files
    if code and no_room:
        raise Unavailable(f"{words[0]} {how_ended(code)} and the disk of {os.path.dirname(home)} is full; free it")
    if code in KILLED and container.kills() > kills:
        raise Unavailable(f"the kernel killed {words[0]} because memory ran out; lower rollout.agents_at_once")
    if code and container.refused_processes() > refused:
        limit = "the container's limit of processes and threads (pids.max) was reached"
        raise Unavailable(f"{words[0]} {how_ended(code)} and {limit}; raise it, or lower rollout.agents_at_once")
    if code:
        reason = (RAISED.findall(stderr) or [stderr.rpartition("\n")[2]])[-1][:200] or "it printed nothing"
        hint = "; rollout.agent_reads lists what it may read" if reads is not None and UNREAD.search(reason) else ""
        raise AgentFailed(f"{words[0]} {how_ended(code)}: {reason}{hint}")
    return _printed(stdout.rpartition("\n")[2])


async def _walled(
    words: Sequence[str], reads: Sequence[str], home: str, gateway: Gateway, given: bytes, environment: dict[str, str]
) -> tuple[int, str, str]:
    """`run_to_end` in a sandbox, whose socket it sends us for the gateway. Raises OSError if it can't be built."""
    ours, theirs = socket.socketpair()
    listening: list[asyncio.Task[asyncio.Server]] = []
    loop = asyncio.get_running_loop()

    def listen_inside() -> None:
        loop.remove_reader(ours)
        for sent in socket.recv_fds(ours, 1, 1)[1]:
            listening.append(loop.create_task(gateway.listen(socket.socket(fileno=sent))))

    with ours, theirs:
        loop.add_reader(ours, listen_inside)
        try:
            behind = walled.command(words, theirs.fileno(), gateway.port, home, reads)
            passed = {"env": environment, "pass_fds": [theirs.fileno()]}
            ended = await run_to_end(*behind, given=given, ends=signal.SIGTERM, **passed)
        finally:
            loop.remove_reader(ours)
            for one in listening:
                (await asyncio.shield(one)).close()
    if not listening:
        raise OSError(ended[2].rpartition("\n")[2])
    return ended


def _environment(client: Client, home: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    addresses = {"OPENAI_BASE_URL": client.base_url, "ANTHROPIC_BASE_URL": client.origin}
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), client.api_key)
    return {**kept, **addresses, **keys, "PATH": path, "HOME": home, "TMPDIR": home}


def _printed(last: str) -> Any:
    """The answer in the last line of a program's output, if any."""
    with suppress(ValueError, RecursionError):
        match json.loads(last):
            case {"answer": str() | int() | float() as answer, **other} if "reward" not in other:
                return str(answer)
            case {**other} if other:
                return other  # checked later
    return None
