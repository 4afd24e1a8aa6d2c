"""An agent whose engine says what a script holds, a few tokens at a time, around the true turn loop and HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rocstar.errors import EngineUnavailable
from rocstar.serving.app import Agent
from rocstar.types import Completion, Finish, Sampling
from tests.rollout.examples import CODEC, STOP, roller
from tests.scripted import ScriptedEngine


class Piecewise(ScriptedEngine):
    """Goes on within a reply where the last request cut it."""

    def __init__(self, replies: Sequence[str]) -> None:
        super().__init__(CODEC, [])
        self.replies = list(replies)
        self.asked: list[tuple[int, ...]] = []
        self.closed = 0
        self._left: list[int] = []

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        if not self._left:
            if not self.replies:
                raise EngineUnavailable("the script is over")
            self.asked.append(tuple(token_ids))
            self._left = [*CODEC.encode(self.replies.pop(0)), STOP]
        taken, self._left = self._left[: sampling.max_new_tokens], self._left[sampling.max_new_tokens :]
        finish = Finish.STOP if taken[-1] == STOP else Finish.LENGTH
        return Completion(token_ids=tuple(taken), logprobs=(-0.5,) * len(taken), finish=finish)

    async def close_session(self, session_id: str) -> None:
        self.closed += 1
        self._left = []


def agent_over(engine: Any, *, token: str | None = None, positions: int = 1000) -> Agent:
    made = roller(engine, verifier=None)
    specs = [tool.spec for tool in made.conversation.tools]
    return Agent(name="small", roller=made, specs=specs, positions=positions, token=token)
