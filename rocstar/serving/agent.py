"""One answer of a model, streamed piece by piece: the same turn loop, tools and limits as a rollout's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rocstar.data.sft.format import Chat
from rocstar.data.sft.render import encoded, pieces
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import Template
from rocstar.errors import DataError
from rocstar.protocols import Engine, Environment, ForwardingEngine, Reply, ToolSpec
from rocstar.record.atomic import plain
from rocstar.rollout.collect import Roller
from rocstar.rollout.episode import run_episode
from rocstar.types import (
    Completion,
    Finish,
    Problem,
    Sampling,
    ToolCall,
    ToolResult,
    Trajectory,
    problem_id,
    seed_for,
    spans_of,
    utf8,
)

PIECE_TOKENS = 8  # tokens between two streamed pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A tool call and its result; `told`: the text for the policy."""

    call: ToolCall
    result: ToolResult
    told: str

    def shown(self) -> str:
        """For a person to read, in Markdown."""
        program = self.call.arguments.get("code")
        language, asked = ("python", program) if isinstance(program, str) else ("", self.call.raw.strip())
        return utf8(f"```{language}\n{asked}\n```\n```output\n{self.told}\n```\n")

    def as_data(self) -> dict[str, Any]:
        """For programs to read, without lone surrogates, which a model can write."""
        fields = {
            "tool": self.call.tool,
            "arguments": plain(self.call.arguments),
            "status": str(self.result.status),
            "output": self.told,
            "seconds": round(self.result.run_seconds, 4),
        }
        found: dict[str, Any] = json.loads(utf8(json.dumps(fields, ensure_ascii=False)))
        return found


Event = str | Ran | Trajectory
"""Text that the policy wrote outside of calls, a call that was run, or the whole answer at its end."""


def history_ids(messages: Chat, roller: Roller, specs: Sequence[ToolSpec], most: int) -> tuple[int, ...]:
    """A conversation up to where the assistant is to write, as tokens. Its roles must have been checked. Raises
    DataError for a text that must have more than `most` tokens, because encoding it would keep others waiting."""
    template, codec = roller.conversation.template, roller.codec
    parts = [*pieces(messages, template, specs)]
    if (least := codec.least_tokens("".join(part.text for part in parts))) > most:
        raise DataError(
            f"the conversation has at least {least} tokens, which is more than the context length of {most}; shorten it"
        )
    return encoded(parts, codec, template.reserved).token_ids


def problem_of(question: str) -> Problem:
    """A problem without a reference answer, which is not graded."""
    return Problem(id=problem_id(question), question=question, answer="")


def environment_for(roller: Roller, question: str, seed: int) -> Environment:
    """Make the environment of one answer, as the recipe's environments are made."""
    return roller.environment(problem_of(question), roller.conversation, roller.limits, seed)


async def answered(
    roller: Roller, question: str, opened: tuple[int, ...] | None, sampling: Sampling
) -> AsyncIterator[Event]:
    """The events of one answer, its trajectory last. A service failure is reported in its `fault`.

    opened: the conversation so far with this question at its end; None where it begins with it. Leaving the iteration
    early cancels the rest."""
    events: asyncio.Queue[Event | None] = asyncio.Queue()
    task = asyncio.create_task(_attempt(roller, question, opened, sampling, events.put_nowait))
    task.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield event
        yield await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _attempt(
    roller: Roller, question: str, opened: tuple[int, ...] | None, sampling: Sampling, tell: Callable[[Event], None]
) -> Trajectory:
    visible = VisibleText(roller.codec, roller.conversation.template)
    last = gap = ""  # the character said last; what keeps the next turn's text apart from it

    def say(text: str) -> None:
        nonlocal last, gap
        if text:
            tell(gap + text)
            last, gap = text[-1], ""

    def replied(completion: Completion, reply: Reply) -> None:
        nonlocal gap
        say(visible.rest(completion.token_ids))
        gap = "" if last in ("", "\n") else "\n"
        for call, result in zip(reply.calls, reply.results, strict=False):
            tell(Ran(call=call, result=result, told=roller.conversation.feedback(result)))

    problem, environment = problem_of(question), environment_for(roller, question, sampling.seed)
    return await run_episode(
        StreamedEngine(engine=roller.engine, piece=PIECE_TOKENS, told=lambda written: say(visible.fresh(written))),
        WatchedEnvironment(environment=environment, told=replied),
        problem,
        index=0,
        sampling=replace(sampling, stop_token_ids=roller.stop_token_ids),
        session_id=f"{sampling.seed:x}/{problem.id}/{id(visible):x}",
        begun=opened,
    )


