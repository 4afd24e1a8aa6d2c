from __future__ import annotations

import pytest

from rocstar.errors import SandboxUnavailable
from rocstar.types import Status, ToolCall, ToolResult
from tests.scripted import ScriptedTool


def call(code: str) -> ToolCall:
    return ToolCall(id="3", tool="python", arguments={"code": code}, raw="")


async def test_a_list_answers_in_order_and_then_says_it_has_run_out() -> None:
    tool = ScriptedTool(["a", ToolResult(call_id="", status=Status.TIMEOUT)])
    assert (await tool.run(call("1"))).stdout == "a"
    result = await tool.run(call("2"))
    assert (result.status, result.call_id) == (Status.TIMEOUT, "3")
    with pytest.raises(SandboxUnavailable, match="'3'"):
        await tool.run(call("3"))
    assert [given.arguments["code"] for given in tool.calls] == ["1", "2", "3"]


async def test_a_mapping_answers_by_program_and_does_not_know_others() -> None:
    tool = ScriptedTool({"1 + 1": "2"})
    assert (await tool.run(call("1 + 1"))).stdout == "2"
    assert (await tool.run(call("1 + 2"))).status is Status.CODE_ERROR


async def test_a_scripted_fault_is_raised_once_where_it_stands() -> None:
    tool = ScriptedTool([SandboxUnavailable("down"), "up"])
    with pytest.raises(SandboxUnavailable, match="down"):
        await tool.run(call("1"))
    assert (await tool.run(call("1"))).stdout == "up"
