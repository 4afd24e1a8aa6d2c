"""Agents of the user's own (`rollout.agent`): a function or a program that is given a problem and an address, and does
what it likes. Its requests are the attempt.

    function    package.module:name    (problem, client), async or not; a plain one is run in a thread
    program     python my_agent.py     the problem as JSON on stdin; OPENAI_BASE_URL, OPENAI_API_KEY and their like
                                       for Anthropic in an environment that is clean else; behind walls

What it gives back is judged in place of the model's last words where it is a text, and is the reward where it is a
number; a program prints `{"answer": ...}` or `{"reward": ...}` as its last line. An agent that raises, exits with
another code than 0 or does not end in time has ended its attempt (AGENT_FAILED, AGENT_TIMEOUT), which is judged by what
the model wrote, or as wrong where `rollout.truncated` says so for the other limits. Source: ours."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from rocstar.agents.attempt import AgentAttempt, AgentFailed
from rocstar.agents.gateway import Gateway
from rocstar.agents.wire import MODEL, read_chat, write_chat
from rocstar.answers.extract import boxed
from rocstar.errors import ConfigError, Unavailable
from rocstar.rollout.collect import Roller, verified
from rocstar.sandbox import container, walled
from rocstar.support.plugins import begun_in_thread, check_call, is_function, load, raised_by
from rocstar.support.processes import how_ended, run_to_end, words_of
from rocstar.types import Completion, Finish, FormatFacts, Outcome, Problem, Sampling, Stop, Trajectory, Turn, Verdict

END_SECONDS = 5.0  # for an agent to end once it is told to
ANSWER_CHARACTERS = 1 << 16  # of what an agent gives back: the run stands still while it is encoded
RAISED = re.compile(r"^\w[\w.]*(?:Error|Exception|Exit|Interrupt|Iteration|Group)\b.*", re.MULTILINE)
"""The first line of what a Python program raised; its text may have more."""
UNREAD = re.compile(r"ermission denied|No module named")
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second as shells and our walls tell it
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "SSL_CERT_FILE")  # of the environment, for programs


@dataclass(frozen=True, slots=True)
class Client:
    """How a function reaches the model: by any library, at `base_url` with `api_key`, or by `chat`. A library for
    Anthropic's protocol wants `origin`, the address without its path."""

    gateway: Gateway
    api_key: str
    attempt: AgentAttempt
    model: str = MODEL

    @property
    def origin(self) -> str:
        return self.gateway.origin

    @property
    def base_url(self) -> str:
        return f"{self.origin}/v1"

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """A chat completion as OpenAI's API gives it. Raises DataError, AttemptOver, Unavailable."""
        return write_chat(await self.attempt.complete(*read_chat({"messages": list(messages), **options})))

    async def call(self, tool: str, **arguments: Any) -> str:
        """Run one of the recipe's tools; what the model would be shown. Raises likewise."""
        return await self.attempt.call(tool, arguments)


