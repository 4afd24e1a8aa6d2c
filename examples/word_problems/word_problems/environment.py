"""Masked questions run: the line that says what n0 and n1 are stands in front of each program, like a worksheet."""

from __future__ import annotations

from dataclasses import replace

from rocstar.protocols import Tool, ToolSpec
from rocstar.rollout.environment import AttemptLimits, Conversation, ToolEnvironment
from rocstar.types import Problem, ToolCall, ToolResult
from word_problems.rows import given


class GivenEnvironment(ToolEnvironment):
    """A conversation with tools; the call that is recorded stays what the model wrote."""

    def __init__(self, problem: Problem, conversation: Conversation, limits: AttemptLimits, seed: int) -> None:
        tools = tuple(GivenTool(tool, given(problem)) for tool in conversation.tools)
        super().__init__(problem, replace(conversation, tools=tools), limits, seed)


class GivenTool:
    """A Python tool that runs `given`, then the program; both are as before where nothing is given."""

    def __init__(self, tool: Tool, given: str) -> None:
        self._tool = tool
        self._given = given

    @property
    def spec(self) -> ToolSpec:
        return self._tool.spec

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        code = call.arguments.get("code")
        if isinstance(code, str):
            call = replace(call, arguments={**call.arguments, "code": f"{self._given}{code}"})
        return await self._tool.run(call, seed=seed)
