"""Sessions over HTTP, against a running service: what stays between requests, who may have it, and how it ends."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from rocstar.sandbox.service.core import Asked, BadRequest
from rocstar.sandbox.service.native import Held, HeldSessions, HttpReply
from rocstar.sandbox.settings import Settings
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
    assert notebook.run("x * y, open('f').read()")["value"] == "(100, 'kept')"
    assert notebook.http.get(notebook.path)[1]["cells"] == 3


def test_a_session_is_forked_into_sessions_with_ids_of_their_own(notebook: Notebook) -> None:
    http, fork = notebook.http, f"{notebook.path}/fork"
    status, refused = http.post(fork, {"branches": 1})
    assert (status, refused["error"]) == (409, "a session is forked after its first cell; run one")
    notebook.run("x = [1]")
    status, made = http.post(fork, {"branches": 2})
    assert status == 201 and len({notebook.name, *made["sessions"]}) == 3
    for name in made["sessions"]:
        assert http.post(f"/v1/sessions/{name}/cells", {"code": "x.append(2); x"})[1]["value"] == "[1, 2]"
        assert http.get(f"/v1/sessions/{name}")[1]["cells"] == 2
        assert http.send("DELETE", f"/v1/sessions/{name}", None)[0] == 204
    assert notebook.run("x")["value"] == "[1]"
    assert {http.post(fork, {"branches": count})[0] for count in (0, 65)} == {400}


def test_the_operators_limits_hold_for_sessions(http: Http) -> None:
    status, refused = http.post("/v1/sessions", {"limits": {"wall_seconds": 1e6}})
    assert (status, "--max-wall-seconds" in refused["error"]) == (400, True)


@pytest.mark.parametrize("name", ["0" * 32, "x", "٣-1", "9" * 5000, "0-\x00%2e%2e"])
def test_an_id_that_nobody_was_given_is_404_and_says_what_to_do(http: Http, name: str) -> None:
    for method, more in (("POST", "/cells"), ("GET", ""), ("DELETE", "")):
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
        assert eventually(lambda: http.get(short.path)[0] == 404)
        assert "was without a cell for too long" in http.get(short.path)[1]["error"]


def test_sessions_of_one_token_end_none_of_anothers(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("one\ntwo\n")
    with running(session_slots=3, token="one", token_file=f"{tmp_path}/tokens") as url:
        http = Http(url)
        mine, others = Notebook(http, "one"), [Notebook(http, "two") for _ in range(6)]
        mine.run("x = 42")
        assert [each.run("1")["value"] for each in others] == ["1"] * 6
        assert mine.run("x")["value"] == "42"
        assert http.post(f"{others[0].path}/cells", {"code": "1"}, **others[0].head)[0] == 404, "its own made way"
        more = [Notebook(http, "one") for _ in range(2)]
        assert [each.run("1")["value"] for each in more] == ["1"] * 2, "of who has more one makes way"
        assert others[-1].run("1")["value"] == "1" and more[-1].run("1")["value"] == "1"


def test_too_many_sessions_are_refused_with_a_time_to_come_back() -> None:
    with running(max_sessions=1) as url:
        http = Http(url)
        one = Notebook(http)
        status, refused, headers = http.send("POST", "/v1/sessions", json.dumps({}).encode())
        assert (status, "close one" in refused["error"], headers["retry-after"]) == (503, True, "5")
        one.close()
        Notebook(http).run("1")


async def test_forks_made_together_make_no_more_sessions_than_one_caller_may_hold() -> None:
    """Those under way count; what is made of a session that was closed meanwhile is closed."""

    class Stub:
        closed = False

        def __init__(self) -> None:
            self.name = f"{id(self)}"

        async def fork(self, count: int) -> list[Stub]:
            await asyncio.sleep(0.01)
            made.extend(Stub() for _ in range(count))
            return made[-count:]

        async def close(self) -> None:
            self.closed = True

    made: list[Stub] = []
    service: Any = SimpleNamespace(settings=Settings(max_sessions=6))
    sessions = HeldSessions(service)
    first, second = (sessions._hold(cast(Any, Stub())) for _ in range(2))

    def fork(held: Held, count: int) -> Coroutine[Any, Any, HttpReply]:
        return sessions.fork(Asked(service, b'{"branches":%d}' % count, held.session.name, cast(Any, None)))

    told = await asyncio.gather(*(fork(each, 4) for each in (first, second)), return_exceptions=True)
    assert [isinstance(each, BadRequest) for each in told] == [False, True] and len(sessions.held) == 6
    assert [each.closed for each in made] == [False] * 4
    for branch in made:
        await sessions._close(sessions.held[branch.name])
    gone, _ = await asyncio.gather(fork(first, 1), sessions._close(first), return_exceptions=True)
    assert isinstance(gone, BadRequest) and made[-1].closed
