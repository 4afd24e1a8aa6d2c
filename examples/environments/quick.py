"""A harness of `verifiers` that asks the model in this process. Its own `null` does the same in a program for each
attempt, which takes a second of CPU to start and wants uv."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp


class Quick(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        given = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages += [message.model_dump(exclude_none=True) for message in given]
        async with AsyncExitStack() as stack:
            model = await stack.enter_async_context(AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0))
            servers = {name: {"url": url} for name, url in mcp_urls.items()}
            tools, whose, connected = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                options = {"tools": tools} if tools else {}
                asked = await model.chat.completions.create(model=ctx.model, messages=messages, **options)
                said = asked.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in said.tool_calls:
                    try:
                        text = await call_mcp(connected, whose, call.function.name, json.loads(call.function.arguments))
                    except (KeyError, TypeError, ValueError) as error:  # the model's mistake
                        text = f"error: {error}"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


__all__ = ["Quick"]
