"""The length of attempts: positions for the longest prompt plus the cap on the response."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rocstar.errors import ConfigError
from rocstar.rollout.environment import AttemptLimits, Conversation, EnvironmentFactory, ToolEnvironment
from rocstar.types import Problem

SHOWN_PROBLEMS = 5  # in a message
UNLIMITED = AttemptLimits(max_turns=1, max_response_tokens=1, max_parallel_calls=1)  # a prompt depends on no limit


TokensOf = Callable[[Problem], int]


def tokens_of_prompts(conversation: Conversation, environment: EnvironmentFactory = ToolEnvironment) -> TokensOf:
    """Counts the tokens of a problem's prompt, which takes a millisecond: once for each text. An environment of the
    user's own may read other columns of the row, so there each row is counted."""
    counted: dict[str, int] = {}

    def count(problem: Problem) -> int:
        return len(environment(problem, conversation, UNLIMITED, 0).opening())

    def count_once(problem: Problem) -> int:
        if problem.id not in counted:
            counted[problem.id] = count(problem)
        return counted[problem.id]

    return count_once if environment is ToolEnvironment else count


def within(problems: Sequence[Problem], most: int, tokens_of: TokensOf) -> tuple[list[Problem], str]:
    """Problems whose prompt has at most `most` tokens; and a description of the others, empty if there are none."""
    lengths = [tokens_of(problem) for problem in problems]
    fitting = [problem for problem, tokens in zip(problems, lengths, strict=True) if tokens <= most]
    long = [f"{problem.place} ({tokens})" for problem, tokens in zip(problems, lengths, strict=True) if tokens > most]
    shown = ", ".join(long[:SHOWN_PROBLEMS]) + (", ..." if len(long) > SHOWN_PROBLEMS else "")
    excluded = f"{len(long)} of {len(problems)} problems, whose prompts have more than {most} tokens: {shown}"
    return fitting, excluded if long else ""


def positions_needed(
    problems: Iterable[Problem],
    tokens_of: TokensOf,
    *,
    response_tokens: int,
    model_positions: int,
    leaves_out: str = "",
) -> int:
    """Tokens of the longest attempt. leaves_out: a setting that leaves out problems of longer prompts, where there is
    one. Raises ConfigError, which names the problem, when the model holds less."""
    lengths = [(tokens_of(problem), problem) for problem in problems]
    prompt, longest = max(lengths, key=lambda pair: pair[0], default=(0, None))
    needed, room = prompt + response_tokens, model_positions - response_tokens
    if longest is not None and needed > model_positions:
        others = sum(tokens > room for tokens, _ in lengths) - 1
        every = others + 1 == len(lengths)
        remedies = [f"set it to {model_positions - prompt} or less"] * (prompt < model_positions)
        remedies += ["take a rollout.template that writes less around each question"] * every
        left_out = f" with {leaves_out}={room}" if leaves_out and room > 0 and not every else ""
        remedies.append(f"leave such problems out{left_out}")
        raise ConfigError(
            f"rollout.max_response_tokens {response_tokens} and the longest prompt of {prompt} tokens "
            f"({longest.place}{f', and {others} more are too long' if others else ''}) need {needed} positions, the "
            f"model holds {model_positions}; {', '.join(remedies)}, or take a model that holds more "
            "(model.max_positions of one from random weights)"
        )
    return needed
