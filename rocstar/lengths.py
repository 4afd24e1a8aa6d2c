"""How long attempts may get: positions are what the longest prompt and the cap on the response need, never fewer."""

from __future__ import annotations

from collections.abc import Iterable

from rocstar.errors import ConfigError
from rocstar.rollout.environment import Conversation, EnvironmentFactory, Limits, ToolEnvironment
from rocstar.types import Problem

UNLIMITED = Limits(max_turns=1, max_response_tokens=1, max_parallel_calls=1)  # a prompt depends on no limit


def prompt_tokens(
    problem: Problem, conversation: Conversation, environment: EnvironmentFactory = ToolEnvironment
) -> int:
    return len(environment(problem, conversation, UNLIMITED, 0).opening())


def positions_needed(
    problems: Iterable[Problem],
    conversation: Conversation,
    *,
    response_tokens: int,
    model_positions: int,
    environment: EnvironmentFactory = ToolEnvironment,
) -> int:
    """Tokens of the longest attempt. Raises ConfigError when the model holds less."""
    prompt = max((prompt_tokens(problem, conversation, environment) for problem in problems), default=0)
    needed = prompt + response_tokens
    if needed > model_positions:
        room = model_positions - prompt
        remedy = f"set it to {room} or less" if room > 0 else "leave such problems out"
        raise ConfigError(
            f"rollout.max_response_tokens {response_tokens} and the longest prompt of {prompt} tokens need {needed} "
            f"positions, the model holds {model_positions}; {remedy}, or take a model that holds more "
            "(model.max_positions of one from random weights)"
        )
    return needed