class GatewayAgent:
    """Makes attempts by an agent; it is what `Roller.agent` wants."""

    def __init__(
        self, runs: Callable[[Client], Awaitable[Any]], *, seconds: float, at_once: int | None, right_above: float
    ) -> None:
        """runs: carries the agent out, gives what it gave back and raises AgentFailed, Unavailable. at_once: attempts
        under way; None: however many there are."""
        self._runs, self._seconds, self._right_above, self._gateway = runs, seconds, right_above, Gateway()
        self._places = asyncio.Semaphore(at_once) if at_once else nullcontext()

    async def attempt(self, roller: Roller, problem: Problem, index: int, sampling: Sampling) -> Trajectory:
        started = time.monotonic()
        name = f"{sampling.seed:x}/{problem.id}/{index}"
        attempt = AgentAttempt(roller, problem, sampling, name)
        roller.note(name, "an agent")
        try:
            async with self._places, self._gateway.opened(attempt) as key:
                given, stop, why = await self._ended(Client(self._gateway, key, attempt))
                await attempt.end(self._seconds)
        finally:
            await asyncio.shield(attempt.close())
            roller.note(name, None)
        if attempt.broken:
            raise attempt.broken
        made = attempt.trajectory(index, stop, why, time.monotonic() - started)
        if made.turns and given is not None and made.stop is not Stop.ENVIRONMENT_FAILED:
            return await self._judged(roller, problem, made, given)
        if made.turns or made.stop is not Stop.ANSWERED:  # or a limit refused its first request, or it failed
            return made
        gave = "ended" if given is None else f"gave back {given!r:.60}"
        return replace(made, stop=Stop.AGENT_FAILED, fault=f"it {gave} without an answer of the model")

    async def _ended(self, client: Client) -> tuple[str | float | None, Stop | None, str | None]:
        """(what the agent gave back, why it ended otherwise than well, that in words). One that swallows its
        cancellation is left to itself after END_SECONDS: what it asks then is refused."""
        attempt = client.attempt
        attempt.ends = time.monotonic() + self._seconds
        running = asyncio.ensure_future(self._runs(client))
        asyncio._unregister_task(running)  # `asyncio.run` waits for what is registered, however long that takes
        try:
            while not running.done() and (rest := attempt.ends - (attempt.since or time.monotonic())) > 0:
                timeout = None if attempt.since else rest  # its time stands still while it is answered
                await asyncio.wait([running, *attempt.asking], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            attempt.is_late = not running.done()
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait([running], timeout=END_SECONDS)
                running.add_done_callback(lambda late: late.cancelled() or late.exception())
                running._log_destroy_pending = False  # type: ignore[attr-defined]  # `why` tells it
        given = why = None
        try:
            given = _gift(running.result()) if running.done() else None
        except asyncio.CancelledError:
            why = "the agent cancelled itself"
        except (AgentFailed, Unavailable) as failed:  # perhaps an outage that it waited for past its time
            attempt.blame(failed)
            why = str(failed)
        if not attempt.is_late:
            return given, Stop.AGENT_FAILED if why else None, why
        who = "environment" if attempt.in_environment else "agent"
        left = "" if running.done() else f", nor {END_SECONDS:g} s after it was cancelled; it is left to itself"
        why = f"the {who} did not end within rollout.agent_seconds = {self._seconds:g}{left}"
        if attempt.in_environment and not attempt.refused:  # which kept the attempt waiting
            attempt.blame(Unavailable(why))
        return None, Stop.AGENT_TIMEOUT, why

    async def _judged(self, roller: Roller, problem: Problem, made: Trajectory, given: str | float) -> Trajectory:
        """The attempt with the outcome of what its agent gave back."""
        if not isinstance(given, str):
            facts = FormatFacts(answer_asked=False)
            verdict = Verdict.RIGHT if given > self._right_above else Verdict.WRONG
            told = Outcome(verdict=verdict, reward=given, extracted=None, method="agent", format_facts=facts)
            return replace(made, outcome=told)
        said = tuple(roller.codec.encode(f"<answer>{boxed(given)}</answer>"))
        words = Turn(completion=Completion(token_ids=said, logprobs=(0.0,) * len(said), finish=Finish.STOP))
        with_words = replace(made, turns=(*made.turns, words), stop=Stop.ANSWERED)
        (judged,) = await verified(roller.verifier, problem, [with_words])
        return replace(judged, turns=made.turns, stop=made.stop if judged.outcome else judged.stop)


def agent_named(
    reference: str,
    *,
    seconds: float,
    at_once: int,
    right_above: float,
    folders: Sequence[Path | str] = (),
    reads: Sequence[str] | None = None,
) -> GatewayAgent:
    """The agent that `rollout.agent` names, which has so many seconds for an attempt. at_once: programs, or threads of
    a function that is not async. right_above: a larger reward of it is RIGHT. reads: what a program behind walls may
    read; None: it has none. Raises ConfigError."""
    said = f"rollout.agent = {reference!r}"
    if is_function(reference):
        function = load(reference, folders=folders, setting="rollout.agent")
        check_call(function, ("problem", "client"), said=said)
        bound = None if inspect.iscoroutinefunction(function) else at_once
        runs = partial(by_function, function)
    else:
        remedy = "write a command ('python a.py'), package.module:name or a.py:name"
        words = words_of(reference, said=said, remedy=remedy)
        script = next((word for word in words if word.endswith(".py")), None)
        if script and not Path(script).is_file():
            raise ConfigError(f"{said}: there is no file {script!r} in {os.getcwd()}")
        if lost := [path for path in reads or () if not Path(path).exists()]:
            raise ConfigError(f"rollout.agent_reads names {lost[0]!r}, which is not there; name files and folders")
        if reads is not None and (why := walled.why_not()):
            raise ConfigError(
                f"rollout.agent_walls cannot be had here ({why}); permit namespaces (docs/sandbox.md says under 'In a "
                "container' which option does), or where the agent and all that it runs may have your rights, set "
                "rollout.agent_walls = false"
            )
        runs, bound = partial(by_program, words, reads), at_once
    return GatewayAgent(runs, seconds=seconds, at_once=bound, right_above=right_above)


def _gift(given: Any) -> str | float | None:
    """What an agent gave back. Raises AgentFailed for what is no text, finite number or nothing."""
    if isinstance(given, str) and len(given) > ANSWER_CHARACTERS:
        raise AgentFailed(f"rollout.agent gave {len(given)} characters; let it give {ANSWER_CHARACTERS} at most")
    with suppress(OverflowError, UnicodeEncodeError):
        if isinstance(given, int | float) and isfinite(float(given)):
            return float(given)
        if given is None or (isinstance(given, str) and given.encode()):
            return given
    raise AgentFailed(f"rollout.agent gave {given!r:.60}; let it give a text, a finite number or nothing")


async def by_function(function: Any, client: Client) -> Any:
    """What a function of the user's own gives back; one that is not async is run in a thread, which nobody can stop.
    Raises AgentFailed, Unavailable."""
    call = partial(function, client.attempt.problem, client)
    try:
        if inspect.iscoroutinefunction(function):
            return await call()
        return await asyncio.wrap_future(begun_in_thread(call, "agent"))
    except Unavailable:
        raise
    except (Exception, SystemExit) as error:
        raise AgentFailed(raised_by(function, error)) from error


async def by_program(words: Sequence[str], reads: Sequence[str] | None, client: Client) -> Any:
    """What a program of the user's own gives back, run in a process group and with a home of its own, behind walls
    where `reads` names what it may read. Raises AgentFailed, Unavailable."""
    problem = client.attempt.problem
    given = json.dumps({"id": problem.id, "question": problem.question}).encode()
    home = mkdtemp(prefix="rocstar-agent-")
    environment = _environment(client, home)
    kills, refused = container.kills(), container.refused_processes()
    try:
        if reads is None:
            code, said, wrong = await run_to_end(*words, given=given, env=environment)
        else:
            code, said, wrong = await _walled(words, reads, home, client.gateway, given, environment)
    except OSError as error:
        raise Unavailable(f"{words[0]} could not be started: {error}") from error
    finally:
        with suppress(OSError):  # what goes on without walls may be writing there
            await asyncio.to_thread(walled.remove, home)  # it may hold a million files
    if code in KILLED and container.kills() > kills:
        raise Unavailable(f"the kernel killed {words[0]} for want of memory; lower rollout.agents_at_once")
    if code and container.refused_processes() > refused:
        limit = "the container's limit of processes and threads (pids.max) was reached"
        raise Unavailable(f"{words[0]} {how_ended(code)} and {limit}; raise it, or lower rollout.agents_at_once")
    if code:
        told = (RAISED.findall(wrong) or [wrong.rpartition("\n")[2]])[-1][:200] or "it said nothing"
        hint = "; rollout.agent_reads says what it may read" if reads is not None and UNREAD.search(told) else ""
        raise AgentFailed(f"{words[0]} {how_ended(code)}: {told}{hint}")
    return _printed(said.rpartition("\n")[2])


async def _walled(
    words: Sequence[str], reads: Sequence[str], home: str, gateway: Gateway, given: bytes, environment: dict[str, str]
) -> tuple[int, str, str]:
    """`run_to_end` behind walls, within which the gateway answers too. Raises OSError where they can't be built."""
    ours, theirs = socket.socketpair()
    with theirs:
        behind = walled.command(words, theirs.fileno(), gateway.port, home, reads)
        answering = asyncio.create_task(_answered(ours, gateway))
        try:
            passed = {"env": environment, "pass_fds": [theirs.fileno()]}
            ended = await run_to_end(*behind, given=given, ends=signal.SIGTERM, **passed)
        finally:
            theirs.shutdown(socket.SHUT_RDWR)  # what was sent is still there, and nothing more will come
            is_built = await asyncio.shield(answering)
    if not is_built:
        raise OSError(ended[2].rpartition("\n")[2])
    return ended


async def _answered(ours: socket.socket, gateway: Gateway) -> bool:
    """Have the gateway answer where its socket comes from behind the walls, until the other end is shut. False: no
    walls were built."""
    with ours:
        await _readable(ours)
        _, sent, *_ = socket.recv_fds(ours, 1, 1)
        if sent:
            listening = await gateway.listen(socket.socket(fileno=sent[0]))
            await _readable(ours)
            listening.close()
    return bool(sent)


async def _readable(place: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(place, ready.set)
    await ready.wait()
    loop.remove_reader(place)


def _environment(client: Client, home: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return {
        **kept,
        "PATH": os.pathsep.join((os.path.dirname(sys.executable), kept.get("PATH", os.defpath))),
        "HOME": home,
        "TMPDIR": home,
        "OPENAI_BASE_URL": client.base_url,
        "OPENAI_API_KEY": client.api_key,
        "ANTHROPIC_BASE_URL": client.origin,
        "ANTHROPIC_API_KEY": client.api_key,
    }


def _printed(last: str) -> Any:
    """What the last line of a program gives, where it gives something."""
    with suppress(ValueError, RecursionError):
        match json.loads(last):
            case {"reward": bool() | int() | float() as reward, **other} if "answer" not in other:
                return reward
            case {"answer": str() | int() | float() as answer, **other} if "reward" not in other:
                return str(answer)
            case {**other} if other:
                return other  # which is refused
    return None
