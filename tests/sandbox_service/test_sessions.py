"""Sessions at a running service: how they end, and whose they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from rocstar.sandbox.call import Limits, SessionLost
from rocstar.sandbox.client import SandboxClient
from tests.sandbox.driver import eventually
from tests.sandbox_service.support import SLEEPER, Http, RunningService, running


@asynccontextmanager
async def connected(url: str, token: str = "") -> AsyncIterator[SandboxClient]:
    with await asyncio.to_thread(SandboxClient.connect, [url], token=token) as client:
        yield client


async def test_a_session_whose_daemon_died_is_gone_and_a_call_whose_daemons_died_is_answered_as_an_outage() -> None:
    service = RunningService()
    http = Http(service.url)
    async with connected(service.url) as client:
        session = client.open_session()
        await session.run("x = 1")
        daemon_of(service).kill()
        assert await asyncio.to_thread(eventually, lambda: http.post("/v1/run", {"code": "1"})[0] == 200)
        with pytest.raises(SessionLost):
            await session.run("x")
    ((state, starts),) = [(node["state"], node["starts"]) for node in http.status("nodes")]
    metrics = http.get("/metrics")[1]
    assert (state, starts) == ("up", 2)
    for sample in ('events_total{event="lost"} 1', 'events_total{event="restarted"} 1', "slots 2", "nodes_up 1"):
        assert f"rocstar_sandbox_node_{sample}" in metrics or f"rocstar_sandbox_{sample}" in metrics, metrics
    assert 'build_info{version="' in metrics and 'responses_total{status="200"}' in metrics
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.send, "POST", "/v1/run", json.dumps(SLEEPER).encode())
        for starts in (2, 3):  # a lost call is sent once more
            assert await asyncio.to_thread(eventually, partial(runs_since, http, starts))
            daemon_of(service).kill()
        status, response, headers = await asyncio.to_thread(answer.result)
    assert (status, response["outcome"], headers["retry-after"]) == (503, "internal", "1")
    service.process.terminate()
    said = service.process.communicate()[1]
    assert "rocstar: the sandbox daemon was lost: " in said and "is up again: 2 slots" in said


def runs_since(http: Http, starts: int) -> bool:
    """Whether a program runs in the daemon that was started so often."""
    return http.status("nodes")[0]["starts"] == starts and http.status("running") == 1


def daemon_of(service: RunningService) -> psutil.Process:
    children = psutil.Process(service.process.pid).children()
    (daemon,) = [child for child in children if "daemon.main" in " ".join(child.cmdline())]
    return daemon


async def test_a_session_without_cells_for_too_long_is_forgotten_but_not_while_one_runs() -> None:
    with running(session_idle_seconds=0.3) as url:
        async with connected(url) as client:
            short = client.open_session(limits=Limits(wall_seconds=20))
            assert (await short.run("import time; time.sleep(1); 1")).value == "1"
            assert await asyncio.to_thread(eventually, lambda: Http(url).status("sessions") == 0)
            with pytest.raises(SessionLost):
                await short.run("1")


async def test_sessions_of_one_token_end_none_of_anothers(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("one\ntwo\n")
    with running(session_slots=3, token="one", token_file=f"{tmp_path}/tokens") as url:
        async with connected(url, "one") as one, connected(url, "two") as two:
            mine = one.open_session()
            await mine.run("x = 42")
            others = [two.open_session() for _ in range(6)]
            assert [(await each.run("1")).value for each in others] == ["1"] * 6
            assert (await mine.run("x")).value == "42"
            with pytest.raises(SessionLost):  # its own made way
                await others[0].run("1")
            more = [one.open_session() for _ in range(2)]
            assert [(await each.run("1")).value for each in more] == ["1"] * 2, "of who has more one makes way"
            assert (await others[-1].run("1")).value == "1" and (await more[-1].run("1")).value == "1"
