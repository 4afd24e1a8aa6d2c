"""Environments of an OpenEnv server: an attempt is a session, from reset to done. docs/environments.md says how an
observation becomes a message and an answer an action. Tested with openenv-core 0.3.0.

    data.source = "rocstar.adapters.openenv:Seeds"
    rollout.agent = "rocstar.adapters.openenv:play" """

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping
from typing import Any

import httpx
from jsonschema import FormatChecker
from jsonschema.validators import validator_for
from openenv.core import GenericEnvClient
from pydantic import BaseModel, PositiveInt

from rocstar.adapters.environments import EnvironmentTask, as_reward, faults_of, options_in, source_of
from rocstar.agents.agent import Client
from rocstar.answers.extract import boxed_answer
from rocstar.config.sections import TaskSection
from rocstar.errors import ConfigError
from rocstar.run.tasks import checked_options
from rocstar.types import Problem

SECONDS = 10.0  # for a server to describe its actions
INVALID = "(code: VALIDATION_ERROR)"
UNTOLD = frozenset(("done", "reward", "metadata"))


class ServerOptions(BaseModel):
    url: str
    seeds: PositiveInt = 1000  # seeds, each a seed for reset, held-out ones among them
    sessions: PositiveInt = 1  # as many as the server has at once (its `max_concurrent_envs`)
    steps: PositiveInt | None = None  # at most, for environments that never say they are done


class Seeds(EnvironmentTask):
    """Raises ConfigError where no server answers."""

    def asked(self, data: TaskSection) -> list[Problem]:
        options = checked_options(ServerOptions, data)
        try:
            actions_of(options.url)
        except (httpx.HTTPError, httpx.InvalidURL, KeyError, ValueError) as error:
            raise ConfigError(f"data.options.url = {options.url!r} is no OpenEnv server: {error}") from None
        source = source_of("openenv", options.model_dump())
        question = "reset with seed {}".format
        return [Problem(id=f"{n:016x}", question=question(n), answer="", source=source) for n in range(options.seeds)]


async def play(problem: Problem, client: Client) -> float:
    """The sum of the steps' rewards, 0 where the model wrote no action. Raises Unavailable where the server fails."""
    options = ServerOptions(**options_in(problem.source))
    messages: list[Mapping[str, Any]] = []
    rewards: list[float] = []
    with faults_of(client):
        schema, field = actions_of(options.url)
        async with places(options.url, options.sessions), GenericEnvClient(base_url=options.url) as session:
            result = await session.reset(seed=int(problem.id, 16))
            while not result.done and len(messages) // 2 != options.steps:
                messages.append({"role": "user", "content": shown(result.observation)})
                messages.append((await client.chat(messages))["choices"][0]["message"])
                answer = messages[-1]["content"] or ""
                action = action_of(boxed_answer(answer) or answer.strip(), field)
                try:
                    result = await session.step(action)
                except RuntimeError as error:  # refused, or the environment's own types did not fit
                    fits = validator_for(schema)(schema, format_checker=FormatChecker()).is_valid(action)
                    if str(error).endswith(INVALID) and not fits:
                        return 0.0
                    raise
                if result.reward is not None:
                    rewards.append(float(result.reward))
        return as_reward(sum(rewards) if rewards else None)


def action_of(answer: str, field: str | None) -> dict[str, Any]:
    """field: the field that gets the answer as its value; None: the answer is JSON."""
    try:
        action = {field: answer} if field else json.loads(answer)
    except (ValueError, RecursionError):
        action = None
    return action if isinstance(action, dict) else {"": answer}  # every server refuses it


def shown(observation: Mapping[str, Any]) -> str:
    """Its only text, or all of it as JSON."""
    fields = {name: value for name, value in observation.items() if name not in UNTOLD}
    only = next(iter(fields.values()), None)
    return only if len(fields) == 1 and isinstance(only, str) else json.dumps(fields)


@functools.cache
def actions_of(url: str) -> tuple[Mapping[str, Any], str | None]:
    """The schema of a server's actions, and their one required field where it is a text. Raises httpx's errors,
    KeyError, ValueError."""
    schema = httpx.get(f"{url}/schema", timeout=SECONDS).raise_for_status().json()["action"]
    match schema.get("required", []):
        case [name] if schema["properties"][name].get("type") == "string":
            return schema, str(name)
    return schema, None


@functools.cache
def places(url: str, sessions: int) -> asyncio.Semaphore:
    return asyncio.Semaphore(sessions)
