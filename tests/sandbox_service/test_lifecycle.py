"""Calls that the service has taken: what becomes of them while it runs, drains and dies."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from rocstar.sandbox.call import Call, Response, SandboxDown, ServiceOutcome
from rocstar.sandbox.service import dialects
from rocstar.sandbox.service.app import Application
from rocstar.sandbox.service.core import Hold, HttpRequest, Service
from rocstar.sandbox.settings import Settings
from tests.sandbox.driver import eventually
from tests.sandbox_service.support import SLEEPER, Http, RunningService, ScriptedClient, batch_of, settle


def test_a_drain_answers_every_call_that_was_sent() -> None:
    service = RunningService()
    http = Http(service.url)
    calls = batch_of(*(f"import time; time.sleep(0.02); print({n})" for n in range(100)))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        batch = pool.submit(http.post, "/run/long-batch", calls)
        assert eventually(lambda: http.status("calls").get("ok", 0) > 0)
        singles = [pool.submit(http.run, "import time; time.sleep(0.5); print(1)") for _ in range(4)]
        assert eventually(lambda: http.status("queue") + http.status("running") > 4)
        service.process.terminate()
        assert [int(each["stdout"]) for each in batch.result()[1]["results"]] == list(range(100))
        assert [each.result()["stdout"] for each in singles] == ["1\n"] * 4
    assert service.stop() == 0


def test_a_second_signal_does_not_wait_for_calls_that_run() -> None:
    service = RunningService()
    http = Http(service.url)
    with http.under_way("/v1/run", SLEEPER):
        service.process.send_signal(signal.SIGINT)
        assert eventually(lambda: not http.answers())
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(20) == 0


def test_a_drain_that_takes_too_long_says_so_to_who_still_waits() -> None:
    service = RunningService(drain_seconds=0.3)
    http = Http(service.url)
    found: list[object] = []
    caller = threading.Thread(target=lambda: found.append(http.post("/v1/run", SLEEPER)))
    caller.start()
    assert eventually(lambda: http.status("running") == 1)
    assert service.stop() == 0
    caller.join(20)
    sentence = "the service is shutting down and could not finish this call; send it again"
    assert found == [(503, {"error": sentence})]


@pytest.mark.parametrize(
    ("imported", "foreign"),
    [("cli, rocstar.sandbox.service.server", "torch transformers numpy"), ("sandbox.service", "uvicorn starlette")],
)
def test_nothing_of_the_trainer_is_loaded_and_the_web_server_after_the_daemons_are_started(
    imported: str, foreign: str
) -> None:
    script = (
        f"import sys, rocstar.{imported}\n"
        f"bad = [m for m in sys.modules if m.split('.')[0] in {foreign.split()!r}]\n"
        "print(bad + [m for m in sys.modules if m.startswith(('rocstar.train', 'rocstar.learning'))])"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def service_over(client: Any) -> Service:
    return Service(Settings(), cast(Any, client))


PYTHON = dialects.Submission(type="python", solution="")


async def test_of_a_batch_four_calls_for_each_slot_are_under_way_and_leaving_it_ends_them() -> None:
    client = ScriptedClient(slots=1)
    task = asyncio.ensure_future(dialects.judged(service_over(client), [PYTHON] * 20, 60.0, True))
    await settle()
    assert sorted(client.calls) == ["0", "1", "2", "3"]
    client.answer("2")
    await settle()
    assert sorted(client.calls) == ["0", "1", "3", "4"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(client.cancelled) == ["0", "1", "3", "4"]


async def test_patience_of_a_batch_counts_from_its_arrival_and_cpp_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialects, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    items = [structs.replace(PYTHON, sub_id=name, type="cpp" if name == "5" else "python") for name in "012345"]
    client = ScriptedClient(slots=1)
    task = asyncio.ensure_future(dialects.judged(service_over(client), items, 3.5, True))
    for name in "03214":
        await settle()
        client.answer(name)
    assert [result["sub_id"] for result in await task] == [*"012345"]
    assert client.patience == {"0": 2.5, "1": 1.5, "2": 0.5, "3": 0.0, "4": 0.0}


@pytest.mark.parametrize("error", [SandboxDown("gone"), RuntimeError("a bug")])
async def test_whatever_fails_there_is_exactly_one_response(error: Exception) -> None:
    class Broken(ScriptedClient):
        async def run(self, call: Call, *, waits: bool = False) -> Response:
            raise error

    seen: list[Response] = []
    service = service_over(Broken())
    service.ended = seen.append
    response = await service.run(Call(id="1", code=""))
    assert (response.id, response.outcome, seen) == ("1", ServiceOutcome.INTERNAL, [response])


async def test_a_clock_that_is_set_back_does_not_change_how_long_a_service_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client: Any = ScriptedClient()
    client.nodes, service = [], service_over(client)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    asked = HttpRequest(service, b"", Hold(service.budget))
    reply = await Application(service).status(asked)
    assert 0 <= json.loads(bytes(reply.body))["uptime_seconds"] < 3600
