"""What an agent gives up waiting for: a fault where engine or tool had stood still, and else its own choice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from rocstar.agents.agent import GatewayAgent
from rocstar.errors import EngineUnavailable, SandboxUnavailable
from rocstar.protocols import Tool
from rocstar.rollout import fleet as module
from rocstar.rollout.fleet import Fleet
from rocstar.rollout.kv_scheduler import KvScheduler
from rocstar.types import Completion, Sampling, Status, Stop, ToolCall, ToolResult, Trajectory
from tests.agents import examples
from tests.agents.examples import Told, function, program
from tests.rollout.examples import conversation
from tests.sandbox.driver import eventually
from tests.scripted import ScriptedTool

PATIENCE = 0.3  # seconds: thirty looks
STOPS_AT = 8  # tokens: some hundredths of a second
FIRST = """
import asyncio, contextlib, httpx
asked = [{"role": "user", "content": "What is 2 + 3?"}]
async def agent(problem, client):
    await client.chat(asked)
"""
BY_FUNCTION = """
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(WORK, SECONDS)
    return 0.0
"""
BY_HTTP = """
    headers = {"authorization": f"Bearer {client.api_key}"}
    timeout = httpx.Timeout(20.0, read=SECONDS)
    async with httpx.AsyncClient(base_url=client.base_url, headers=headers, timeout=timeout) as http:
        with contextlib.suppress(httpx.ReadTimeout):
            await http.post(PATH, json=BODY)
    return 0.0
"""
ENGINE = {"WORK": "client.chat(asked)", "PATH": "'/chat/completions'", "BODY": "{'messages': asked}"}
TOOL = {"WORK": "client.call('python', code='1')", "PATH": "'/tools/python'", "BODY": "{'code': '1'}"}
LEFT = """
    left = asyncio.ensure_future(WORK)
    left.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait([left], timeout=SECONDS)
    return 0.0
"""
WAYS = {"function": FIRST + BY_FUNCTION, "http": FIRST + BY_HTTP, "left": FIRST + LEFT}
"""A program gives up as one does who asks over HTTP: its connection ends. left: it ends without having cancelled it."""
IN_TIME = """
request.full_url = request.full_url.replace("/chat/completions", "/tools/python")
request.data = json.dumps({"code": "1"}).encode()
try:
    urllib.request.urlopen(request, timeout=0.3)
except OSError:
    open(MARK, "w").close()
print(json.dumps({"reward": 0.0}))
"""
GOES_ON = FIRST + BY_HTTP.replace("return 0.0", "await asyncio.sleep(2.0)\n    return 0.0")


def agent_that_gives_up(way: str, asks: dict[str, str], tmp_path: Path, *, seconds: float = 20.0) -> GatewayAgent:
    """It asks the model once, and then gives up after 0.05 s what `asks` says."""
    text = {**WAYS, "goes on": GOES_ON}[way]
    for name, value in {"SECONDS": "0.05", **asks}.items():
        text = text.replace(name, value)
    return function(tmp_path, text, seconds=seconds)


class After(Told):
    """Answers its first request, and does to all others what `then` says."""

    def __init__(self, then: str) -> None:
        super().__init__(["so 5"])
        self.then = then

    async def generate(self, token_ids: Any, sampling: Sampling, **names: Any) -> Completion:
        if not self.given:
            return await super().generate(token_ids, sampling, **names)
        if self.then == "ends":
            await asyncio.sleep(0.1)
            raise EngineUnavailable("the process ended")
        while self.then == "writes" or (self.then == "stops" and self._produced < STOPS_AT):
            self._produced += 1
            await asyncio.sleep(0.005)
        return await asyncio.Event().wait()


@asynccontextmanager
async def fleet_of(monkeypatch: pytest.MonkeyPatch, *, tick: float = 0.01, **engines: Any) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(module, "TICK_SECONDS", tick)
    fleet = Fleet(engines, KvScheduler(), patience_seconds=PATIENCE)
    try:
        yield fleet
    finally:
        await fleet.close()


async def made(agent: GatewayAgent, engine: Any, *tools: Tool) -> Trajectory:
    async with asyncio.timeout(60):
        return await examples.made(agent, engine, conversation=conversation(*tools))


def is_judged(found: Trajectory) -> bool:
    """Or a fault."""
    if found.stop is Stop.ENVIRONMENT_FAILED:
        assert found.outcome is None and found.fault
        return False
    assert found.stop is Stop.ANSWERED and found.outcome and found.outcome.reward == 0.0
    return True


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("then", "judged"), [("stands still", False), ("writes", True), ("ends", False)])
async def test_a_request_is_given_up_for_an_outage_where_its_engine_shows_no_progress_before_it_is_lost(
    way: str, then: str, judged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent has ended long before the run's patience with the engine has."""
    async with fleet_of(monkeypatch, a=After(then)) as fleet:
        assert is_judged(await made(agent_that_gives_up(way, ENGINE, tmp_path), fleet)) is judged


