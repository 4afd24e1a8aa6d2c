"""SandboxFusion's dialect, in the shapes its own server answers."""

from __future__ import annotations

import base64
import json
from typing import Any, cast

import pytest

from rocstar.sandbox.call import Response, ServiceOutcome
from rocstar.sandbox.service import dialects
from rocstar.sandbox.service.core import Service
from rocstar.sandbox.settings import Settings
from tests.sandbox_service.support import Http, ScriptedClient

VERL: dict[str, Any] = {
    "compile_timeout": 10,
    "run_timeout": 10,
    "stdin": None,
    "memory_limit_MB": 1024,
    "language": "python",
    "files": {},
    "fetch_files": [],
}
"""What verl sends beside the code."""


def as_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def run_code(http: Http, code: str, **fields: Any) -> Any:
    status, answer = http.post("/run_code", {**VERL, "code": code, **fields})
    assert status == 200, answer
    return answer


def test_a_success_has_every_field(http: Http) -> None:
    answer = run_code(http, "print(input())", stdin="5")
    assert answer["run_result"].pop("execution_time") > 0
    assert answer == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "run_result": {"status": "Finished", "return_code": 0, "stdout": "5\n", "stderr": ""},
        "executor_pod_name": None,
        "files": {},
    }


@pytest.mark.parametrize(
    ("code", "state", "return_code"),
    [
        ("1/0", "Finished", 1),
        ("import sys; sys.exit(7)", "Finished", 7),
        ("import os; os.kill(os.getpid(), 11)", "Finished", -11),
        ("import os; os.kill(os.getpid(), 40)", "Finished", -40),
        ("import time; time.sleep(9)", "TimeLimitExceeded", None),
        ("while True: print('x' * 999)", "Finished", -9),
    ],
)
def test_a_failed_program_is_failed(http: Http, code: str, state: str, return_code: int | None) -> None:
    answer = run_code(http, code, run_timeout=0.3 if "sleep" in code else 10)
    assert answer["status"] == "Failed"
    assert (answer["run_result"]["status"], answer["run_result"]["return_code"]) == (state, return_code)
    assert isinstance(answer["run_result"]["stdout"] + answer["run_result"]["stderr"], str)


def test_files_go_in_and_come_back_under_the_name_asked_for_also_from_a_failure(http: Http) -> None:
    raw = bytes(range(256))
    files = {"a/b.txt": as_base64("grüße".encode()), "/tmp/raw": as_base64(raw), "none": None}
    code = "print(open('a/b.txt').read())\nopen('out', 'wb').write(open('raw', 'rb').read() * 3)\n1/0"
    answer = run_code(http, code, files=files, fetch_files=["/mnt/out", "out", "missing", "/etc/passwd"])
    assert (answer["status"], answer["run_result"]["stdout"]) == ("Failed", "grüße\n")
    assert {path: base64.b64decode(text) for path, text in answer["files"].items()} == {
        "/mnt/out": raw * 3,
        "out": raw * 3,
    }


@pytest.mark.parametrize(
    "fields", [{"language": "cpp"}, {"fetch_files": [1]}, {"files": {"x": "!"}}, {"code": 1}, {"run_timeout": -1}]
)
def test_what_is_not_served_is_422_with_a_detail(http: Http, fields: dict[str, Any]) -> None:
    status, answer = http.post("/run_code", {**VERL, "code": "1", **fields})
    assert (status, set(answer)) == (422, {"detail"})


def test_when_we_cannot_run_it_verl_is_asked_to_come_again() -> None:
    """The longest wait is verl's own, of seconds: nobody is waited for here."""
    service: Any = Service(Settings(), cast(Any, ScriptedClient()))
    overloaded = Response(id="", outcome=ServiceOutcome.OVERLOADED, message="busy")
    reply = dialects.answer(service, overloaded, {})
    said = json.loads(reply.body)
    assert (reply.status_code, said["status"], said["run_result"], said["message"]) == (
        504,
        "SandboxError",
        None,
        "busy",
    )
    assert int(dict(reply.headers)["retry-after"]) >= 1
