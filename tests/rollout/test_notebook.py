"""Attempts with a notebook of their own, over real sessions: what they share, what faults become, that they end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rocstar.errors import SandboxUnavailable
from rocstar.rollout.environment import Conversation
from rocstar.sandbox.call import Limits as ProgramLimits
from rocstar.sandbox.client import SandboxClient, Session
from rocstar.tools.notebook import NotebookTool
from rocstar.types import Sampling, Stop, ToolCall, ToolResult
from tests.rollout.examples import ANSWER, CODEC, PROBLEM, conversation, program, replies_in, roller
from tests.sandbox.driver import eventually
from tests.scripted import ScriptedEngine

LIMITS = ProgramLimits(wall_seconds=20.0, cpu_seconds=20.0)
OTHER = replace(PROBLEM, id="other", question="And 3 + 3?")
TWO_CELLS = [program("x = 41"), program("print(x + 1)"), ANSWER]


class Notebooks:
    """Makes notebooks over a sandbox; remembers their sessions and the most that were open at once."""

    def __init__(self, client: SandboxClient) -> None:
        self.client = client
        self.sessions: list[Session] = []
        self.most_open = 0

    def open_session(self, *, limits: ProgramLimits, seed: int, replay: bool, waits: bool) -> Session:
        self.sessions.append(self.client.open_session(limits=limits, seed=seed, replay=replay, waits=waits))
        self.most_open = max(self.most_open, self.open)
        return self.sessions[-1]

    @property
    def open(self) -> int:
        return sum(not session.closed for session in self.sessions)

    def committed(self) -> list[int]:
        """Cells of each session that came to their end."""
        return [session.cells for session in self.sessions]

    def conversation(self, kind: type[NotebookTool] = NotebookTool) -> Conversation:
        return replace(conversation(), own_tools=lambda: (kind(self, LIMITS, name="python"),))


@pytest.fixture(scope="module")
def client() -> Iterator[SandboxClient]:
    with SandboxClient.start(slots=2, preload=()) as sandbox:
        yield sandbox


@pytest.fixture
def notebooks(client: SandboxClient) -> Notebooks:
    return Notebooks(client)


async def test_calls_of_an_attempt_share_names_and_its_session_is_closed_at_its_end(notebooks: Notebooks) -> None:
    made = roller(ScriptedEngine(CODEC, TWO_CELLS), notebooks.conversation())
    for group in await made.roll([PROBLEM, OTHER], attempts=3, seed=1):
        for trajectory in group.trajectories:
            assert trajectory.stop is Stop.ANSWERED and "42" in replies_in(trajectory)[1]
    assert (len(notebooks.sessions), notebooks.open) == (6, 0)
    assert notebooks.most_open > 1


async def test_an_attempt_that_calls_nothing_opens_no_session(notebooks: Notebooks) -> None:
    await roller(ScriptedEngine(CODEC, [ANSWER]), notebooks.conversation()).roll([PROBLEM], attempts=1, seed=1)
    assert notebooks.sessions == []


@pytest.mark.parametrize(
    ("cell", "done"), [("import time; time.sleep(15)", 1), ("x", 2)], ids=["in a cell", "between cells"]
)
async def test_cancelling_a_step_closes_its_sessions(notebooks: Notebooks, cell: str, done: int) -> None:
    class Stuck(ScriptedEngine):
        """Never comes to the third completion."""

        async def generate(self, token_ids: Any, sampling: Sampling, **names: Any) -> Any:
            if names["request_id"].endswith("/turn2"):
                await asyncio.Event().wait()
            return await super().generate(token_ids, sampling, **names)

    made = roller(Stuck(CODEC, [program("x = 1"), program(cell), ANSWER]), notebooks.conversation())
    task = asyncio.create_task(made.roll([PROBLEM], attempts=3, seed=1))
    assert await asyncio.to_thread(eventually, lambda: notebooks.committed() == [done] * 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert (len(notebooks.sessions), notebooks.open) == (3, 0)


class Lost(NotebookTool):
    """Fails by our fault when the code says so."""

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        if "fault" in call.arguments["code"]:
            raise SandboxUnavailable("gone")
        return await super().run(call, seed=seed)


async def test_a_sandbox_that_stays_away_ends_the_attempt_as_ours_and_its_session_is_closed(
    notebooks: Notebooks,
) -> None:
    texts = [program("x = 1"), program("fault"), ANSWER]
    made = roller(ScriptedEngine(CODEC, texts), notebooks.conversation(Lost))
    (group,) = await made.roll([PROBLEM], attempts=2, seed=1)
    for trajectory in group.trajectories:
        assert (trajectory.stop, trajectory.outcome) == (Stop.ENVIRONMENT_FAILED, None)
        assert trajectory.fault == "gone"
        assert trajectory.turns[1].results == ()
    assert (len(notebooks.sessions), notebooks.open) == (2, 0)
