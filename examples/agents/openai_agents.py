"""An agent of the OpenAI Agents SDK (`pip install openai-agents`), unchanged but for the address and the key. All
attempts share one client's connections: one of its own each would set up TLS each."""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

MOST_TURNS = 4
OPENAI = AsyncOpenAI(base_url="http://of.each.attempt", api_key="of each attempt", timeout=600)
set_tracing_disabled(True)


async def solve(problem: Any, client: Any) -> None:
    @function_tool
    async def python(code: str) -> str:
        """Runs a program."""
        return str(await client.call("python", code=code))

    own = OPENAI.with_options(base_url=client.base_url, api_key=client.api_key)
    agent = Agent(name="solver", tools=[python], model=OpenAIResponsesModel("policy", own))
    await Runner.run(agent, problem.question, max_turns=MOST_TURNS)  # the model's last words are judged
