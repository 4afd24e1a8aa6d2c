"""Agents of the user's own (`rollout.agent`): a function or a program that is given a problem and an address, and does
what it likes. Its requests are the attempt.

    function    package.module:name    (problem, client), async or not; a plain one is run in a thread
    program     python my_agent.py     the problem as JSON on stdin; OPENAI_BASE_URL, OPENAI_API_KEY and their like
                                       for Anthropic in an environment that is clean else

What it gives back is judged in place of the model's last words where it is a text, and is the reward where it is a
number; a program prints `{"answer": ...}` or `{"reward": ...}` as its last line. An agent that raises, exits with
another code than 0 or does not end in time has ended its attempt (AGENT_FAILED, AGENT_TIMEOUT), which is judged by what
the model wrote, or as wrong where `rollout.truncated` says so for the other limits. Source: ours."""

from __future__ import annotations

import asyncio
import errno
import inspect
import json
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import IO, Any, Protocol

from rocstar.agents.attempt import AgentAttempt
from rocstar.agents.gateway import Gateway
from rocstar.agents.wire import MODEL, read_chat, write_chat
from rocstar.errors import ConfigError, RocstarError, Unavailable, VerifierUnavailable
from rocstar.rollout.collect import Roller
from rocstar.support.groups import run_in_group
from rocstar.support.plugins import check_call, is_reference, load, raised_by
from rocstar.types import (
    Completion,
    Finish,
    FormatFacts,
    Outcome,
    Problem,
    Sampling,
    Stop,
    Trajectory,
    Turn,
    Verdict,
)

OUTPUT_BYTES = 1 << 20  # of what a program printed, at most, in which its last line is looked for
END_SECONDS = 5.0  # for an agent to end once it is told to
SHORTAGES = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Of the machine, when a process is started: no fault of the program."""
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "SSL_CERT_FILE")
"""Of the environment, for programs."""


@dataclass(frozen=True, slots=True)
class Client:
    """How a function reaches the model: by any library, at `base_url` with `api_key`, or by `chat`. A library for
    Anthropic's protocol wants `origin`, the address without its path."""

    origin: str
    api_key: str
    attempt: AgentAttempt
    model: str = MODEL

    @property
    def base_url(self) -> str:
        return f"{self.origin}/v1"

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """A chat completion as OpenAI's API gives it. Raises DataError, AttemptOver, Unavailable."""
        return write_chat(await self.attempt.complete(read_chat({"messages": list(messages), **options})))

    async def call(self, tool: str, **arguments: Any) -> str:
        """Run one of the recipe's tools; what the model would be shown. Raises likewise."""
        return await self.attempt.call(tool, arguments)


class AgentFailed(RocstarError):
    """An agent ended with an error of its own."""


class Runs(Protocol):
    """What carries an agent out."""

    async def __call__(self, client: Client) -> Any:
        """What it gave back. Raises AgentFailed."""
        ...


class GatewayAgent:
    """Makes attempts by an agent; it is what `Roller.agent` wants."""

    def __init__(self, runs: Runs, *, seconds: float, at_once: int | None, right_above: float) -> None:
        """at_once: attempts under way; None: however many there are."""
        self._runs, self._seconds, self._right_above, self._gateway = runs, seconds, right_above, Gateway()
        self._places = asyncio.Semaphore(at_once) if at_once else nullcontext()

    async def attempt(self, roller: Roller, problem: Problem, index: int, sampling: Sampling) -> Trajectory:
        started = time.monotonic()
        name = f"{sampling.seed:x}/{problem.id}/{index}"
        attempt = AgentAttempt(roller, problem, sampling, name)
        roller.note(name, "an agent")
        try:
            async with self._places, self._gateway.opened(attempt) as key:
                given, stop, why = await self._ended(Client(self._gateway.origin, key, attempt))
        finally:
            await asyncio.shield(attempt.close())
            roller.note(name, None)
        if attempt.broken:
            raise attempt.broken
        made = attempt.trajectory(index, stop, why, time.monotonic() - started)
        if given is None or made.stop is Stop.ENVIRONMENT_FAILED:
            return made
        return await self._judged(roller, problem, made, given)

    async def _ended(self, client: Client) -> tuple[str | float | None, Stop | None, str | None]:
        """(what the agent gave back, why it ended otherwise than well, that in words). One that swallows its
        cancellation is left to itself after END_SECONDS: what it asks then is refused."""
        running = asyncio.ensure_future(self._runs(client))
        try:
            await asyncio.wait([running], timeout=self._seconds)
            if not running.done():
                client.attempt.late(self._seconds)  # before anything that it waits for is broken off
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait([running], timeout=END_SECONDS)
                running.add_done_callback(lambda late: late.cancelled() or late.exception())
        if not running.done() or running.cancelled():
            return None, Stop.AGENT_TIMEOUT, f"the agent did not end within {self._seconds:g} s"
        try:
            return _gift(running.result()), None, None
        except AgentFailed as failed:
            return None, Stop.AGENT_FAILED, str(failed)

    async def _judged(self, roller: Roller, problem: Problem, made: Trajectory, given: str | float) -> Trajectory:
        """The attempt with the outcome of what its agent gave back."""
        if not isinstance(given, str):
            facts = FormatFacts(answer_tags=0, reason_after_answer=False, boxed=False, answer_asked=False)
            verdict = Verdict.RIGHT if given > self._right_above else Verdict.WRONG
            told = Outcome(verdict=verdict, reward=given, extracted=None, method="agent", format_facts=facts)
            return replace(made, outcome=told)
        said = tuple(roller.codec.encode(f"<answer>\\boxed{{{given}}}</answer>"))
        words = Turn(completion=Completion(token_ids=said, logprobs=(0.0,) * len(said), finish=Finish.STOP))
        with_words = replace(made, turns=(*made.turns, words), stop=Stop.ANSWERED)
        try:
            (found,) = await roller.verifier.verify_all([(problem, with_words)])
        except VerifierUnavailable as error:
            found = error
        if isinstance(found, VerifierUnavailable):
            return replace(made, stop=Stop.ENVIRONMENT_FAILED, fault=str(found))
        return replace(made, outcome=found)


