"""The data types of rocstar, shared by all rooms. Data only; no behaviour beyond derived facts.

In order: problems, tool calls, completions, trajectories, groups, batches, demonstrations; each builds on those before
it. Dimension letters used as suffixes: P problems, R attempts drawn per problem, G attempts kept, N sequences in a
batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, groupby, pairwise, repeat
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rocstar.engines.sending import Sending

# -- Problems, and the names and seeds derived from them.


def problem_id(question: str) -> str:
    """A stable 16-hex-digit name for a question; equal questions share it. Source: ours."""
    return hashlib.sha256(question.encode()).hexdigest()[:16]


def seed_for(*identity: int | str) -> int:
    """A 63-bit seed from an identity such as (run.seed, step, problem.id, index): the same attempt draws
    the same randomness on any number of workers and in any order. Source: ours."""
    text = "\x1f".join(str(part) for part in identity)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    id: str
    """Stable hash of the question (`problem_id`) and of the messages before it."""
    question: str
    """The question for the model, plain text."""
    answer: str
    """Reference answer, plain text or LaTeX."""
    source: str = ""
    """Data set or file it came from."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of a loader (family, level, row number); never read by training."""
    messages: tuple[Mapping[str, str], ...] = ()
    """The prompt as a conversation, if the data has one; each message has `role` and `content`: perhaps a system text,
    then turns of user and assistant, the question last. Empty: the question alone."""

    @property
    def place(self) -> str:
        """For a message: source and line, or how the question begins where no line is known."""
        line = self.metadata.get("line")
        return f"{self.source} line {line}" if self.source and line else f"{self.question[:60]!r}"

    @property
    def system(self) -> str | None:
        """The problem's own system text, which replaces the template's."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None

    @property
    def earlier(self) -> tuple[tuple[str, str], ...]:
        """(user text, assistant text) of each turn before the question."""
        said = [message["content"] for message in self.messages if message["role"] != "system"][:-1]
        return tuple(zip(said[::2], said[1::2], strict=True))


# -- Tool calls and their results.


class Status(StrEnum):
    """The outcome of a *program*. A failed service is no Status but raises SandboxUnavailable."""

    OK = "ok"
    CODE_ERROR = "code_error"  # uncaught exception, syntax error, non-zero exit, fatal signal
    TIMEOUT = "timeout"  # wall or CPU limit
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"  # flooded its output channel
    BAD_CALL = "bad_call"  # the call did not parse, named no known tool, or had wrong arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    id: str
    """Unique inside a trajectory, in order of appearance."""
    tool: str
    """Name the model used; empty when the call did not parse."""
    arguments: Mapping[str, Any]
    """Decoded arguments; empty when the call did not parse."""
    raw: str
    """Exact text between the call tags."""
    parse_error: str | None = None
    """Why it did not parse; None for a well-formed call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    call_id: str
    """`ToolCall.id` this answers."""
    status: Status
    """The program's outcome."""
    stdout: str = ""
    """Standard output, possibly cut; invalid UTF-8 replaced."""
    stderr: str = ""
    """Standard error and traceback, or the reason of a bad call."""
    value: str | None = None
    """The last expression's value in IPython's form; None if there is none."""
    run_seconds: float = 0.0
    """Wall time of the program, seconds; excludes queueing."""
    queue_seconds: float = 0.0
    """Wall time spent waiting for a slot, seconds."""
    truncated_bytes: int = 0
    """Bytes of output that were dropped."""
    isolation: str = ""
    """Isolation level in force (`L1` to `L3`); empty when nothing was run."""

    @property
    def is_error(self) -> bool:
        """The one definition of a failed call; RoC counts this and never text (release: substring "error")."""
        return self.status is not Status.OK


# -- Requests to engines, completions and weights.


class Finish(StrEnum):
    """Why one *completion* ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are sampled for one completion."""

    max_new_tokens: int
    """Hard cap on sampled tokens, the stop token included."""
    temperature: float = 1.0
    """0 means greedy; logprobs are then those of temperature 1."""
    top_p: float = 1.0
    """Nucleus mass kept, 1 for all."""
    top_k: int = 0
    """Likeliest tokens kept, 0 for all."""
    seed: int = 0
    """Seed by identity; token t of the completion uses (seed, t) and nothing else."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the completion; it is part of it."""


class VersionSpan(NamedTuple):
    """Consecutive tokens that one policy version wrote."""

    version: int
    """Policy version, counts optimizer updates."""
    tokens: int
    """Number of tokens, at least 1."""