@pytest.mark.parametrize("tick", [1.0, 3.0])
async def test_an_engine_that_stands_still_since_the_last_look_at_it_is_told_from_one_that_works(
    tick: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has written since the look before, which may be late, and stops before the agent gives up."""
    async with fleet_of(monkeypatch, tick=tick, a=After("stops")) as fleet:
        assert not is_judged(await made(agent_that_gives_up("function", ENGINE, tmp_path), fleet))


class Service(ScriptedTool):
    """A tool whose service does this to a call."""

    def __init__(self, then: str) -> None:
        super().__init__({"1": "5\n"})
        self.then = then

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        if self.then == "stands still":
            await asyncio.Event().wait()
        await asyncio.sleep(1.0 if self.then == "runs it late" else 0.0)
        began = time.monotonic()
        await asyncio.sleep(0.3)
        if self.then == "ends":
            raise SandboxUnavailable("the sandbox is gone")
        status = Status.TIMEOUT if self.then == "runs it to its limit" else Status.OK
        return ToolResult(call_id=call.id, status=status, run_seconds=time.monotonic() - began)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("then", "judged"),
    [("runs it", True), ("runs it to its limit", True), ("ends", False), ("runs it late", False)],
)
async def test_a_tool_call_is_given_up_for_an_outage_where_its_program_did_not_run_yet(
    way: str, then: str, judged: bool, tmp_path: Path
) -> None:
    found = await made(agent_that_gives_up(way, TOOL, tmp_path), Told(["so 5"]), Service(then))
    assert is_judged(found) is judged


async def test_an_outage_is_one_too_where_the_end_of_the_agents_connection_is_known_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine."""
    receive = Request.receive.fget  # type: ignore[attr-defined]

    async def late(inner: Any) -> Any:
        message = await inner()
        await asyncio.sleep(0.4 * (message["type"] == "http.disconnect"))
        return message

    monkeypatch.setattr(Request, "receive", property(lambda request: partial(late, receive(request))))
    found = await made(agent_that_gives_up("http", TOOL, tmp_path), Told(["so 5"]), Service("runs it late"))
    assert not is_judged(found)


async def test_a_call_given_up_while_the_run_is_stopped_is_one_to_an_outage_too(tmp_path: Path) -> None:
    """Its result is there when the run learns of it."""
    given_up = tmp_path / "given up"

    class Stopped(ScriptedTool):
        async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
            assert eventually(given_up.exists)
            return await super().run(call, seed=seed)

    agent = program(tmp_path, IN_TIME.replace("MARK", repr(str(given_up))))
    assert not is_judged(await made(agent, Told(["so 5"]), Stopped({"1": "5\n"})))


async def test_a_tool_call_that_never_ends_is_an_outage(tmp_path: Path) -> None:
    agent = agent_that_gives_up("http", TOOL, tmp_path, seconds=1.0)
    found = await made(agent, Told(["so 5"]), Service("stands still"))
    assert not is_judged(found)
    assert found.fault == "an abandoned request neither progressed nor ended within rollout.agent_seconds = 1"


@pytest.mark.parametrize(("then", "judged"), [("runs it", True), ("runs it late", False)])
async def test_a_call_that_ends_while_the_agent_goes_on_is_judged_alike(
    then: str, judged: bool, tmp_path: Path
) -> None:
    agent = agent_that_gives_up("goes on", TOOL, tmp_path)
    assert is_judged(await made(agent, Told(["so 5"]), Service(then))) is judged
