"""One completion under a plain chat template, without our tools, for the paper's one-turn benchmarks. Shows the
functions of a problem (`metadata["functions"]`), if any, and runs none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rocstar.dialogue.segments import Segment, foreign, ours
from rocstar.dialogue.template import end_of_answer
from rocstar.errors import EngineUnavailable
from rocstar.protocols import Reply, ToolSpec
from rocstar.rollout.environment import AttemptLimits, Conversation
from rocstar.types import Completion, Finish, Problem, Stop

Message = Mapping[str, Any]


@dataclass
class OneTurn:
    """Environment of one completion; an EnvironmentFactory."""

    problem: Problem
    conversation: Conversation
    limits: AttemptLimits
    seed: int

    def opening(self) -> tuple[int, ...]:
        return self.conversation.ids(tuple(self._segments()))

    def budget(self) -> int:
        return self.limits.max_response_tokens

    async def reply(self, completion: Completion) -> Reply:
        """Parse its calls, without answering them. Raises EngineUnavailable when the completion was aborted."""
        if completion.finish is Finish.ABORTED:
            raise EngineUnavailable("the completion was aborted before the model had ended it")
        stop = Stop.ANSWERED if completion.finish is Finish.STOP else Stop.MAX_TOKENS
        return Reply(calls=tuple(self.conversation.calls(completion, 0, specs_of(self.problem))), stop=stop)

    async def close(self) -> None:
        pass

    def _segments(self) -> Iterator[Segment]:
        template = self.conversation.template
        system, turns = split(messages_of(self.problem))
        (question, *_), specs = turns[0], specs_of(self.problem)
        yield from template.opening(question, specs, system)
        for (_, answer), (following, _) in pairwise(turns):
            yield from (foreign(answer), ours(end_of_answer(template)), *template.next_question(following))


def messages_of(problem: Problem) -> list[Message]:
    """The conversation so far; for an ordinary problem, its question."""
    found: list[Message] = problem.metadata.get("messages") or [{"role": "user", "content": problem.question}]
    return found


def specs_of(problem: Problem) -> list[ToolSpec]:
    """The functions that the model may call."""
    return [
        ToolSpec(name=one["name"], description=one.get("description", ""), parameters=one["parameters"])
        for one in problem.metadata.get("functions", ())
    ]


def split(messages: Sequence[Message]) -> tuple[str | None, list[tuple[str, str]]]:
    """(system text, turns of (user text, assistant text)); the last assistant text is empty. Adjacent messages of one
    speaker are joined."""
    system = "\n\n".join(str(one["content"]) for one in messages if one["role"] == "system") or None
    turns: list[tuple[str, str]] = []
    for message in messages:
        text = str(message["content"])
        if message["role"] == "assistant" and turns:
            user, assistant = turns[-1]
            turns[-1] = (user, f"{assistant}\n\n{text}" if assistant else text)
        elif message["role"] == "user" and turns and not turns[-1][1]:
            turns[-1] = (f"{turns[-1][0]}\n\n{text}", "")
        elif message["role"] == "user":
            turns.append((text, ""))
    return system, turns
