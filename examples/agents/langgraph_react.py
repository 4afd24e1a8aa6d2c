"""A ReAct agent of LangGraph (`pip install langgraph langchain langchain-openai`), unchanged but for the address and
the key. All attempts share one client's connections: one of its own each would set up TLS each."""

from __future__ import annotations

from typing import Any

import httpx
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

MOST_STEPS = 8  # of its graph, which makes two for each request
HTTP = httpx.AsyncClient(timeout=600)


async def solve(problem: Any, client: Any) -> None:
    @tool
    async def python(code: str) -> str:
        """Runs a program."""
        return str(await client.call("python", code=code))

    model = ChatOpenAI(model="policy", base_url=client.base_url, api_key=client.api_key, http_async_client=HTTP)
    agent = create_agent(model, [python])
    question = {"messages": [{"role": "user", "content": problem.question}]}
    await agent.ainvoke(question, {"recursion_limit": MOST_STEPS})  # the model's last words are judged
