"""Starting, draining and dying: nothing is lost, nothing is left behind."""

from __future__ import annotations

import concurrent.futures
import signal
import subprocess
import sys
import threading

import pytest

from tests.sandbox.driver import eventually
from tests.sandbox_service.support import SLEEPER, Http, RunningService


def test_a_drain_answers_every_call_that_was_sent() -> None:
    service = RunningService()
    http = Http(service.url)
    calls = {"calls": [{"code": f"import time; time.sleep(0.02); print({n})"} for n in range(100)]}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        batch = pool.submit(http.post, "/v1/batch", calls)
        assert eventually(lambda: http.status("calls").get("ok", 0) > 0)
        singles = [pool.submit(http.run, "import time; time.sleep(0.5); print(1)") for _ in range(4)]
        assert eventually(lambda: http.status("queue") + http.status("running") > 4)
        service.process.terminate()
        assert [int(each["stdout"]) for each in batch.result()[1]["results"]] == list(range(100))
        assert [each.result()["stdout"] for each in singles] == ["1\n"] * 4
    assert service.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait_for_calls_that_run(number: signal.Signals) -> None:
    service = RunningService()
    http = Http(service.url)
    with http.under_way("/v1/run", SLEEPER):
        service.process.send_signal(number)
        assert eventually(lambda: not http.answers())
        service.process.send_signal(number)
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
    [
        ("cli, rocstar.sandbox.service.server, rocstar.sandbox.service.mcp", "torch transformers numpy mcp"),
        ("sandbox.service", "uvicorn starlette prometheus_client"),
    ],
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
