"""Sessions over HTTP, against a running service: what stays between requests, who may have it, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.sandbox.driver import eventually
from tests.sandbox_service.support import SLEEPER, Http, RunningService, running


class Notebook:
    """A session of the service."""

    def __init__(self, http: Http, token: str = "", **fields: Any) -> None:
        self.head = {"Authorization": f"Bearer {token}"}
        status, state = http.post("/v1/sessions", fields, **self.head)
        assert status == 201, state
        self.http = http
        self.name = state["session"]
        self.path = f"/v1/sessions/{self.name}"

    def run(self, code: str, **fields: Any) -> Any:
        status, response = self.http.post(f"{self.path}/cells", {"code": code, **fields}, **self.head)
        assert status == 200, response
        return response

    def close(self) -> int:
        return self.http.send("DELETE", self.path, None)[0]


@pytest.fixture
def notebook(http: Http) -> Iterator[Notebook]:
    opened = Notebook(http, limits={"wall_seconds": 20})
    yield opened
    opened.close()


def test_names_and_files_stay_between_requests_and_a_failed_cell_keeps_what_it_did(notebook: Notebook) -> None:
    notebook.run("x = 20\nopen('f', 'w').write('kept');")
    failed = notebook.run("y = 5\n1/0", id="mine")
    assert (failed["id"], failed["outcome"], failed["exception"]["type"]) == ("mine", "exception", "ZeroDivisionError")
    assert "<cell 2>" in failed["stderr"]
    assert notebook.run("x * y, open('f').read()")["value"] == "(100, 'kept')"


def test_a_session_whose_cell_ended_its_process_is_gone(notebook: Notebook) -> None:
    assert notebook.run("import os; os._exit(3)")["state_lost"]
    status, refused = notebook.http.post(f"{notebook.path}/cells", {"code": "1"})
    assert status == 404 and "open one with POST /v1/sessions" in refused["error"]


def test_the_limits_of_a_session_are_those_it_was_opened_with_and_the_operators_hold(http: Http) -> None:
    status, refused = http.post("/v1/sessions", {"limits": {"wall_seconds": 1e6}})
    assert (status, "--max-wall-seconds" in refused["error"]) == (400, True)
    notebook = Notebook(http, limits={"wall_seconds": 0.5, "memory_bytes": 2**26})
    assert notebook.run("import time; time.sleep(9)")["outcome"] == "wall_timeout"
    assert notebook.run("len(bytearray(2**27))")["outcome"] == "memory"
    other = notebook.path.replace(f"_{2**26}_", f"_{2**30}_")
    assert http.post(f"{other}/cells", {"code": "1"})[0] == 404
    assert notebook.close() == 204


def test_a_session_is_forked_into_sessions_with_ids_of_their_own(notebook: Notebook) -> None:
    http, fork = notebook.http, f"{notebook.path}/fork"
    notebook.run("x = [1]\nimport os\nfile = os.open('f', os.O_CREAT)")
    status, refused = http.post(fork, {"branches": 1})
    assert status == 409 and "is open, and a fork would not have it; close it" in refused["error"]
    notebook.run("os.close(file)")
    status, made = http.post(fork, {"branches": 2})
    assert status == 201 and len({notebook.name, *made["sessions"]}) == 3
    for name in made["sessions"]:
        assert http.post(f"/v1/sessions/{name}/cells", {"code": "x.append(2); x"})[1]["value"] == "[1, 2]"
        assert http.send("DELETE", f"/v1/sessions/{name}", None)[0] == 204
    assert notebook.run("x")["value"] == "[1]"
    assert {http.post(fork, {"branches": count})[0] for count in (0, 65)} == {400}


@pytest.mark.parametrize("name", ["0" * 32, "x", "٣-1", "9" * 5000, "0-\x00%2e%2e"])
def test_an_id_that_nobody_was_given_is_404_and_says_what_to_do(http: Http, name: str) -> None:
    for method, more in (("POST", "/cells"), ("DELETE", "")):
        quoted = "".join(f"%{byte:02x}" for byte in name.encode())
        status, refused, _ = http.send(method, f"/v1/sessions/{quoted}{more}", b'{"code": "1"}' if more else None)
        assert status == 404
        assert "POST /v1/sessions" in refused["error"] or "docs/sandbox-service.md" in refused["error"]


def test_a_closed_session_is_gone_and_so_is_the_cell_it_ran(http: Http) -> None:
    notebook = Notebook(http, limits={"wall_seconds": 400})
    answers: list[Any] = []
    cell = {"code": SLEEPER["code"]}
    runner = threading.Thread(target=lambda: answers.append(http.post(f"{notebook.path}/cells", cell)))
    runner.start()
    assert eventually(lambda: http.status("running") == 1)
    assert notebook.close() == 204
    runner.join(20)
    ((status, refused),) = answers
    assert status == 404 and "there is no session" in refused["error"]
    assert notebook.close() == 404
    assert eventually(lambda: http.status("running") == 0)


def test_a_session_whose_daemon_died_is_gone() -> None:
    service = RunningService()
    http = Http(service.url)
    notebook = Notebook(http)
    notebook.run("x = 1")
    children = psutil.Process(service.process.pid).children()
    (daemon,) = [child for child in children if "daemon.main" in " ".join(child.cmdline())]
    daemon.kill()
    assert eventually(lambda: http.post("/v1/run", {"code": "1"})[0] == 200)
    ((state, starts),) = [(node["state"], node["starts"]) for node in http.status("nodes")]
    metrics = http.get("/metrics")[1]
    assert (state, starts) == ("up", 2)
    for sample in ('events_total{event="lost"} 1', 'events_total{event="restarted"} 1', "slots 2", "nodes_up 1"):
        assert f"rocstar_sandbox_node_{sample}" in metrics or f"rocstar_sandbox_{sample}" in metrics, metrics
    assert 'build_info{version="' in metrics and 'responses_total{status="200"}' in metrics
    assert http.post(f"{notebook.path}/cells", {"code": "x"})[0] == 404
    service.process.terminate()
    said = service.process.communicate()[1]
    assert "rocstar: the sandbox daemon was lost: " in said and "is up again: 2 slots" in said


def test_a_session_without_cells_for_too_long_is_forgotten_but_not_while_one_runs() -> None:
    with running(session_idle_seconds=0.3) as url:
        http = Http(url)
        short = Notebook(http, limits={"wall_seconds": 20})
        assert short.run("import time; time.sleep(1); 1")["value"] == "1"
        assert eventually(lambda: http.status("sessions") == 0)
        status, refused = http.post(f"{short.path}/cells", {"code": "1"})
        assert status == 404 and "was without a cell for too long" in refused["error"]


def test_sessions_of_one_token_end_none_of_anothers(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("one\ntwo\n")
    with running(session_slots=3, token="one", token_file=f"{tmp_path}/tokens") as url:
        http = Http(url)
        mine = Notebook(http, "one")
        mine.run("x = 42")
        others = [Notebook(http, "two") for _ in range(6)]
        assert [each.run("1")["value"] for each in others[-2:]] == ["1"] * 2
        assert mine.run("x")["value"] == "42"
        assert http.post(f"{others[0].path}/cells", {"code": "1"}, **others[0].head)[0] == 404, "its own made way"
        more = [Notebook(http, "one") for _ in range(2)]
        assert [each.run("1")["value"] for each in more] == ["1"] * 2, "of who has more one makes way"
        assert others[-1].run("1")["value"] == "1" and more[-1].run("1")["value"] == "1"
