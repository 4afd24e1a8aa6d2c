"""An attempt over a scripted engine that remembers what it was shown for each completion; agents of a test's own."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rocstar.agents.agent import GatewayAgent, agent_named
from rocstar.agents.attempt import AgentAttempt
from rocstar.config.sections import RolloutSection
from rocstar.data.sft.format import Chat, Message, Role
from rocstar.protocols import Tool
from rocstar.types import Completion, Problem, Sampling, Trajectory
from tests.rollout.examples import CODEC, PROBLEM, conversation, limits, roller
from tests.scripted import ScriptedEngine

ASKS = "    said = (await client.chat([{'role': 'user', 'content': problem.question}]))['choices'][0]['message']\n"
"""A line of an agent that is a function."""
SCRIPT = """
import json, os, sys, urllib.request
problem = json.load(sys.stdin)
def ask(messages):
    global request
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
said = ask([{"role": "user", "content": problem["question"]}])
"""
"""With which an agent that is a program begins."""


def named(
    reference: str, *, seconds: float = 20.0, at_once: int = 4, reads: Sequence[str] | None = None, **folders: Any
) -> GatewayAgent:
    """The agent that these settings of a recipe name."""
    walls = {"agent_walls": reads is not None, "agent_reads": list(reads or ())}
    rollout = RolloutSection(agent=reference, agent_seconds=seconds, agents_at_once=at_once, **walls)
    return agent_named(reference, rollout, right_above=0.5, **folders)


def function(folder: Path, text: str, **changes: Any) -> GatewayAgent:
    """The function `agent` of this source."""
    (folder / "own_agent.py").write_text(text)
    sys.modules.pop("own_agent", None)
    return named("own_agent:agent", folders=[folder], **changes)


def asking(folder: Path, then: str, *, before: str = "", **changes: Any) -> GatewayAgent:
    """A coroutine function that asks the problem's question, and does this then."""
    return function(folder, f"{before}async def agent(problem, client):\n{ASKS}{then}", **changes)


def program(folder: Path, text: str, **changes: Any) -> GatewayAgent:
    """One that asks the problem's question, and does this then."""
    (file := folder / "own_agent.py").write_text(SCRIPT + text)
    return named(f"{sys.executable} {file}", **changes)


async def nothing(number: int) -> None: ...


class Told(ScriptedEngine):
    """Gives its replies in the order of all requests, whichever session asks."""

    def __init__(self, replies: Sequence[str], does: Callable[[int], Awaitable[Completion | None]] = nothing) -> None:
        """does: what it does first, given the number of requests that it has answered; what this returns is its
        answer, else the next reply is."""
        self._left, self._does = list(replies), does
        super().__init__(CODEC, lambda session: self._next)
        self._next: list[str] = []
        self.given: list[tuple[tuple[int, ...], Completion]] = []
        """(what was continued, the completion), in order."""
        self.closed: list[str] = []

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, **names: Any) -> Completion:
        if instead := await self._does(len(self.given)):
            return instead
        self._next = [self._left.pop(0)] if self._left else []
        await ScriptedEngine.close_session(self, names["session_id"])  # its place in the script
        made = await super().generate(token_ids, sampling, **names)
        self.given.append((tuple(token_ids), made))
        return made

    async def close_session(self, session_id: str) -> None:
        self.closed.append(session_id)


async def made(agent: GatewayAgent, engine: Any, problem: Problem = PROBLEM, **changes: Any) -> Trajectory:
    """One attempt, verified as a step's attempts are. engine: or the replies of one; changes: of the roller."""
    drawn = replace(roller(Told(engine) if isinstance(engine, list) else engine, agent=agent), **changes)
    (group,) = await drawn.roll([problem], attempts=1, seed=1)
    return group.trajectories[0]


def attempt(engine: Any, *tools: Tool, **changes: int) -> AgentAttempt:
    made = roller(engine, conversation(*tools) if tools else None, limits=limits(**changes))
    sampling = Sampling(max_new_tokens=1, seed=3, stop_token_ids=made.stop_token_ids)
    return AgentAttempt(made, PROBLEM, sampling, "a")


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