class StreamedEngine(ForwardingEngine):
    """An engine that is asked for a few tokens at a time; its session keeps what it has computed in between.

    Greedy completions are those of the engine itself. Sampled ones differ from those of a single request, because a
    token's randomness depends on where its request began; they are the same for the same `piece` and seed."""

    def __init__(self, engine: Engine, *, piece: int, told: Callable[[Sequence[int]], None]) -> None:
        """piece: tokens asked for at a time. told: gets all tokens of the completion so far, after each piece."""
        super().__init__(engine)
        self._piece, self._told = piece, told

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        parts: list[Completion] = []
        written: list[int] = []
        while True:
            asked = replace(
                sampling,
                max_new_tokens=min(self._piece, sampling.max_new_tokens - len(written)),
                seed=seed_for(sampling.seed, len(written)),
            )
            name = f"{request_id}/{len(written)}"
            part = await super().generate([*token_ids, *written], asked, request_id=name, session_id=session_id)
            parts.append(part)
            written += part.token_ids
            self._told(written)
            if part.finish is not Finish.LENGTH or not part.token_ids or len(written) >= sampling.max_new_tokens:
                return Completion(
                    token_ids=tuple(written),
                    logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
                    finish=part.finish,
                    version_spans=spans_of(version for part in parts for version in part.versions),
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedEnvironment:
    """An environment that reports its replies."""

    environment: Environment
    told: Callable[[Completion, Reply], None]

    def opening(self) -> tuple[int, ...]:
        return self.environment.opening()

    def budget(self) -> int:
        return self.environment.budget()

    async def reply(self, completion: Completion) -> Reply:
        reply = await self.environment.reply(completion)
        self.told(completion, reply)
        return reply

    async def close(self) -> None:
        await self.environment.close()


class VisibleText:
    """The text of completions for people while it is written: outside tool calls, without the markers that end a turn.
    Text that may become such a marker is held back."""

    def __init__(self, codec: Codec, template: Template) -> None:
        self._codec = codec
        self._ends = codec.stop_ids(template)  # GLM's answers end with what begins the next turn
        self._calls = template.calls
        self._markers = (template.stop, *template.calls.reserved, *getattr(template.calls, "call", ())[:1])
        self._shown = 0

    def fresh(self, token_ids: Sequence[int]) -> str:
        """The newly showable text, given all tokens of the completion so far."""
        text = self._text(token_ids)
        ends = [found for marker in self._markers if (found := text.find(marker)) >= 0]
        end = min(ends, default=len(text) - _held(text, self._markers))
        fresh = text[self._shown : end]
        self._shown = max(self._shown, end)
        return fresh

    def rest(self, token_ids: Sequence[int]) -> str:
        """The text held back, once the completion is finished. The next tokens belong to another completion."""
        text = self._calls.strip(self._text(token_ids))
        fresh, self._shown = text[self._shown :], 0
        return fresh

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids[:-1] if token_ids and token_ids[-1] in self._ends else token_ids)


def _held(text: str, markers: Sequence[str]) -> int:
    """How many last characters may begin a marker, or an incomplete character."""
    broken = len(text) - len(text.rstrip("\ufffd"))
    begun = (size for marker in markers for size in range(1, len(marker)) if text.endswith(marker[:size]))
    return max(broken, max(begun, default=0))
