"""An agent as a program: it knows an address and a key, and nothing of rocstar. With the `openai` package the same is
`OpenAI().chat.completions.create(...)`, unchanged."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any

ADDRESS, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOL = {"type": "function", "function": {"name": "python", "description": "Runs a program.", "parameters": PARAMETERS}}
MOST_REQUESTS = 4


def post(path: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(ADDRESS + path, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


def main() -> None:
    problem = json.load(sys.stdin)
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem["question"]}]
    for _ in range(MOST_REQUESTS):
        answer = post("/chat/completions", {"model": "policy", "messages": messages, "tools": [TOOL]})
        message = answer["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return
        for call in message["tool_calls"]:
            said = post("/tools/python", json.loads(call["function"]["arguments"]))["content"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})


main()
