"""The record of one attempt, token by token, and what was found about it.

Worked example of a trajectory with one tool call (P prompt, A sampled, R reply tokens):

    token_ids  P0 P1 P2 A0 A1 A2 R0 R1 A3 A4
    loss_mask   0  0  0  1  1  1  0  0  1  1

The mask follows from who wrote each token, so it cannot drift. Token ids are only ever appended:
text is parsed to find tool calls and is never encoded back into ids that stand for sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rocstar.types.completions import Completion
from rocstar.types.tools import ToolCall, ToolResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    completion: Completion
    """What the engine returned."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls found in it, in order, malformed ones included."""
    results: tuple[ToolResult, ...] = ()
    """One per call, same order."""
    reply_ids: tuple[int, ...] = ()
    """[m] tokens appended after the completion; empty on the last turn."""
    engine_seconds: float | None = field(default=None, compare=False)
    """Wall time from the request to the completion, waiting for a place in the engine included, seconds; None where it
    was not measured. No two runs take the same time, so attempts are compared without it."""
    tool_seconds: float | None = field(default=None, compare=False)
    """Wall time from the completion to the reply, seconds: finding calls, waiting for a tool and running it. None and
    comparisons as above."""


class Stop(StrEnum):
    """Why a *trajectory* ended."""

    ANSWERED = "answered"  # a turn without a tool call
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    ENVIRONMENT_FAILED = "environment_failed"  # our fault; recorded, left out of its group


class Verdict(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    UNDECIDED = "undecided"  # counted, and the trajectory leaves its group


RIGHT_ABOVE = 0.5
"""A graded reward above this is RIGHT where nothing else is said: the upper half of rewards from 0 to 1 or -1 to 1.
Half of the credit, or a little of it for form, is no right answer, so no share of right attempts is too high by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFacts:
    """What the text of a trajectory shows about its form; facts, not judgements."""

    answer_tags: int
    """Well-formed `<answer>...</answer>` blocks over all turns."""
    reason_after_answer: bool
    """A `<reason>` tag opens after the first answer block."""
    boxed: bool
    """At least one balanced `\\boxed{}` was found."""
    answer_asked: bool = True
    """The prompt speaks of an `<answer>` block; where it does not, nobody can miss one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    verdict: Verdict
    """The verifier's finding."""
    reward: float
    """1.0 for RIGHT, else 0.0; of a reward function of one's own any finite number, which is RIGHT above
    `evaluate.right_above`. Meaningless for UNDECIDED, which never reaches a group."""
    extracted: str | None
    """The answer that was compared; None when none was found."""
    method: str
    """What decided (`integer`, `math_verify`, `no_answer` ...)."""
    format_facts: FormatFacts
    """Form of the text, for RoC's penalty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    problem_id: str
    """`Problem.id`."""
    index: int
    """Sibling number, 0..R-1."""
    prompt_ids: tuple[int, ...]
    """Tokens the model first saw."""
    turns: tuple[Turn, ...]
    """In order; the last one has no reply."""
    stop: Stop
    """Why it ended."""
    outcome: Outcome | None = None
    """None until verified, and for ENVIRONMENT_FAILED."""
    fault: str | None = None
    """The message of the Unavailable that ended it; None otherwise."""
    seconds: float = 0.0
    """Wall time from first request to end, seconds."""
    tool_seconds: float = 0.0
    """Wall time spent waiting for tools, seconds."""
    told_tokens: int | None = None
    """Tokens after the prompt as a server counted them, where the ids above are not the model's own (evaluation of an
    endpoint); None where they are."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """[T] prompt, then each completion and its reply."""
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += turn.completion.token_ids
            ids += turn.reply_ids
        return tuple(ids)

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """[T] true exactly on completion tokens."""
        mask = [False] * len(self.prompt_ids)
        for turn in self.turns:
            mask += [True] * len(turn.completion.token_ids)
            mask += [False] * len(turn.reply_ids)
        return tuple(mask)

    @property
    def sampled_logprobs(self) -> tuple[float, ...]:
        """[T] the engine's own numbers on completion tokens, 0.0 elsewhere."""
        values = [0.0] * len(self.prompt_ids)
        for turn in self.turns:
            values += turn.completion.logprobs
            values += [0.0] * len(turn.reply_ids)
        return tuple(values)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy wrote."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def num_response_tokens(self) -> int:
        """Tokens after the prompt, tool replies included (what the length cap counts; release does the same)."""
        if self.told_tokens is not None:
            return self.told_tokens
        return self.num_sampled_tokens + sum(len(turn.reply_ids) for turn in self.turns)

    @property
    def results(self) -> tuple[ToolResult, ...]:
        """All tool results, in order."""
        return tuple(result for turn in self.turns for result in turn.results)

    @property
    def num_calls(self) -> int:
        return len(self.results)

    @property
    def num_failed_calls(self) -> int:
        return sum(result.is_error for result in self.results)
