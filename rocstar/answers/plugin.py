"""Verifiers by name, and a user's own reward function as one: `evaluate.verifier = "package.module:function"`, in TRL's
batch signature or verl's per-sample one. The function is the user's own code: it runs in this process, off the event
loop and without a sandbox; a plain one one call at a time, an `async def` up to MOST_AT_ONCE at once.

    def right(completions, answer, **columns):                         # TRL: one completion a call, columns as lists
    def right(data_source, solution_str, ground_truth, extra_info):    # verl: without a list around what it returns

It returns a finite number, which is the reward, or None (TRL) for "undecided"; above `right_above` the attempt is
right. A dict has it as "score"; its other numbers are parts of the reward, which become metrics. An exception is an
outage, never a reward, and so is nan. `rocstar reward test` calls it as training does.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from rocstar.answers.cases import Case
from rocstar.answers.extract import Truncated, counts_as_cut, written
from rocstar.answers.grade import BY_VERIFIER, Grade, Grader
from rocstar.answers.reward import LARGEST, RewardParts, number_of, parts_in
from rocstar.answers.verifier import TRUNCATED, BoxedVerifier, ToolOutputVerifier, outcome
from rocstar.dialogue.calls import HERMES, CallSyntax
from rocstar.dialogue.feedback import feedback_text
from rocstar.errors import ConfigError, VerifierUnavailable
from rocstar.protocols import TextCodec, Verifier
from rocstar.support.plugins import copied, load, own_loop, raised_by, run_in_daemon_thread
from rocstar.types import RIGHT_ABOVE, Outcome, Problem, Trajectory, Verdict

NAMES = ("boxed", "boxed_strict", "boxed_text", "tool_output")
SECONDS = 60.0  # wall time of one call, without its wait for those before it
MOST_AT_ONCE = 64  # calls of an async function, which may ask a judge that needs seconds
TRL, VERL = "trl", "verl"
SHOWN_CHARS = 80  # of a function's result, in a message
OF_TEXTS = frozenset({"reward_model", "reward_spec"})
"""Columns of verl's and SkyRL's rows, whose prompts are messages though their functions take texts."""
WHOLE = 1 << 22  # characters of a tool's reply that a function sees; sandbox.output_bytes allows fewer
Function = Callable[..., Any]


def verifier_named(
    name: str,
    codec: TextCodec,
    grader: Grader,
    *,
    truncated: Truncated = "wrong",
    phrases: bool = False,
    calls: CallSyntax = HERMES,
    folders: Sequence[Path | str] = (),
    right_above: float = RIGHT_ABOVE,
    ends: Collection[int] = (),
) -> Verifier:
    """The verifier that `evaluate.verifier` names: one of NAMES, or a function (`load_reward`). The settings are those
    of BoxedVerifier, and of RewardVerifier. Raises ConfigError."""
    if name == "tool_output":
        return ToolOutputVerifier(codec, truncated=truncated, calls=calls)
    if name in NAMES:
        strict = name == "boxed_strict"
        grader = Grader(graders=BY_VERIFIER[name]) if name in BY_VERIFIER else grader  # owns no process
        return BoxedVerifier(codec, grader, strict=strict, truncated=truncated, phrases=phrases, calls=calls)
    reward = load_reward(name, folders)
    return RewardVerifier(codec, reward, truncated=truncated, calls=calls, right_above=right_above, ends=ends)


def columns_for(name: str, folders: Sequence[Path | str] = ()) -> Sequence[str]:
    """Columns of the data that this verifier cannot do without; needs no model. Raises ConfigError for a name that
    `verifier_named` does not take."""
    return () if name in NAMES else load_reward(name, folders).columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The text of an attempt, in each form that a function may take."""

    text: str
    """Of all turns, without calls and replies."""
    messages: Sequence[Mapping[str, Any]]
    """The same with calls that parsed and replies, in TRL's form: `tool_calls`, and messages of role `tool`."""
    ids: Sequence[int] | None = None
    """All tokens after the prompt; None if there are none, in `reward test`."""

    @property
    def turns(self) -> int:
        """As verl counts turns: the question, the assistant's, and those of tools."""
        roles = [str(message["role"]) for message in self.messages]
        return 1 + sum(before != here for before, here in pairwise(["user", *roles]))

    @classmethod
    def of_text(cls, text: str) -> Transcript:
        return cls(text=text, messages=[{"role": "assistant", "content": text}])

    @classmethod
    def of_attempt(cls, texts: Sequence[str], trajectory: Trajectory) -> Transcript:
        """texts: of each turn, without its calls."""
        messages: list[dict[str, Any]] = []
        for text, turn in zip(texts, trajectory.turns, strict=True):
            calls = [
                {"type": "function", "function": {"name": call.tool, "arguments": copied(dict(call.arguments))}}
                for call in turn.calls
                if call.parse_error is None
            ]
            messages.append({"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}))
            for call, result in zip(turn.calls, turn.results, strict=False):
                reply = feedback_text(result, max_chars=WHOLE, truncate="middle", errors="full")
                messages.append({"role": "tool", "name": call.tool, "content": reply})
        return cls(text="\n".join(texts), messages=messages, ids=trajectory.token_ids[len(trajectory.prompt_ids) :])


@dataclass(slots=True)
class Reward:
    """A reward function, called as training does: off the event loop, each call within a time limit."""

    name: str
    function: Function
    signature: str
    """`trl` or `verl`."""
    takes: frozenset[str] | None
    """The names of its parameters; None if it takes any."""
    chat: bool | None
    """Completions are conversations, lists of messages, not texts: their annotation contains a dict. None: there is no
    annotation, and they have the form of the prompt in TRL's rows."""
    columns: Sequence[str] = ()
    """Columns of the data that it requires: parameters of TRL's signature without a default."""
    seconds: float = SECONDS
    """Wall time of one call; after it the attempt has no verdict, though the call still runs."""
    _places: asyncio.Semaphore = field(init=False)
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Also after a call whose waiter was cancelled."""
    _overdue: Future[Any] | None = field(default=None, init=False)
    """The last call of a plain function that took too long."""

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.at_once)

    @property
    def is_async(self) -> bool:
        return any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))

    @property
    def at_once(self) -> int:
        """Calls under way, at most."""
        return MOST_AT_ONCE if self.is_async else 1

    def __call__(self, problem: Problem, transcript: Transcript) -> Any:
        """What the function returns for one attempt, for `reward_in`; a coroutine if it is async. Raises the function's
        own errors."""
        columns = self.arguments(problem, transcript)
        return self.function(**{name: columns[name] for name in columns if self.takes is None or name in self.takes})

    def arguments(self, problem: Problem, transcript: Transcript) -> dict[str, Any]:
        """All arguments that it may take, by name: in TRL's signature columns of one row, whose own names win."""
        known = {"question": problem.question, "source": problem.source}
        row = copied(dict(problem.metadata))  # later attempts get the same
        if self.signature == VERL:
            inner = row["extra_info"] if isinstance(row.get("extra_info"), Mapping) else {}
            return {
                "data_source": row.get("data_source", problem.source),
                "solution_str": transcript.text,
                "ground_truth": problem.answer,
                "extra_info": {**known, **row, **inner, "num_turns": transcript.turns},
            }
        golds = dict.fromkeys(("answer", "solution", "ground_truth"), problem.answer)
        columns: dict[str, Any] = {name: [value] for name, value in {**golds, **known, **row}.items()}
        of_trl = bool(problem.messages) and not row.keys() & OF_TEXTS
        is_chat = of_trl if self.chat is None else self.chat
        asked = [*map(dict, problem.messages)] or [{"role": "user", "content": problem.question}]
        columns["prompts"] = [asked if is_chat else problem.question]
        columns["completions"] = [list(transcript.messages) if is_chat else transcript.text]
        return columns | ({} if transcript.ids is None else {"completion_ids": [list(transcript.ids)]})

    async def judge(self, problem: Problem, transcript: Transcript, case: str) -> tuple[float | None, RewardParts]:
        """The reward, or None for "undecided", and its parts. case: names the attempt. Raises VerifierUnavailable
        where the function raised, took too long or returned nan or inf, and ConfigError for what is not a number."""
        hint = " An async def must leave its event loop free while it waits." if self.is_async else ""
        late = VerifierUnavailable(f"{self.name} gave no reward within {self.seconds:g} s.{hint}")
        async with self._places:  # many groups of a step may end at once
            if self._overdue is not None and not self._overdue.done():
                raise late  # a hanging call would delay each later one as much
            if self.is_async:
                done = asyncio.run_coroutine_threadsafe(self._awaited(problem, transcript), own_loop())
            else:
                done = run_in_daemon_thread(lambda: self._called(problem, transcript), "reward")
            try:
                given, parts = await asyncio.wait_for(asyncio.wrap_future(done), self.seconds)
            except TimeoutError:
                self._overdue = None if self.is_async else done
                raise late from None
        message = f"{self.name} gave {repr(given)[:SHOWN_CHARS]} as the reward of {case}"
        try:
            reward = None if given is None else number_of(given)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{message}; let it return a number, such as 1 for right and 0 for wrong.") from error
        if reward is not None and not math.isfinite(reward):
            raise VerifierUnavailable(f"your reward function {message}; let it return a number up to {LARGEST:g}.")
        return reward, parts

    def _called(self, problem: Problem, transcript: Transcript) -> tuple[Any, RewardParts]:
        with self._one_at_a_time, self._blamed():
            given = self(problem, transcript)
            if inspect.iscoroutine(given):  # of a function that does not say that it is async
                given = asyncio.run(given)
            return reward_in(given, self.signature)

    async def _awaited(self, problem: Problem, transcript: Transcript) -> tuple[Any, RewardParts]:
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its waiter may have been cancelled
        with self._blamed():
            return reward_in(await self(problem, transcript), self.signature)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """What the function raises, or returns in another shape, is told with its name."""
        try:
            yield
        except ConfigError as wrong:
            raise ConfigError(f"your reward function {self.name} {wrong}") from wrong
        except BaseException as error:  # the user's code: SystemExit must not count as an answer either
            message = f"your reward function {self.name} raised {raised_by(self.function, error)}."
            raise VerifierUnavailable(message) from error


def load_reward(reference: str, folders: Sequence[Path | str] = ()) -> Reward:
    """`package.module:function` or `file.py:function`. Raises ConfigError when it cannot be loaded, or not be called as
    TRL or verl call it, whatever columns the data has."""
    if ":" not in reference:
        nearest = get_close_matches(reference, NAMES, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"evaluate.verifier {reference!r} is unknown; the nearest is {nearest!r}, of {', '.join(NAMES)}, "
            "or package.module:function."
        )
    function = load_function(reference, folders, "evaluate.verifier")
    reward = reward_of(reference, function, f"evaluate.verifier = {reference!r}")
    given = reward.arguments(Problem(id="", question="", answer=""), replace(Transcript.of_text(""), ids=()))
    missing = [
        name for name, one in inspect.signature(function).parameters.items()
        if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and name not in given
    ]  # fmt: skip
    if missing and reward.signature == VERL:
        raise ConfigError(
            f"{reference} requires {', '.join(missing)}, which no verifier gets; it may take {', '.join(given)}, and "
            "extra_info has the columns of the data."
        )
    return replace(reward, columns=missing)


def reward_of(name: str, function: Function, said: str = "the reward function") -> Reward:
    """said: the function's name in messages. Raises ConfigError if its parameters are neither TRL's nor verl's."""
    signature, parameters = signature_of(function, said), inspect.signature(function).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    annotated = parameters["completions"].annotation if "completions" in parameters else None
    chat = None if annotated is inspect.Parameter.empty else "dict" in str(annotated).lower()
    return Reward(name, function, signature, None if takes_any else frozenset(parameters), chat)


def load_function(name: str, folders: Sequence[Path | str] = (), setting: str = "reward function") -> Function:
    """`module:function`, or `file.py:function` as verl names it; a class is made without arguments. `folders` and the
    current one are searched. Raises ConfigError."""
    found = load(name, folders=(*folders, Path.cwd()), setting=setting)
    if not inspect.isclass(found):
        return cast(Function, found)
    try:
        return cast(Function, found())
    except Exception as error:
        raise ConfigError(f"{name} is a class that cannot be made without arguments: {error}.") from error


def signature_of(function: Function, name: str = "the reward function") -> str:
    """`trl` or `verl`, by the names of its parameters. Raises ConfigError if they match neither."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # of builtins
        raise ConfigError(f"{name} has no readable signature; wrap it in a function of your own.") from error
    if "completions" in parameters:
        return TRL
    if "solution_str" in parameters:
        return VERL
    raise ConfigError(
        f"{name} takes ({', '.join(parameters)}); TRL's signature has completions, verl's solution_str; call it from "
        "a function with one of these (docs/moving.md)."
    )


def reward_in(given: Any, signature: str) -> tuple[Any, RewardParts]:
    """The reward of the one completion, unchecked, and its parts. Raises ConfigError, a message to follow the
    function's name, if the function returned another shape."""
    shown = repr(given)[:SHOWN_CHARS]
    if signature == TRL:
        if isinstance(given, str | Mapping) or not hasattr(given, "__iter__"):
            raise ConfigError(f"gave {shown}; let it return a list, with one number for each completion")
        rewards = list(given)
        if len(rewards) != 1:
            raise ConfigError(f"gave {len(rewards)} rewards for 1 completion")
        (given,) = rewards
    if not isinstance(given, Mapping):
        return given, {}
    if "score" not in given:
        raise ConfigError(f'gave {shown}; let it return a number, or a dict with the number as "score"')
    return given["score"], parts_in(given, "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    case: Case
    reward: float | None
    """The function's reward; None if it returned None (TRL) or failed."""
    parts: Mapping[str, float]
    error: str
    """Why training would have no reward; empty otherwise."""
    milliseconds: float
    """Wall time."""


async def scores(reward: Reward, cases: Iterable[Case], seconds: float = SECONDS) -> list[Scored]:
    """The function's reward for each case. A call that hangs can't be ended, so the cases after it are
    not asked."""
    timed = replace(reward, seconds=seconds)
    places = asyncio.Semaphore(reward.at_once)

    async def scored(case: Case) -> Scored:
        given, parts, error = None, RewardParts(), ""
        async with places:
            started = time.perf_counter()
            try:
                said = Transcript.of_text(case.text)
                given, parts = await timed.judge(_problem_of(case), said, f"line {case.line}")
            except (ConfigError, VerifierUnavailable) as failure:
                error = str(failure)
            spent = 1000 * (time.perf_counter() - started)
        return Scored(case=case, reward=given, parts=parts, error=error, milliseconds=spent)

    return await asyncio.gather(*map(scored, cases))


def failures_on_answer(name: str, folders: Sequence[Path | str], problem: Problem) -> Iterator[str]:
    """Warns if the function fails on a problem's own answer; a run would tell after cold start and evaluation."""
    said = replace(Transcript.of_text(f"<answer>\\boxed{{{problem.answer}}}</answer>"), ids=())
    try:
        asyncio.run(load_reward(name, folders).judge(problem, said, "it"))
    except (ConfigError, VerifierUnavailable) as error:
        yield (
            f"warning: for the first problem's own answer, in a box, {str(error).rstrip('.')}. Attempts without a "
            f"reward halt the run; try it on all problems: rocstar reward test {name} --data FILE"
        )


def _problem_of(case: Case) -> Problem:
    """The problem of a case, whose columns are those of its row."""
    row = case.columns
    prompt = row.get("prompt", row.get("prompts", ""))
    question = "\n".join(str(one.get("content")) for one in prompt) if isinstance(prompt, list) else prompt
    golds = dict.fromkeys(("answer", "solution", "ground_truth"), case.gold) if case.gold else {}
    return Problem(
        id=f"line {case.line}",
        question=str(row.get("question", question)),
        answer=case.gold,
        source=str(row.get("data_source", "")),
        metadata={**row, **golds},
        messages=tuple(prompt) if isinstance(prompt, list) else (),
    )


@dataclass(frozen=True, slots=True)
class RewardVerifier:
    """Judges by a reward function, which gets the text of each attempt without tool calls and tool replies."""

    codec: TextCodec
    reward: Reward
    _: KW_ONLY
    truncated: Truncated = "wrong"
    calls: CallSyntax = HERMES
    right_above: float = RIGHT_ABOVE
    """A larger reward is RIGHT."""
    ends: Collection[int] = ()
    """Tokens that end a turn; the function does not see them, as in TRL and verl."""

    async def verify_all(self, attempts: Sequence[tuple[Problem, Trajectory]]) -> list[Outcome | VerifierUnavailable]:
        """VerifierUnavailable where the function raised, took too long or returned nan or inf. Raises ConfigError for a
        result that is not a number, ContractBroken for an ENVIRONMENT_FAILED trajectory."""
        cut = [counts_as_cut(trajectory, self.truncated) for _, trajectory in attempts]
        judged = (self._verify(*attempt, is_cut) for attempt, is_cut in zip(attempts, cut, strict=True))
        return await asyncio.gather(*judged)

    async def _verify(self, problem: Problem, trajectory: Trajectory, is_cut: bool) -> Outcome | VerifierUnavailable:
        """A cut attempt is wrong and earns at most 0, but the function is still called: if wrong answers get a negative
        reward, running into the limit must not be cheaper."""
        texts = written(self.codec, self.calls, trajectory, self.ends)
        case = f"attempt {trajectory.index} at problem {problem.id} ({problem.question[:60]!r})"
        try:
            reward, parts = await self.reward.judge(problem, Transcript.of_attempt(texts, trajectory), case)
        except VerifierUnavailable as error:
            return error
        if is_cut:
            reward = min(0.0, reward or 0.0)
        verdict = Verdict.UNDECIDED
        if reward is not None:
            verdict = Verdict.RIGHT if reward > self.right_above else Verdict.WRONG
        prompt = self.codec.decode(trajectory.prompt_ids)
        found = outcome(TRUNCATED if is_cut else Grade(verdict, "function", None), texts, prompt, reward)
        return replace(found, parts=parts) if isinstance(found, Outcome) else found
