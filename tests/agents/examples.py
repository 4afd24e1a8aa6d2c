"""An attempt over a scripted engine that remembers what it was shown for each completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rocstar.agents.attempt import AgentAttempt
from rocstar.data.sft.format import Chat, Message, Role
from rocstar.protocols import Tool
from rocstar.types import Completion, Sampling, Trajectory
from tests.rollout.examples import CODEC, PROBLEM, conversation, limits, roller
from tests.scripted import ScriptedEngine


class Told(ScriptedEngine):
    """Gives its replies in the order of all requests, whichever session asks."""

    def __init__(self, replies: Sequence[str]) -> None:
        self._left = list(replies)
        super().__init__(CODEC, lambda session: self._next)
        self._next: list[str] = []
        self.given: list[tuple[tuple[int, ...], Completion]] = []
        """(what was continued, the completion), in order."""
        self.closed: list[str] = []

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, **names: Any) -> Completion:
        self._next = [self._left.pop(0)] if self._left else []
        await ScriptedEngine.close_session(self, names["session_id"])  # its place in the script
        made = await super().generate(token_ids, sampling, **names)
        self.given.append((tuple(token_ids), made))
        return made

    async def close_session(self, session_id: str) -> None:
        self.closed.append(session_id)


def attempt(engine: Any, *tools: Tool, **changes: int) -> AgentAttempt:
    made = roller(engine, conversation(*tools) if tools else None, limits=limits(**changes))
    return AgentAttempt(made, PROBLEM, Sampling(max_new_tokens=1, seed=3), "a")


def made_by(one: AgentAttempt) -> Trajectory:
    return one.trajectory(0, None, None, 0.0)


def chat(*said: str | Message) -> Chat:
    """User and assistant by turns, the user first; messages as they are."""
    roles = (Role.USER, Role.ASSISTANT)
    messages = [
        one if isinstance(one, Message) else Message(role=roles[n % 2], content=one) for n, one in enumerate(said)
    ]
    return Chat(messages=tuple(messages), tools=None)


def shown_and_learnt(trajectory: Trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(what stands before it in its conversation, tokens with loss) of each completion."""
    found = []
    for part in trajectory.conversations:
        ids = part.prompt_ids
        for turn in part.turns:
            found.append((ids, turn.completion.token_ids))
            ids = (*ids, *turn.completion.token_ids, *turn.reply_ids)
    return found
