"""Calls that the service has taken: what becomes of them while it runs, drains and dies."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import signal
import subprocess
import sys
import threading
import time
from typing import Any, cast

import pytest

from rocstar.sandbox.call import Call, ProgramOutcome, Response, SandboxDown, ServiceOutcome, failed
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


def call(number: int, patience_seconds: float = 60.0) -> Call:
    return Call(id=str(number), code="", patience_seconds=patience_seconds)


def id_of(item: object, response: Response) -> str:
    return response.id


async def test_of_a_batch_four_calls_for_each_slot_are_under_way_and_leaving_it_ends_them() -> None:
    client = ScriptedClient(slots=1)
    task = asyncio.ensure_future(service_over(client).run_all(range(20), call, id_of))
    await settle()
    assert sorted(client.calls) == ["0", "1", "2", "3"]
    client.answer("2")
    await settle()
    assert sorted(client.calls) == ["0", "1", "3", "4"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(client.cancelled) == ["0", "1", "3", "4"]


async def test_patience_of_a_batch_counts_from_its_arrival_and_what_has_a_response_is_not_run() -> None:
    client = ScriptedClient(slots=1)
    items: list[Call | Response] = [call(number, 0.0 if number == 4 else 60.0) for number in range(5)]
    items.append(failed("5", ProgramOutcome.REJECTED, "no"))
    task = asyncio.ensure_future(service_over(client).run_all(items, lambda item: item, id_of))
    for number in (0, 3, 2, 1, 4):
        await settle()
        client.answer(str(number))
    assert await task == ["0", "1", "2", "3", "4", "5"]
    assert client.patience["4"] == 0.0 and 59.0 < client.patience["0"] <= 60.0 and "5" not in client.patience


@pytest.mark.parametrize("error", [SandboxDown("gone"), RuntimeError("a bug")])
async def test_whatever_fails_there_is_exactly_one_response(error: Exception) -> None:
    class Broken(ScriptedClient):
        async def run(self, call: Call, *, waits: bool = False) -> Response:
            raise error

    seen: list[Response] = []
    service = service_over(Broken())
    service.ended = seen.append
    response = await service.run(call(1))
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