def agent_named(
    reference: str, *, seconds: float, at_once: int, right_above: float, folders: Sequence[Path | str] = ()
) -> GatewayAgent:
    """The agent that `rollout.agent` names, which has so many seconds for an attempt. at_once: programs, or threads of
    a function that is not async. right_above: a larger reward of it is RIGHT. Raises ConfigError."""
    if is_reference(reference) and " " not in reference.strip():
        said = f"rollout.agent = {reference!r}"
        found = load(reference, folders=folders, setting="rollout.agent")
        check_call(found, ("problem", "client"), said=said)
        bound = None if inspect.iscoroutinefunction(found) else at_once
        return GatewayAgent(FunctionAgent(found), seconds=seconds, at_once=bound, right_above=right_above)
    return GatewayAgent(ProgramAgent(_words(reference)), seconds=seconds, at_once=at_once, right_above=right_above)


def _words(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"rollout.agent = {command!r} is no command: {error}") from None
    said, first = f"rollout.agent = {command!r}", words[0] if words else ""
    if Path(first).is_file() and not os.access(first, os.X_OK):
        raise ConfigError(f"{said} is a file that is no program; name its function ({first}:NAME), or python {first}")
    if not shutil.which(first):
        raise ConfigError(f"{said}: there is no program {first!r}")
    script = next((word for word in words if word.endswith(".py")), None)
    if script and not Path(script).is_file():
        raise ConfigError(f"{said}: there is no file {script!r} in {os.getcwd()}")
    return words


def _gift(given: Any) -> str | float | None:
    """What an agent gave back. Raises AgentFailed for what is no text, finite number or nothing."""
    with suppress(OverflowError, UnicodeEncodeError):
        if isinstance(given, int | float) and isfinite(float(given)):
            return float(given)
        if given is None or (isinstance(given, str) and given.encode()):
            return given
    raise AgentFailed(f"rollout.agent gave {given!r:.60}; let it give a text, a finite number or nothing")


class FunctionAgent:
    """A function of the user's own; one that is not async is run in a thread, which nobody can stop."""

    def __init__(self, function: Any) -> None:
        self._function = function

    async def __call__(self, client: Client) -> Any:
        problem = client.attempt.problem
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(problem, client)
            return await _in_thread(partial(self._function, problem, client))
        except Unavailable as outage:
            client.attempt.fault = client.attempt.fault or str(outage)
            raise AgentFailed(str(outage)) from outage
        except (Exception, SystemExit) as error:
            raise AgentFailed(raised_by(self._function, error)) from error
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            raise AgentFailed("the agent cancelled itself") from error


async def _in_thread(call: Callable[[], Any]) -> Any:
    """In a thread of its own, which holds up nobody's end: one of a pool that overstays its time would."""
    loop, done = asyncio.get_running_loop(), Future[Any]()
    done.set_running_or_notify_cancel()  # a caller that stops waiting does not end it

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await asyncio.wrap_future(done, loop=loop)


class ProgramAgent:
    """A program of the user's own, in a process group and a folder of its own."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._where = os.getcwd()

    async def __call__(self, client: Client) -> Any:
        asked = {"id": client.attempt.problem.id, "question": client.attempt.problem.question}
        with ExitStack() as stack:
            place = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="rocstar-agent-", ignore_cleanup_errors=True))
            )
            (place / "home").mkdir()
            # Files and not pipes: a child that outlives the program would hold those open.
            given, said, wrong = (stack.enter_context((place / name).open("w+b")) for name in ("in", "out", "err"))
            given.write(json.dumps(asked).encode())
            given.seek(0)
            code = await self._run(client, str(place / "home"), (given, said, wrong))
            if code:
                last = _last_line(wrong)[:200]
                raise AgentFailed(f"{self._words[0]} ended with {code}: {last or 'it said nothing'}")
            return _printed(_last_line(said))

    async def _run(self, client: Client, home: str, files: Sequence[IO[bytes]]) -> int:
        """Its exit code. Raises AgentFailed where it can't be started."""
        given, said, wrong = files
        env = self._environment(client, home)
        try:
            return await run_in_group(self._words, stdin=given, stdout=said, stderr=wrong, cwd=self._where, env=env)
        except OSError as error:
            if error.errno in SHORTAGES:
                client.attempt.fault = f"no process could be started: {error}"
            raise AgentFailed(f"{self._words[0]} could not be started: {error}") from error

    @staticmethod
    def _environment(client: Client, home: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        path = os.pathsep.join((os.path.dirname(sys.executable), kept.get("PATH", os.defpath)))
        own = {
            "OPENAI_BASE_URL": client.base_url,
            "OPENAI_API_KEY": client.api_key,
            "ANTHROPIC_BASE_URL": client.origin,
            "ANTHROPIC_API_KEY": client.api_key,
        }
        return {**kept, "PATH": path, "HOME": home, "TMPDIR": home, **own}


def _last_line(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_BYTES))
    return file.read().decode(errors="replace").strip().rpartition("\n")[2]


def _printed(last: str) -> Any:
    """What the last line of a program gives, where it gives something."""
    try:
        told = json.loads(last)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    if "reward" in told:
        return told["reward"]
    return str(told["answer"]) if "answer" in told else None
