"""MCP servers that others wrote, as tools of an attempt. That each has servers of its own: tests/tools/test_mcp.py."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("mcp_server_git", reason="mcp-server-git has an environment of its own: scripts/adapters_env")
pytest.importorskip("mcp_server_time", reason="mcp-server-time has an environment of its own: scripts/adapters_env")

from rocstar.dialogue.calls import render_call
from rocstar.sandbox.call import Limits
from rocstar.sandbox.client import SandboxClient
from rocstar.tools.choose import make_tools
from rocstar.types import Status
from tests.agents.examples import Told
from tests.rollout.examples import ANSWER, PROBLEM, conversation, limits, roller

TOKYO = {"source_timezone": "Europe/Paris", "time": "12:00", "target_timezone": "Asia/Tokyo"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "note.txt").write_text("mine")
    return tmp_path


async def test_an_attempt_calls_a_time_and_a_git_server_whose_complaints_are_the_models(repository: Path) -> None:
    modules = ("mcp_server_time", f"mcp_server_git --repository {repository}")
    servers = [f"mcp:{sys.executable} -m {module}" for module in modules]
    tools = make_tools(servers, SandboxClient(daemons=0), Limits(wall_seconds=120.0), tool_name="python")
    assert [spec.name for spec in tools.specs][:3] == ["get_current_time", "convert_time", "git_status"]
    place = {"repo_path": str(repository)}
    times = [TOKYO, {**TOKYO, "time": "noon"}, {"time": "12:00"}]
    calls = [render_call("convert_time", arguments) for arguments in times]
    calls += [render_call("git_add", {**place, "files": ["note.txt"]}), render_call("git_status", place)]
    talk = replace(conversation(), own_tools=tools.own)
    made = roller(Told([*calls, ANSWER]), talk, limits=limits(max_turns=8, max_response_tokens=9000))
    ((attempt,),) = [group.trajectories for group in await made.roll([PROBLEM], attempts=1, seed=1)]
    told, wrong, missing, added, status = attempt.results
    assert json.loads(told.stdout)["target"]["datetime"][11:16] in ("19:00", "20:00")  # by the season
    assert wrong.status is Status.CODE_ERROR and "HH:MM" in wrong.stderr
    assert (missing.status, missing.stderr) == (Status.BAD_CALL, "argument 'source_timezone' is missing")
    assert (added.status, status.status) == (Status.OK, Status.OK), attempt
    assert attempt.outcome and "new file:   note.txt" in status.stdout