def spans_of(versions: Iterable[int]) -> tuple[VersionSpan, ...]:
    """Per-token versions [n] as spans: 5 5 6 -> (5, 2), (6, 1)."""
    return tuple(VersionSpan(version, sum(1 for _ in same)) for version, same in groupby(versions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    token_ids: tuple[int, ...]
    """[n] exactly what was sampled, stop token included."""
    logprobs: tuple[float, ...]
    """[n] natural log of the probability after temperature and before top_p and top_k, over the tokenizer's ids: what a
    learner recomputes from the same weights. Truncation only changes which tokens can be sampled."""
    finish: Finish
    """Why it ended."""
    version_spans: tuple[VersionSpan, ...] = ()
    """The policy versions that wrote its tokens, in order; the token counts add up to n. A token's logprob is that of a
    forward pass of its version over everything before it. Empty without tokens, or if no policy wrote them."""

    @property
    def versions(self) -> tuple[int, ...]:
        """[n] the version of each token; empty if the spans are."""
        return tuple(chain.from_iterable(repeat(span.version, span.tokens) for span in self.version_spans))

    def stopped_after(self, tokens: int) -> Completion:
        """It, as if the last one of so many tokens had stopped it."""
        ids, logprobs, spans = self.token_ids[:tokens], self.logprobs[:tokens], spans_of(self.versions[:tokens])
        return Completion(token_ids=ids, logprobs=logprobs, finish=Finish.STOP, version_spans=spans)


def without_tokens(finish: Finish) -> Completion:
    """A completion that ended before its first token."""
    return Completion(token_ids=(), logprobs=(), finish=finish)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Log-probabilities that certain weights must give, to detect an engine with other weights."""

    token_ids: tuple[int, ...]
    """[n]"""
    logprobs: tuple[float, ...]
    """[k] of its last tokens, k < n, from a plain forward pass of the weights at temperature 1."""
    noise: float | None = None
    """Mean difference in nats from those of the weights in fp32; None if they are computed in fp32."""


def gaps(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Differences of log-probabilities, nats; a single infinite one if any is missing or not a number."""
    if not ours or len(ours) != len(theirs) or not all(map(isfinite, (*ours, *theirs))):
        return [inf]
    return [abs(a - b) for a, b in zip(ours, theirs, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Published weights: tensors of this process, or a folder that another process can read."""

    version: int
    """Policy version, counts optimizer updates."""
    folder: str | None = None
    """Hugging Face model folder that holds them; in /dev/shm they never touch a disk."""
    tensors: Mapping[str, Any] | None = None
    """State dict of the live policy, detached: read before its next update. Preferred if both are given."""
    canary: tuple[Canary, ...] = ()
    """Rows to check them with once an engine in another process has loaded them."""
    fingerprint: str = ""
    """Distinguishes them from others of the same version, in a run that repeated its steps with other results."""
    sender: Sending | None = None
    """Sends them without a file, if set; then the folder holds only config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """An engine's current load, in tokens of KV cache and in requests, and its counters."""

    capacity_tokens: int
    """Capacity of its KV cache in tokens; a request that needs more is refused."""
    used_tokens: int
    """Tokens held by decoding requests, and by sessions that wait for their next request."""
    running: int
    waiting: int
    policy_version: int = 0
    """Version of the weights it holds."""
    produced_tokens: int = 0
    """Sampled since the engine started."""
    recomputed_tokens: int = 0
    """Tokens fed again since then because their cache was evicted."""
    evictions: int = 0
    """How often a session's cache was evicted."""
    lost: int = 0
    """For a fleet: how often one of its engines was taken out."""
    standing: frozenset[str] = frozenset()
    """For a fleet: ids of the requests whose engine has made no progress since the last look, or whose next look is
    late; also those that wait for an engine, if no engine with work has made progress."""
    keeps_idle: bool = False
    """Whether sessions that wait for their next request keep their cache when other requests come."""


# -- The record of one attempt, token by token, and its outcome.


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    completion: Completion
    """The engine's completion."""
    prompt_ids: tuple[int, ...] = ()
    """[k] if not empty: the prompt of this turn, which replaces the tokens before it: an agent (`rollout.agent`) has
    begun another conversation, or gone back in one."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls found in it, in order, malformed ones included."""
    results: tuple[ToolResult, ...] = ()
    """One per call, same order."""
    reply_ids: tuple[int, ...] = ()
    """[m] tokens appended after the completion; empty on the last turn."""
    engine_seconds: float | None = field(default=None, compare=False)
    """Wall time from the request to the completion, waiting for a place in the engine included, seconds; None if not
    measured. No two runs take the same time, so attempts are compared without it."""
    tool_seconds: float | None = field(default=None, compare=False)
    """Wall time from the completion to the reply, seconds: finding calls, waiting for a tool and running it. None and
    comparisons as above."""


class Stop(StrEnum):
    """Why a *trajectory* ended."""

    ANSWERED = "answered"  # a turn without a tool call
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    AGENT_FAILED = "agent_failed"  # a program or function of the user's (`rollout.agent`) ended with an error
    AGENT_TIMEOUT = "agent_timeout"  # it did not end in time
    ENVIRONMENT_FAILED = "environment_failed"  # a service failed; recorded, dropped by the resampler


class Verdict(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    UNDECIDED = "undecided"  # counted, and dropped by the resampler


RIGHT_ABOVE = 0.5
"""Default threshold above which a graded reward is RIGHT: the upper half of rewards from 0 to 1 or -1 to 1. Half of the
credit, or a little for form, is not right, so that shares of right attempts are not inflated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFacts:
    """Facts about the form of a trajectory's text, without judgement."""

    answer_tags: int = 0
    """Well-formed `<answer>...</answer>` blocks over all turns."""
    reason_after_answer: bool = False
    """A `<reason>` tag opens after the first answer block."""
    boxed: bool = False
    """At least one balanced `\\boxed{}` was found."""
    answer_asked: bool = True
    """The prompt mentions an `<answer>` block; if not, a missing one is no fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    verdict: Verdict
    """The verifier's finding."""
    reward: float
    """1.0 for RIGHT, else 0.0; with a user's reward function any finite number, RIGHT above `evaluate.right_above`.
    Meaningless for UNDECIDED, which the resampler drops."""
    extracted: str | None
    """The answer that was compared; None when none was found."""
    method: str
    """The rule that decided (`integer`, `math_verify`, `no_answer` ...)."""
    format_facts: FormatFacts
    """Form of the text, for RoC's penalty."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further finite numbers that came with a user's reward, by name: metrics, which nothing is learnt from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at a problem. With one tool call (P prompt, A sampled, R reply tokens):

        token_ids  P0 P1 P2 A0 A1 A2 R0 R1 A3 A4
        loss_mask   0  0  0  1  1  1  0  0  1  1

    The mask follows from who wrote each token, so it cannot drift. Token ids are only ever appended: text is parsed to
    find tool calls and is never encoded back into ids that stand for sampled tokens."""

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
    """The message of the Unavailable that ended it, or of the error that its agent ended with; None otherwise."""
    seconds: float = 0.0
    """Wall time from first request to end, seconds."""
    tool_seconds: float = 0.0
    """Wall time spent waiting for tools, seconds."""
    told_tokens: int | None = None
    """Tokens after the prompt as a server counted them, where the ids above are not the model's own (evaluation of an
    endpoint); None where they are."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """[T] prompt, then each completion and its reply; before a turn with a prompt of its own that one."""
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += turn.prompt_ids
            ids += turn.completion.token_ids
            ids += turn.reply_ids
        return tuple(ids)

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """[T] true exactly on completion tokens."""
        mask = [False] * len(self.prompt_ids)
        for turn in self.turns:
            mask += [False] * len(turn.prompt_ids)
            mask += [True] * len(turn.completion.token_ids)
            mask += [False] * len(turn.reply_ids)
        return tuple(mask)

    @property
    def sampled_logprobs(self) -> tuple[float, ...]:
        """[T] the engine's own numbers on completion tokens, 0.0 elsewhere."""
        values = [0.0] * len(self.prompt_ids)
        for turn in self.turns:
            values += [0.0] * len(turn.prompt_ids)
            values += turn.completion.logprobs
            values += [0.0] * len(turn.reply_ids)
        return tuple(values)

    @property
    def conversations(self) -> tuple[Trajectory, ...]:
        """The attempt in parts whose tokens continue one another, cut before each turn with a prompt of its own."""
        begins = [0, *(number for number, turn in enumerate(self.turns) if turn.prompt_ids), len(self.turns)]
        if len(begins) == 2:
            return (self,)
        parts = [self.turns[begin:end] for begin, end in pairwise(begins)]
        return tuple(
            replace(self, prompt_ids=first.prompt_ids or self.prompt_ids, turns=(replace(first, prompt_ids=()), *rest))
            for first, *rest in parts
        )

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


# -- Siblings, and the resampler's decisions.


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    problem: Problem
    """The siblings' problem."""
    trajectories: tuple[Trajectory, ...]
    """All siblings, verified; without an outcome if a service failure ended them."""

    @property
    def rewards_G(self) -> tuple[float, ...]:
        return tuple(t.outcome.reward if t.outcome else 0.0 for t in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """RoC's quality of one trajectory; lower is better. Source: paper §2.2.3, eq. 4-5."""

    errors: float
    """p_err: 0.5 without any tool call, else failed calls / calls."""
    format: float
    """p_format, times `resample.format_weight`: 1 without an answer tag, else min(1, (tags - 1) / turns); 0 where the
    prompt asks for none."""
    repetition: float = 0.0
    """Weighted share of repeated 5-grams; 0 unless `resample.repetition_weight` is set, which the paper leaves out."""

    @property
    def total(self) -> float:
        """p_total: 0 to 2, and repetition on top."""
        return self.errors + self.format + self.repetition


class Reason(StrEnum):
    """Why a trajectory was kept or dropped; every attempt of a step gets exactly one."""

    KEPT_ALL = "kept.all"  # nothing to choose: plain GRPO, or a group no larger than G
    KEPT_UNIFORM = "kept.uniform"  # drawn at random
    KEPT_NEGATIVE = "kept.negative"  # a failure, drawn uniformly
    KEPT_QUALITY = "kept.quality"  # a success, drawn inversely to its penalty
    KEPT_LOWEST_PENALTY = "kept.lowest_penalty"  # a success, among the cleanest
    DROPPED_UNIFORM = "dropped.uniform"
    DROPPED_NEGATIVE = "dropped.negative"
    DROPPED_QUALITY = "dropped.quality"
    DROPPED_HIGHER_PENALTY = "dropped.higher_penalty"
    DROPPED_EQUAL_REWARDS = "dropped.equal_rewards"  # the group has no signal
    DROPPED_TOO_FEW = "dropped.too_few_siblings"
    DROPPED_ENVIRONMENT = "dropped.environment_failed"
    DROPPED_UNDECIDED = "dropped.undecided"
    DROPPED_TRUNCATED = "dropped.truncated"  # cut by the token limit, under overlong filtering
    DROPPED_VOID_TURN = "dropped.void_turn"  # a turn with neither a call nor an answer, where that is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A resampler's decision about one trajectory of a group."""

    index: int
    """Position in `Group.trajectories`."""
    kept: bool
    reason: Reason
    penalty: Penalty
    weight: float = 0.0
    """Relative probability of being drawn; 0 without a draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resampled:
    """A resampler's answer. `choices` has one entry per trajectory of the group, in its order."""

    group: Group
    choices: tuple[Choice, ...]

    @property
    def kept(self) -> tuple[Trajectory, ...]:
        return tuple(self.group.trajectories[c.index] for c in self.choices if c.kept)

    @property
    def dropped(self) -> tuple[Trajectory, ...]:
        return tuple(self.group.trajectories[c.index] for c in self.choices if not c.kept)


# -- Input and result of an optimizer update.


class RowOrigin(NamedTuple):
    """The attempt and conversation of a step that a row comes from, from 0. A problem may occur twice in a step, so its
    id is not enough."""

    group: int = 0
    attempt: int = 0
    conversation: int = 0


FIRST = RowOrigin()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """One sequence to learn from, still in plain Python; `learning.pack` makes tensors of it."""

    token_ids: Sequence[int]
    """[T]."""
    loss_mask: Sequence[bool]
    """[T] true on tokens the policy wrote."""
    sampled_logprobs: Sequence[float]
    """[T] the engine's numbers."""
    advantage: float
    """No unit; of every token of the row."""
    old_logprobs: Sequence[float] = ()
    """[T] the learner's own numbers before the first update of the step, of the full softmax after temperature, 0 where
    the policy wrote nothing; filled in by `Learner.score`, or by `Learner.update` for a row that was not scored."""
    entropies: Sequence[float] = ()
    """[T] entropy of the same distribution, nats; filled in likewise."""
    origin: RowOrigin = FIRST


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The result of one optimizer update."""

    metrics: Mapping[str, float]
    """loss, grad_norm, clip_share, kl, learning_rate, skipped (1: weights unchanged), tokens (of all rows); with
    `learning.importance_cap` importance_weight (mean) and importance_capped (share of tokens); with a mask of attempts
    attempts_masked (share of tokens whose attempt does not count)."""
    rows: tuple[BatchRow, ...]
    """The rows that it learnt from, scored."""


# -- Demonstrations, before and after tokenization.


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTurn:
    """One assistant turn of a demonstration."""

    text: str
    """The assistant's text, tool-call tags included, end marker excluded."""
    results: tuple[ToolResult, ...] = ()
    """The tools' answers; empty on the last turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A worked conversation to imitate (SFT)."""

    problem: Problem
    turns: tuple[DemoTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SftRow:
    """A demonstration as tokens, laid out exactly as a rollout would lay it out."""

    token_ids: tuple[int, ...]
    """[T]."""
    loss_mask: tuple[bool, ...]
    """[T] true on tokens the assistant writes, end markers included."""


def utf8(text: str) -> str:
    """With question marks for lone surrogates, which a model or a file name may hold, and no tokenizer or parquet."""
    return text.encode("utf-8", "replace").decode()
