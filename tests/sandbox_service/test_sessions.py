"""Sessions over HTTP, against a running service: what stays between requests, who may have it, and how it ends."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from rocstar.sandbox.service.local import LocalService, local_service
from tests.sandbox_service.support import Http, Notebook, eventually, running_cell

SMALL = ("--preload", "", "--slots", "4", "--runnable", "2")


@pytest.fixture
def notebook(http: Http) -> Iterator[Notebook]:
    opened = Notebook.open(http, limits={"wall_seconds": 20})
    yield opened
    opened.close()


def test_names_stay_between_requests_and_an_error_keeps_what_was_before_it(notebook: Notebook) -> None:
    assert notebook.run("x = 20\ndef f():\n    return x + 1")["committed"]
    failed = notebook.run("y = 5\n1/0", id="mine")
    assert (failed["id"], failed["outcome"], failed["exception"]["type"]) == ("mine", "exception", "ZeroDivisionError")
    assert "cell 2" in failed["stderr"]
    assert notebook.run("f() * y")["value"] == "105"


def test_a_cell_that_is_not_committed_changes_nothing(notebook: Notebook) -> None:
    notebook.run("x = 1")
    assert not notebook.run("x = 2; x", commit=False)["committed"]
    assert notebook.run("x")["value"] == "1"


def test_a_branch_has_the_past_and_neither_sees_what_the_other_does_then(notebook: Notebook) -> None:
    notebook.run("x = [1]")
    branch = notebook.branch()
    notebook.run("x.append(2)")
    assert branch.run("x.append(3); x")["value"] == "[1, 3]"
    assert notebook.run("x")["value"] == "[1, 2]"
    assert branch.name != notebook.name and branch.close() == 204
    assert notebook.run("x")["value"] == "[1, 2]"


def test_files_of_text_and_bytes_go_in_and_come_back(notebook: Notebook) -> None:
    raw = bytes(range(256))
    files = {"raw": {"base64": base64.b64encode(raw).decode()}, "note": "ä"}
    code = "open('back', 'wb').write(open('raw', 'rb').read()[::-1]);"
    response = notebook.run(code, files=files, fetch=["back", "note", "missing", "/etc/passwd", "../x"])
    found = {path: base64.b64decode(text) for path, text in response["files"].items()}
    assert found == {"back": raw[::-1], "note": "ä".encode()}


def test_a_seed_makes_a_session_repeat(http: Http) -> None:
    cells = ["import random", "random.random()", "random.random()"]
    one, two, other = (Notebook.open(http, seed=seed) for seed in (5, 5, 6))
    drawn = [[each.run(cell)["value"] for cell in cells] for each in (one, two, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert http.get(one.path)[1]["seed"] == 5
    for each in (one, two, other):
        each.close()


def test_limits_are_those_of_the_session_and_the_operators_hold(http: Http) -> None:
    notebook = Notebook.open(http, limits={"wall_seconds": 0.3})
    late = notebook.run("x = 1\nwhile True: pass")
    assert (late["outcome"], late["committed"]) == ("wall_timeout", False)
    assert notebook.run("x")["outcome"] == "exception"
    status, refused = http.post("/v1/sessions", {"limits": {"wall_seconds": 1e6}})
    assert (status, "--max-wall-seconds" in refused["error"]) == (400, True)
    status, refused = http.post("/v1/sessions", {"idle_seconds": 1e6})
    assert (status, "--session-idle-seconds" in refused["error"]) == (400, True)
    notebook.close()


def test_a_state_tells_cells_and_never_other_sessions(notebook: Notebook) -> None:
    notebook.run("1")
    notebook.run("2", commit=False)
    _, state = notebook.http.get(notebook.path)
    assert (state["session"], state["cells"], state["idle_seconds"]) == (notebook.name, 1, 3600.0)
    assert notebook.http.get("/v1/sessions")[0] == 405


@pytest.mark.parametrize("name", ["0-" + "0" * 32, "7-" + "0" * 32, "x", "", "0", "٣-1", "9" * 5000, "0-\x00%2e%2e"])
def test_an_id_that_nobody_was_given_is_404_and_says_what_to_do(http: Http, name: str) -> None:
    for method, more in (("POST", "/cells"), ("POST", "/branch"), ("GET", ""), ("DELETE", "")):
        quoted = name.encode().hex("%")
        path = f"/v1/sessions/{'%' + quoted if quoted else ''}{more}"
        status, told, _ = http.send(method, path, b'{"code": "1"}' if method == "POST" else None)
        assert status == 404
        assert "POST /v1/sessions" in told["error"] or "GET /docs" in told["error"]


def test_a_closed_session_is_gone_and_the_cell_it_ran_is_told_so(http: Http) -> None:
    notebook = Notebook.open(http)
    answers: list[Any] = []
    runner = threading.Thread(
        target=lambda: answers.append(http.post(f"{notebook.path}/cells", {"code": "import time; time.sleep(300)"}))
    )
    runner.start()
    assert eventually(lambda: http.get("/status")[1]["running"] == 1)
    assert notebook.close() == 204
    runner.join(20)
    ((status, told),) = answers
    assert status == 404 and "was closed" in told["error"]
    assert notebook.close() == 404
    assert eventually(lambda: http.get("/status")[1]["running"] == 0)


def test_hanging_up_ends_the_cell_and_leaves_the_session_as_it_was(notebook: Notebook) -> None:
    notebook.run("x = 1")
    with running_cell(notebook, "x = 2\nimport time; time.sleep(300)"):
        pass
    assert eventually(lambda: notebook.http.get("/status")[1]["running"] == 0)
    assert notebook.run("x")["value"] == "1"


def test_cells_of_one_session_wait_for_each_other_and_take_no_slot_meanwhile(notebook: Notebook) -> None:
    notebook.run("seen = []")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        cell = "import time; time.sleep(0.05); seen.append(len(seen))"
        cells = [pool.submit(notebook.run, cell) for _ in range(8)]
        assert notebook.http.run("print('others run')")["stdout"] == "others run\n"
        assert all(cell.result()["outcome"] == "ok" for cell in cells)
    assert notebook.run("seen")["value"] == str(list(range(8)))


def test_a_cell_without_patience_is_overloaded_and_can_come_again(notebook: Notebook) -> None:
    http = notebook.http
    notebook.run("x = 1")
    with http.socket() as connection:
        sleepers = {"calls": [{"code": "import time; time.sleep(100)", "limits": {"wall_seconds": 200}}] * 8}
        body = json.dumps(sleepers).encode()
        head = b"POST /v1/batch HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        assert eventually(lambda: http.get("/status")[1]["running"] == 4)
        message = json.dumps({"code": "x = 2", "patience_seconds": 0.1}).encode()
        status, response, headers = http.send("POST", f"{notebook.path}/cells", message)
    assert (status, response["outcome"], response["committed"]) == (503, "overloaded", False)
    assert int(headers["retry-after"]) >= 1
    assert eventually(lambda: http.get("/status")[1]["running"] == 0)
    assert notebook.run("x")["value"] == "1"


def test_a_session_whose_processes_are_gone_is_run_again(service: LocalService, notebook: Notebook) -> None:
    notebook.run("import random\nx = random.random()")
    before = notebook.run("x")["value"]
    (worker,) = psutil.Process(service.process.pid).children()
    (host,) = [child for child in worker.children() if "host" in " ".join(child.cmdline())]
    host.kill()
    response = notebook.run("x")
    assert (response["value"], response["replayed_cells"]) == (before, 2)


def test_metrics_count_sessions_and_cells(notebook: Notebook) -> None:
    def counted(name: str) -> float:
        lines = notebook.http.get("/metrics")[1].splitlines()
        (value,) = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"rocstar_sandbox_{name} ")]
        return float(value)

    open_before, cells_before = counted("sessions"), counted("cells_total")
    other = notebook.branch()
    other.run("1")
    assert counted("sessions") == open_before + 1 == notebook.http.get("/status")[1]["sessions"]
    assert counted("cells_total") == cells_before + 1
    other.close()
    assert counted("sessions") == open_before


def test_a_session_without_cells_for_too_long_is_forgotten(http: Http) -> None:
    short = Notebook.open(http, idle_seconds=0.2)
    kept = Notebook.open(http)
    assert eventually(lambda: http.get(short.path)[0] == 404)
    assert "was without a cell for too long" in http.get(short.path)[1]["error"]
    assert kept.run("1")["outcome"] == "ok" and kept.close() == 204


def test_a_session_whose_cell_runs_is_not_idle(http: Http) -> None:
    notebook = Notebook.open(http, idle_seconds=0.2, limits={"wall_seconds": 20})
    assert notebook.run("import time; time.sleep(1.5); x = 1; x")["value"] == "1"
    notebook.close()


def test_too_many_sessions_are_refused_with_a_time_to_come_back() -> None:
    with local_service((*SMALL, "--max-sessions", "2", "--session-idle-seconds", "50")) as url:
        http = Http(url)
        one, _ = Notebook.open(http), Notebook.open(http)
        status, told, headers = http.send("POST", "/v1/sessions", b"{}")
        assert (status, "close one" in told["error"]) == (503, True)
        assert 1 <= int(headers["retry-after"]) <= 50
        assert http.post(f"{one.path}/branch", b"")[0] == 503
        one.close()
        Notebook.open(http).run("1")
