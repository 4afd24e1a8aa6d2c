"""MCP servers that others wrote, as tools of attempts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp_server_git", reason="mcp-server-git has an environment of its own: scripts/adapters_env")
pytest.importorskip("mcp_server_time", reason="mcp-server-time has an environment of its own: scripts/adapters_env")

from rocstar.dialogue.calls import render_call
from rocstar.sandbox.call import Limits
from rocstar.sandbox.client import SandboxClient
from rocstar.tools.choose import Tools, make_tools
from rocstar.types import Status, ToolCall, ToolResult
from tests.agents.examples import Told
from tests.rollout.examples import ANSWER, PROBLEM, conversation, limits, roller

TOKYO = {"source_timezone": "Europe/Paris", "time": "12:00", "target_timezone": "Asia/Tokyo"}


def tools_of(*names: str) -> Tools:
    places = [f"mcp:{sys.executable} -m {name}" for name in names]
    return make_tools(places, SandboxClient(daemons=0), Limits(wall_seconds=120.0), tool_name="python")


async def called(tools: dict[str, Any], name: str, **arguments: Any) -> ToolResult:
    result: ToolResult = await tools[name].run(ToolCall(id="c", tool=name, arguments=arguments, raw=""))
    return result


async def test_the_time_server_answers_and_its_complaints_are_the_models() -> None:
    own = tools_of("mcp_server_time").own()
    tools = {tool.spec.name: tool for tool in own}
    assert set(tools) == {"get_current_time", "convert_time"}
    told = await called(tools, "convert_time", **TOKYO)
    assert json.loads(told.stdout)["target"]["datetime"][11:16] in ("19:00", "20:00")  # by the season
    wrong = await called(tools, "convert_time", **{**TOKYO, "time": "noon"})
    assert wrong.status is Status.CODE_ERROR and "HH:MM" in wrong.stderr
    missing = await called(tools, "convert_time", time="12:00")
    assert (missing.status, missing.stderr) == (Status.BAD_CALL, "argument 'source_timezone' is missing")
    await own[0].close()


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """Two repositories with a file each."""
    found = [tmp_path / name for name in ("first", "second")]
    for place in found:
        subprocess.run(["git", "init", "-q", place], check=True)
        (place / "note.txt").write_text(place.name)
    return found


async def test_the_git_server_changes_what_each_attempt_has_of_its_own(places: list[Path]) -> None:
    attempts = [tools_of(f"mcp_server_git --repository {place}").own() for place in places]
    named = [{tool.spec.name: tool for tool in own} for own in attempts]
    added = await asyncio.gather(
        *(
            called(tools, "git_add", repo_path=str(place), files=["note.txt"])
            for tools, place in zip(named, places, strict=True)
        )
    )
    assert [result.status for result in added] == [Status.OK, Status.OK], added
    status = await called(named[0], "git_status", repo_path=str(places[0]))
    assert "new file:   note.txt" in status.stdout
    for own in attempts:
        await own[0].close()


async def test_an_attempt_of_a_run_calls_both(places: list[Path]) -> None:
    tools = tools_of("mcp_server_time", f"mcp_server_git --repository {places[0]}")
    calls = [render_call("convert_time", TOKYO), render_call("git_status", {"repo_path": str(places[0])})]
    talk = replace(conversation(), own_tools=tools.own)
    made = roller(Told([*calls, ANSWER]), talk, limits=limits(max_response_tokens=4000))
    ((attempt,),) = [group.trajectories for group in await made.roll([PROBLEM], attempts=1, seed=1)]
    assert [result.status for result in attempt.results] == [Status.OK, Status.OK], attempt
    assert attempt.outcome and "No commits yet" in attempt.results[1].stdout
