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
import inspect
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from rocstar.agents.attempt import AgentAttempt
from rocstar.agents.gateway import Gateway
from rocstar.agents.wire import MODEL, read_chat, write_chat
from rocstar.errors import ConfigError, RocstarError, VerifierUnavailable
from rocstar.rollout.collect import Roller
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

OUTPUT_BYTES = 1 << 20
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
        roller.note(name, "its agent")
        try:
            async with self._places, self._gateway.opened(attempt) as key:
                given, stop, why = await self._ended(Client(self._gateway.origin, key, attempt))
        finally:
            await asyncio.shield(attempt.close())
            roller.note(name, None)
        made = attempt.trajectory(index, stop, why, time.monotonic() - started)
        if given is None or made.stop is Stop.ENVIRONMENT_FAILED:
            return made
        return await self._judged(roller, problem, made, given)

    async def _ended(self, client: Client) -> tuple[Any, Stop | None, str | None]:
        """(what the agent gave back, why it ended otherwise than well, that in words)."""
        try:
            async with asyncio.timeout(self._seconds):
                return await self._runs(client), None, None
        except TimeoutError:
            return None, Stop.AGENT_TIMEOUT, f"the agent did not end within {self._seconds:g} s"
        except AgentFailed as failed:
            return None, Stop.AGENT_FAILED, str(failed)

    async def _judged(self, roller: Roller, problem: Problem, made: Trajectory, given: Any) -> Trajectory:
        """The attempt with the outcome of what its agent gave back. Raises ConfigError for what is neither a text nor a
        finite number."""
        if isinstance(given, int | float) and isfinite(given):
            facts = FormatFacts(answer_tags=0, reason_after_answer=False, boxed=False, answer_asked=False)
            verdict = Verdict.RIGHT if given > self._right_above else Verdict.WRONG
            told = Outcome(verdict=verdict, reward=float(given), extracted=None, method="agent", format_facts=facts)
            return replace(made, outcome=told)
        if not isinstance(given, str):
            raise ConfigError(f"rollout.agent gave {given!r:.60}; let it give a text, a finite number or nothing")
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
        threads = 0 if inspect.iscoroutinefunction(found) else at_once
        return GatewayAgent(
            FunctionAgent(found, threads), seconds=seconds, at_once=threads or None, right_above=right_above
        )
    return GatewayAgent(ProgramAgent(_words(reference)), seconds=seconds, at_once=at_once, right_above=right_above)


def _words(command: str) -> tuple[str, ...]:
    from shutil import which

    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"rollout.agent = {command!r} is no command: {error}") from None
    if not words or not which(words[0]):
        raise ConfigError(f"rollout.agent = {command!r}: there is no program {words[0] if words else ''!r}")
    return words


class FunctionAgent:
    """A function of the user's own."""

    def __init__(self, function: Any, threads: int) -> None:
        """threads: in which it runs; 0 for an async one."""
        self._function = function
        self._threads = ThreadPoolExecutor(threads, "agent") if threads else None

    async def __call__(self, client: Client) -> Any:
        problem = client.attempt.problem
        try:
            if self._threads is None:
                return await self._function(problem, client)
            running = asyncio.get_running_loop().run_in_executor(self._threads, self._function, problem, client)
            return await running
        except Exception as error:
            raise AgentFailed(raised_by(self._function, error)) from error


class ProgramAgent:
    """A program of the user's own, in a process group and a folder of its own."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._where = os.getcwd()

    async def __call__(self, client: Client) -> Any:
        asked = {"id": client.attempt.problem.id, "question": client.attempt.problem.question}
        with tempfile.TemporaryDirectory(prefix="rocstar-agent-", ignore_cleanup_errors=True) as home:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=self._where,
                env=self._environment(client, home),
                start_new_session=True,
                limit=OUTPUT_BYTES,
            )
            try:
                out, err = await process.communicate(json.dumps(asked).encode())
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            last = err.decode(errors="replace").strip().rpartition("\n")[2][:200]
            raise AgentFailed(f"{self._words[0]} ended with {process.returncode}: {last or 'it said nothing'}")
        return _printed(out)

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


def _printed(out: bytes) -> Any:
    """What the last line of a program gives, where it gives something."""
    last = out.decode(errors="replace").strip().rpartition("\n")[2]
    try:
        told = json.loads(last)
    except (ValueError, RecursionError):
        return None
    return told.get("reward", told.get("answer")) if isinstance(told, dict) else None
