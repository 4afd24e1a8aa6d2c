"""A small trained tokenizer and a scripted engine and tool: the true environment and turn loop around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rocstar.dialogue.bpe import train_bpe
from rocstar.dialogue.calls import render_call
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.feedback import feedback_text
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.templates import template_named
from rocstar.protocols import Engine, Tool
from rocstar.rollout.collect import Roller
from rocstar.rollout.environment import AttemptLimits, Conversation, ToolEnvironment
from rocstar.rollout.episode import run_episode
from rocstar.types import Completion, Problem, Sampling, ToolCall, ToolResult, Trajectory, Verdict, problem_id
from tests.scripted import ScriptedEngine, ScriptedTool, ScriptedVerifier

QUESTION = "What is 2 + 3?"
PROBLEM = Problem(id=problem_id(QUESTION), question=QUESTION, answer="5")
TEMPLATE = template_named("compact")
ANSWER = "<answer>\\boxed{5}</answer>"


def program(code: str, name: str = "python") -> str:
    return render_call(name, {"code": code})


def small_codec() -> Codec:
    opening, reply = text_of(TEMPLATE.opening(QUESTION, ())), text_of(TEMPLATE.reply(["5"]))
    texts = [opening, program("print(2+3)"), reply, ANSWER] * 3
    return train_bpe(texts, vocab_size=220, markers=TEMPLATE.markers, word_merges=False)


CODEC = small_codec()
STOP = CODEC.token_id(TEMPLATE.stop)


def conversation(*tools: Tool) -> Conversation:
    words = partial(feedback_text, max_chars=200, truncate="middle", errors="short")
    return Conversation(codec=CODEC, template=TEMPLATE, tools=tools, feedback=words)


def limits(**changes: int) -> AttemptLimits:
    return AttemptLimits(**{"max_turns": 4, "max_response_tokens": 400, "max_parallel_calls": 2, **changes})


def roller(engine: Any, talk: Conversation | None = None, **more: Any) -> Roller:
    """Of attempts that are all right. talk: with a tool that adds 2 and 3 where none is given; more: other fields."""
    fields = {"verifier": ScriptedVerifier(lambda problem, trajectory: Verdict.RIGHT), "limits": limits()}
    talk = talk or conversation(ScriptedTool({"print(2+3)": "5\n"}))
    return Roller(**{"engine": engine, "conversation": talk, "stop_token_ids": (STOP,), **fields, **more})


def environment(*tools: Tool, **changes: int) -> ToolEnvironment:
    return ToolEnvironment(PROBLEM, conversation(*tools), limits(**changes), seed=1)


async def attempt(engine: Engine | Sequence[str], *tools: Tool, **changes: int) -> Trajectory:
    """One episode; the engine may be given as the texts it replays."""
    made: Any = ScriptedEngine(CODEC, engine) if isinstance(engine, list) else engine
    sampling = Sampling(max_new_tokens=1, seed=3, stop_token_ids=(STOP,))
    return await run_episode(made, environment(*tools, **changes), PROBLEM, index=0, sampling=sampling, session_id="s")


class Waiting(ScriptedTool):
    """A tool that answers when it is allowed to; says whether it was cancelled."""

    def __init__(self) -> None:
        super().__init__({"print(2+3)": "5\n"})
        self.asked, self.go = asyncio.Event(), asyncio.Event()
        self.cancelled = False

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        self.asked.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return await super().run(call, seed=seed)


class Endless(ScriptedEngine):
    """An engine that never answers; says whether it was cancelled and which sessions were closed."""

    def __init__(self) -> None:
        super().__init__(CODEC, [])
        self.asked = asyncio.Event()
        self.cancelled = False
        self.closed: list[str] = []

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        raise AssertionError("unreachable")

    async def close_session(self, session_id: str) -> None:
        self.closed.append(session_id)


def replies_in(trajectory: Trajectory) -> list[str]:
    return [CODEC.decode(turn.reply_ids) for turn in trajectory.turns]


Script = Callable[[str], Sequence[str]]
