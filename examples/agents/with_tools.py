"""An agent as a function: it offers the model a Python tool and has the run's sandbox run the calls."""

from __future__ import annotations

import json
from typing import Any

PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOL = {"type": "function", "function": {"name": "python", "description": "Runs a program.", "parameters": PARAMETERS}}
MOST_REQUESTS = 4


async def solve(problem: Any, client: Any) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem.question}]
    for _ in range(MOST_REQUESTS):
        answer = await client.chat(messages, tools=[TOOL])
        message = answer["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return  # the model's last words are judged
        for call in message["tool_calls"]:
            said = await client.call("python", **json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
