"""The native API, against a running service, over real HTTP."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import fields
from typing import Any

import pytest

from rocstar.sandbox.service.connection import Address
from rocstar.sandbox.service.local import LocalService
from rocstar.sandbox.service.remote import ask
from rocstar.sandbox.wire import Response
from tests.sandbox_service.support import Http, eventually


def test_a_call_is_answered_with_every_field_of_a_response(http: Http) -> None:
    response = http.run("print(int(input()) + 1)\n'last'", id="mine", stdin="41")
    assert set(response) == {field.name for field in fields(Response)}
    assert (response["id"], response["outcome"], response["stdout"]) == ("mine", "ok", "42\n")
    assert (response["value"], response["exit_code"], response["attempt"]) == ("'last'", 0, 1)
    assert response["isolation"] in ("L1", "L2", "L3", "L4")


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("1/0", "exception"),
        ("def f(:", "exception"),
        ("import os; os._exit(3)", "exit_nonzero"),
        ("import os; os.kill(os.getpid(), 6)", "signal"),
        ("while True: pass", "wall_timeout"),
        ("x = []\nwhile True: x.append(bytearray(2**23))", "memory"),
        ("while True: print('x' * 999)", "output_limit"),
    ],
)
def test_what_a_program_does_is_an_outcome_and_not_an_error_of_the_service(http: Http, code: str, outcome: str) -> None:
    limits = {"wall_seconds": 0.5, "cpu_seconds": 5} if outcome == "wall_timeout" else {"wall_seconds": 10}
    assert http.run(code, limits=limits)["outcome"] == outcome


def test_an_exception_is_told_with_its_type_message_and_line(http: Http) -> None:
    told = http.run("x = 1\nraise ValueError('no')")["exception"]
    assert told == {"type": "ValueError", "message": "no", "line": 2}


def test_files_and_a_seed_reach_the_program(http: Http) -> None:
    code = "import random\nprint(open('data/in.txt').read(), random.random())"
    first, again = (http.run(code, files={"data/in.txt": "hello"}, seed=7)["stdout"] for _ in range(2))
    assert first == again
    assert first.startswith("hello 0.")


def test_files_of_bytes_go_in_and_come_back(http: Http) -> None:
    raw = bytes(range(256))
    files = {"raw": {"base64": base64.b64encode(raw).decode()}, "note": "ä"}
    code = "open('back', 'wb').write(open('raw', 'rb').read()[::-1]);"
    response = http.run(code, files=files, fetch=["back", "note", "missing", "/etc/passwd", "../x"])
    found = {path: base64.b64decode(text) for path, text in response["files"].items()}
    assert found == {"back": raw[::-1], "note": "ä".encode()}


@pytest.mark.parametrize("content", ["!", "ä", "AAA"])
def test_a_file_that_is_not_base64_is_refused_by_its_name(http: Http, content: str) -> None:
    status, told = http.post("/v1/run", {"code": "1", "files": {"data.bin": {"base64": content}}})
    assert (status, "data.bin" in told["error"]) == (400, True)


def test_a_notebook_is_answered_cell_by_cell(http: Http) -> None:
    cells = ["x = 20\nopen('f', 'w').write('left');", "print('out')\n1/0", "import time; time.sleep(60)", "x + 1"]
    limits = {"wall_seconds": 1}
    asked = {"cells": cells, "id": "mine", "limits": limits, "fetch": ["f"]}
    status, answer = http.post("/v1/notebook", asked)
    assert status == 200
    results = answer["results"]
    assert [each["outcome"] for each in results] == ["ok", "exception", "wall_timeout", "ok"]
    assert [each["committed"] for each in results] == [True, True, False, True]
    assert {each["id"] for each in results} == {"mine"}
    assert (results[1]["stdout"], results[3]["value"]) == ("out\n", "21")
    assert base64.b64decode(results[3]["files"]["f"]) == b"left"


def test_a_notebook_is_admitted_once_and_leaves_nothing(http: Http) -> None:
    before = http.get("/status")[1]
    http.post("/v1/notebook", {"cells": ["1"] * 5})
    after = http.get("/status")[1]
    assert after["calls"]["ok"] == before["calls"].get("ok", 0) + 1
    assert (after["running"], after["sessions"]) == (0, before["sessions"])
    assert http.post("/v1/notebook", {"cells": ["1"] * 1001})[0] == 400
    assert http.post("/v1/notebook", {"cells": []})[0] == 400


def test_disconnecting_from_a_notebook_ends_it(http: Http) -> None:
    with http.socket() as connection:
        cells = {"cells": ["import time; time.sleep(400)"] * 3, "limits": {"wall_seconds": 500}}
        body = json.dumps(cells).encode()
        head = b"POST /v1/notebook HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        assert eventually(lambda: http.get("/status")[1]["running"] == 1)
    assert eventually(lambda: http.get("/status")[1]["running"] == 0)


def test_without_a_seed_two_calls_draw_different_numbers(http: Http) -> None:
    code = "import random\nprint(random.random())"
    assert http.run(code)["stdout"] != http.run(code)["stdout"]


def test_a_lone_surrogate_in_the_output_does_not_break_the_answer(http: Http) -> None:
    code = "import sys\nsys.stdout.reconfigure(errors='surrogatepass')\nraise ValueError('\\ud800')"
    assert http.run(code)["exception"]["message"] == "\ufffd"


def test_a_batch_is_answered_in_its_order_and_one_bad_call_does_not_spoil_it(http: Http) -> None:
    calls: list[dict[str, Any]] = [{"code": f"print({n})", "id": str(n)} for n in range(60)]
    calls[7]["limits"] = {"wall_seconds": 1e6}
    status, answer = http.post("/v1/batch", {"calls": calls})
    assert status == 200
    assert [result["id"] for result in answer["results"]] == [str(n) for n in range(60)]
    bad = answer["results"].pop(7)
    assert (bad["outcome"], bad["message"]) == (
        "rejected",
        "limit wall_seconds is at most 600 here, got 1e+06; the operator's --max-wall-seconds says so",
    )
    assert all(result["stdout"] == f"{result['id']}\n" for result in answer["results"])


def test_a_stream_gives_each_result_as_it_finishes(http: Http) -> None:
    calls = [{"code": "import time; time.sleep(1.5)"}, {"code": "print('quick')"}]
    status, text = http.post("/v1/stream", {"calls": calls})
    lines = [json.loads(line) for line in text.splitlines()]
    assert status == 200
    assert [line["index"] for line in lines] == [1, 0]
    assert lines[0]["result"]["stdout"] == "quick\n"


def test_status_tells_level_probes_queue_and_slots(http: Http) -> None:
    http.run("1")
    _, status = http.get("/status")
    assert status["isolation"] in ("L1", "L2", "L3", "L4")
    assert (status["slots"], status["num_workers"], status["processes_ready"]) == (4, 4, 1)
    assert isinstance(status["queue"], int)
    assert isinstance(status["failed_probes"], list)
    assert status["calls"]["ok"] >= 1
    assert status == http.get("/v1/status")[1] | {"uptime_seconds": status["uptime_seconds"]}


def test_metrics_count_each_call_once(http: Http) -> None:
    def counted() -> dict[str, float]:
        lines = http.get("/metrics")[1].splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = counted()
    http.run("1/0")
    after = counted()
    name = 'rocstar_sandbox_calls_total{outcome="exception"}'
    assert after[name] == before[name] + 1
    runs = 'rocstar_sandbox_run_seconds_bucket{le="+Inf"}'
    assert after[runs] == before[runs] + 1 == after["rocstar_sandbox_run_seconds_count"]


def test_disconnecting_ends_the_program_and_frees_its_slot(http: Http) -> None:
    with http.socket() as connection:
        body = b'{"code": "while True: pass", "limits": {"wall_seconds": 500}}'
        connection.sendall(b"POST /v1/run HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert eventually(lambda: http.get("/status")[1]["running"] == 1)
    assert eventually(lambda: http.get("/status")[1]["running"] == 0)
    assert eventually(lambda: http.get("/status")[1]["calls"].get("cancelled", 0) >= 1)


def test_disconnecting_from_a_stream_ends_all_of_its_calls(http: Http) -> None:
    sleeper = {"code": "import time; time.sleep(400)", "limits": {"wall_seconds": 500}}
    with http.socket() as connection:
        body = json.dumps({"calls": [sleeper] * 30}).encode()
        head = b"POST /v1/stream HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        assert eventually(lambda: http.get("/status")[1]["running"] == 4)
    assert eventually(lambda: (http.get("/status")[1]["running"], http.get("/status")[1]["queue"]) == (0, 0))
    assert http.run("print('free')")["stdout"] == "free\n"


def test_an_impatient_call_is_overloaded_with_a_time_to_come_back(http: Http) -> None:
    with http.socket() as connection:
        sleepers = {"calls": [{"code": "import time; time.sleep(100)", "limits": {"wall_seconds": 200}}] * 40}
        body = json.dumps(sleepers).encode()
        head = b"POST /v1/batch HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        assert eventually(lambda: http.get("/status")[1]["running"] == 4)
        message = json.dumps({"code": "1", "patience_seconds": 0.1}).encode()
        status, response, headers = http.send("POST", "/v1/run", message)
    assert (status, response["outcome"]) == (503, "overloaded")
    assert int(headers["retry-after"]) >= 1


def test_a_long_batch_does_not_hold_up_another_caller(http: Http) -> None:
    with http.socket() as connection:
        body = json.dumps({"calls": [{"code": "import time; time.sleep(0.05)"}] * 2000}).encode()
        head = b"POST /v1/batch HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        assert eventually(lambda: http.get("/status")[1]["running"] > 0)
        before = http.get("/status")[1]["calls"].get("ok", 0)
        assert http.run("print(1)")["stdout"] == "1\n"
        assert http.get("/status")[1]["calls"]["ok"] - before < 200


def test_the_descriptions_are_served_and_name_every_field(http: Http) -> None:
    _, described = http.get("/openapi.json")
    shapes = described["components"]["schemas"]
    assert set(shapes["Response"]["properties"]) == {field.name for field in fields(Response)}
    assert all(field.get("description") for field in shapes["Call"]["properties"].values())
    assert all(field.get("description") for field in shapes["Response"]["properties"].values())
    page = http.get("/docs")[1]
    assert all(f"<code>{path}</code>" in page for path in described["paths"])
    assert "src=" not in page and "http" not in page.replace("http-equiv", "").split("<h1>")[0]


def test_uptime_grows(service: LocalService) -> None:
    first = ask(Address.of(service.url), "GET", "/status")["uptime_seconds"]
    time.sleep(0.05)
    assert ask(Address.of(service.url), "GET", "/status")["uptime_seconds"] > first > 0
