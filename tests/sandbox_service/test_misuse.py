"""Callers who err or mean harm: each gets one plain sentence, and everybody else is served on."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from rocstar.sandbox import wire
from rocstar.sandbox.call import Call, Limits
from rocstar.sandbox.service import core
from rocstar.sandbox.service.core import complaint, is_loopback
from rocstar.sandbox.settings import Settings
from rocstar.sandbox.wire import FrameKind
from tests.sandbox.driver import eventually
from tests.sandbox_service.support import SLEEPER, Http, RunningService, batch_of, running


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"", 400, "the request is not valid JSON"),
        (b"[1", 400, "the request has a wrong field: Expected `object`, got `array`"),
        (b'{"cod": "1"}', 400, "`cod`"),
        (b'{"code": "\xff"}', 400, "the request is not valid JSON"),
        (b'{"code": "\\ud800"}', 400, "not valid JSON: it has half of a surrogate pair, which is no character"),
        (
            b'{"code": "\\ud800" }    ',
            400,
            "not valid JSON: JSON is malformed: unexpected end of escaped utf-16 surrogate",
        ),
        (b'{"code": "\\\\ud800"', 400, "not valid JSON: Input data was truncated"),
        (b'{"code": "1", "limits": {"wall_seconds": -1}}', 400, "limit wall_seconds must be from"),
        (b'{"code": "1", "limits": {"wall_seconds": 1e308}}', 400, "at most 600 here, got 1e+308"),
        (b'{"code": "1", "limits": {"memory_bytes": 99999999999}}', 400, "the operator's --max-memory-mb says so"),
        (
            b'{"code": "1", "limits": {"memory_bytes": ' + b"9" * 400 + b"}}",
            400,
            "Expected `int` <= 9223372036854775807",
        ),
        (b'{"code": "1", "limits": {"output_bytes": 4194305}}', 400, "output_bytes"),
        (b'{"code": "1", "limits": {"processes": 1.5}}', 400, "Expected `int`, got `float` - at `$.processes`"),
        (b'{"code": "1", "limits": {"wall": 1}}', 400, "there is no limit 'wall'"),
        (b'{"code": "1", "patience_seconds": 0}', 400, "$.patience_seconds"),
        (b'{"code": "1", "files": {"data.bin": {"base64": "AAA"}}}', 400, "Invalid base64"),
        (b"[" * 100_000, 400, "the request"),
        (b'{"code": "' + b"x" * (17 * 2**20) + b'"}', 413, "the body is longer than"),
    ],
)
def test_a_bad_call_is_refused_in_one_sentence(http: Http, body: bytes, status: int, sentence: str) -> None:
    try:
        got, answer = http.post("/v1/run", body)
    except OSError as error:  # the answer overtook the rest of the body
        assert status == 413, error
        return
    assert (got, set(answer)) == (status, {"error"})
    assert sentence in answer["error"] and "\n" not in answer["error"]


CODE = {"type": "python", "solution": "1", "input": "a", "expected_output": "b", "sub_id": "x", "options": {}}
FILES: dict[str, Any] = {"files": {"a": "AAAA"}, "fetch_files": ["a"], "memory_limit_MB": 99}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/run": {"code": "1", "id": "a", "stdin": "", "files": {}, "fetch": [], "seed": 1, "limits": {}},
    "/run": CODE,
    "/judge/long-batch": {"type": "batch", "submissions": [CODE], "sub_id": "x"},
    "/run_code": {"code": "1", "language": "python", "run_timeout": 1, "compile_timeout": 1, "stdin": "x", **FILES},
    "/run_jupyter": {"cells": ["1"], "total_timeout": 2, "cell_timeout": 1, "kernel": "python3", **FILES},
}
BAD: list[Any] = [
    None, -1, 1e-320, 2**70, float("nan"), "", "x" * 100_000, "\ud800", [[]], {"a": {"b": 1}}, {"\0": ""}, {"../x": ""},
    ["/etc/passwd"],
]  # fmt: skip


@pytest.mark.parametrize("path", GOOD)
def test_whatever_a_field_holds_it_is_run_or_refused_and_never_our_failure(http: Http, path: str) -> None:
    for field in GOOD[path]:
        for value in BAD:
            status, answer = http.post(path, {**GOOD[path], field: value})
            assert status in (200, 400, 422), (field, value, answer)
            if status in (400, 422):
                assert set(answer) <= {"error", "detail"} or answer["message"], (field, value, answer)
    good = json.dumps(GOOD[path])
    for body in (b"null", b"[]", good.encode()[:-1], b"{" * 5000, good.encode("utf-16")):
        status, answer = http.post(path, body)
        assert (status in (400, 422), len(answer)) == (True, 1), (body, answer)


MANY, FEWER = 1_000_000, 900_000
HEAVY = {
    "files": ("/v1/run", lambda: b'{"code":"","files":{' + b",".join(b'"%d":""' % n for n in range(MANY)) + b"}}"),
    "nested fetch": ("/v1/run", lambda: b'{"code":"","fetch":[' + b",".join([b"[]"] * 5 * MANY) + b"]}"),
    "hidden keys": ("/run/batch", lambda: b'{"submissions":[' + b",".join([b'{"\\u0074ype":""}'] * FEWER) + b"]}"),
}


@pytest.mark.parametrize(("path", "body"), HEAVY.values(), ids=HEAVY)
def test_a_body_of_millions_of_things_is_refused_before_they_are_built(
    http: Http, path: str, body: Callable[[], bytes]
) -> None:
    """The process would need hundreds of megabytes for them."""
    made = body()
    assert len(made) < 16 * 2**20
    status, answer = http.post(path, made)
    assert status in (400, 413, 422) and len(answer) == 1
    assert http.run("print(1)")["outcome"] == "ok"


def test_unknown_paths_and_methods_are_named(http: Http) -> None:
    paths = "docs/sandbox-service.md lists what there is"
    assert http.get("/nowhere") == (404, {"error": f"there is no /nowhere here; {paths}"})
    assert http.get("/v1/run") == (405, {"error": f"/v1/run is not called by GET; {paths}"})
    for path in ("/mcp", "/v1/nodes", "/v1/batch", "/v1/sessions", "/v1/sessions/1/cells"):
        assert http.post(path, {})[0] == 404


def test_a_web_page_of_another_site_is_refused(http: Http) -> None:
    for origin in ("http://evil.example", "http://[", "null"):
        assert http.post("/v1/run", {"code": "1"}, Origin=origin)[0] == 403
    assert http.get("/status", Host="evil.example")[0] == 403
    assert http.get("/status", Host="localhost:8700")[0] == 200


@pytest.mark.parametrize("ended", [False, True])
def test_headers_over_16_kib_are_refused_whole_or_not(http: Http, ended: bool) -> None:
    with http.connect() as connection:
        end = b"\r\n\r\n" if ended else b""
        connection.sendall(b"GET /status HTTP/1.1\r\nhost: localhost\r\nx-filler: " + b"y" * 17_000 + end)
        assert connection.recv(4096).startswith(b"HTTP/1.1 431")
    with http.connect() as connection:
        connection.sendall(b"GET /ping HTTP/1.1\r\nhost: localhost\r\nx-filler: " + b"y" * 15_000 + b"\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_fields_after_a_body_are_no_headers_and_are_not_kept(http: Http) -> None:
    with http.connect() as connection:
        head = b"GET /status HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head + b"0\r\nhost: evil.example\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_nonsense_instead_of_http_is_refused_in_a_sentence(http: Http) -> None:
    with http.connect() as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400") and b'{"error":"this is no HTTP' in answer


@pytest.fixture(scope="module")
def hasty() -> Iterator[Http]:
    with running(request_seconds=0.5) as url:
        yield Http(url)


@pytest.mark.parametrize("begun", [20, None])
def test_a_slow_request_is_cut_off_whether_in_its_headers_or_its_body(hasty: Http, begun: int | None) -> None:
    head = b"POST /v1/run HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{"
    with hasty.connect() as connection:
        connection.sendall(head[:begun])
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")
    assert begun or hasty.run("import time; time.sleep(0.8)")["outcome"] == "ok", "a slow program is no slow request"


def test_a_caller_that_leaves_in_the_middle_of_its_body_leaves_nothing_behind(http: Http) -> None:
    before = http.status("calls")
    with http.connect() as connection:
        connection.sendall(b"POST /v1/run HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{")
    assert http.status("running") == 0
    assert http.status("calls") == before


def begun(length: int) -> bytes:
    return b"POST /v1/run HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % length


HASTY = "from rocstar.sandbox.service import core; core.STALLED_SECONDS = 0.5\n"
ROOM = 4 * 2**20


@pytest.fixture(scope="module")
def narrow() -> Iterator[Http]:
    with running(first=HASTY, max_held_mb=4) as url:
        yield Http(url)


def held(http: Http) -> float:
    found = re.search(r"^rocstar_sandbox_held_bytes (\S+)", http.get("/metrics")[1], re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_half_bodies_fill_no_memory_and_keep_back_no_small_call_and_after_a_while_no_large_one(narrow: Http) -> None:
    large = {"code": "1", "stdin": "x" * 2**20}
    with ExitStack() as stack:
        connections = [stack.enter_context(narrow.connect()) for _ in range(2)]
        for connection in connections:
            connection.sendall(begun(3 * 2**20) + b"x" * (2 * 2**20 - 1000))
        assert eventually(lambda: held(narrow) > ROOM * 0.9)
        assert narrow.run("1")["value"] == "1", "a small one always passes"
        assert eventually(lambda: narrow.post("/v1/run", large)[0] == 200), "who does not move is closed"
        assert connections[0].recv(4096)[:12] == b"HTTP/1.1 408"
    assert eventually(lambda: held(narrow) == 0)


async def test_half_frames_fill_no_memory(narrow: Http) -> None:
    half = wire.HEADER.pack(60 * 2**20, FrameKind.CALL, 1) + b"x" * 2**19
    async with AsyncExitStack() as stack:
        sockets = [await stack.enter_async_context(connect(f"ws{narrow.url[4:]}/v1/frames")) for _ in range(12)]
        for socket in sockets:
            await socket.send(half)
        # those that do not fit are read no further, and who has not moved is closed for them
        assert await asyncio.to_thread(eventually, lambda: sum(each.close_code is not None for each in sockets) >= 4)
        assert await asyncio.to_thread(held, narrow) <= ROOM
        assert (await asyncio.to_thread(narrow.run, "1"))["value"] == "1"


async def test_frames_that_nobody_reads_fill_no_memory(narrow: Http) -> None:
    call = wire.encode(Call(id="", code="print('x' * 4_000_000)", limits=Limits(output_bytes=2**22)))
    before = narrow.run("1") and narrow.status("calls")["ok"]

    def is_cut_off() -> bool:  # sockets have room for two answers at most
        return narrow.status("calls")["ok"] > before + 2 and narrow.status("running") == 0 and held(narrow) == 0

    async with connect(f"ws{narrow.url[4:]}/v1/frames", max_queue=1, close_timeout=0.1) as socket:
        for number in range(8):
            await socket.send(wire.pack(FrameKind.CALL, number, call))
        assert await asyncio.to_thread(eventually, is_cut_off)
        received = 0
        with pytest.raises(ConnectionClosedError):
            while True:
                received += len(await asyncio.wait_for(socket.recv(), 30))
        assert received < 4 * 4_000_000


def test_above_twice_the_limit_who_holds_most_is_closed_though_it_moves() -> None:
    budget, closed = core.Budget(2**20), list[str]()
    holds = {name: core.Hold(budget, lambda name=name: closed.append(name)) for name in ("many", "few")}
    with holds["many"], holds["few"]:
        holds["few"].resize(2**19, refused=False)
        holds["many"].resize(2**20, refused=False)
        assert (closed, budget.size) == ([], 3 * 2**19)
        holds["many"].resize(2**21, refused=False)
        assert (closed, budget.size) == (["many"], 2**19)


def test_many_who_have_not_moved_make_room_however_little_each_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, closed = core.Budget(2**20), list[int]()
    for number in range(20):
        core.Hold(budget, lambda number=number: closed.append(number)).resize(60_000)
    monkeypatch.setattr(core, "STALLED_SECONDS", 0.0)
    with core.Hold(budget) as large:
        large.resize(2**19)
    assert len(closed) == 12 and budget.size <= 2**20


def test_answers_that_nobody_reads_fill_no_memory(narrow: Http) -> None:
    body = json.dumps({"code": "print('\\0' * 900_000)", "limits": {"output_bytes": 2**22}}).encode()  # 5.4 MB as JSON
    before = narrow.run("1") and narrow.status("calls")["ok"]
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(narrow.connect()).sendall(begun(len(body)) + body)
        assert eventually(lambda: narrow.status("calls")["ok"] == before + 6)
        assert 0 < held(narrow) <= ROOM
    assert eventually(lambda: held(narrow) == 0)


def test_results_of_a_notebook_are_held_within_the_room_there_is(narrow: Http) -> None:
    status, refused = narrow.post("/run_jupyter", {"cells": ["print('x' * 1_000_000)"] * 8})
    assert (status, "memory set aside" in refused["error"]) == (503, True)
    assert eventually(lambda: held(narrow) == 0)


def test_who_sends_a_second_request_ahead_and_goes_ends_the_first() -> None:
    service = RunningService()
    http = Http(service.url)
    for seconds in (0.5, 300):
        body = json.dumps({"code": f"import time; time.sleep({seconds})", "limits": {"wall_seconds": 400}}).encode()
        with http.connect() as connection:
            connection.sendall(2 * (begun(len(body)) + body))
            assert eventually(lambda: http.status("running") == 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        assert eventually(lambda: http.status("running") == 0)
        assert http.run("1")["value"] == "1"
    service.process.terminate()
    assert "Traceback" not in service.process.communicate()[1]


def test_a_caller_over_the_limit_of_connections_is_told_so_and_not_reset() -> None:
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (266, 266))"
    with running(first=few) as url, ExitStack() as stack:
        http = Http(url)
        answers = []
        for _ in range(20):
            connection = stack.enter_context(http.connect())
            connection.sendall(begun(100_000) + b"x" * 5000)
            connection.settimeout(0.2)
            with suppress(TimeoutError):
                answers.append(connection.recv(4096)[:12])
        assert answers == [b"HTTP/1.1 503"] * 10


def test_a_full_queue_refuses_at_once_and_is_full_for_nobody_but_who_fills_it(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("one\ntwo\n")
    with running(max_queue=6, token="one", token_file=str(file)) as url, ThreadPoolExecutor(30) as pool:
        one, two = Http(f"{url}/token/one"), Http(f"{url}/token/two")
        with one.under_way("/v1/run", SLEEPER), one.under_way("/v1/run", SLEEPER, running=2):
            greedy = [pool.submit(one.run, "1") for _ in range(6)]
            assert eventually(lambda: one.status("queue") == 6)
            assert [one.post("/v1/run", {"code": "1"})[0] for _ in range(12)] == [503] * 12
            assert not any(each.done() for each in greedy)
            modest = [pool.submit(two.run, "1") for _ in range(2)]
            assert eventually(lambda: two.status("queue") == 8)
        assert {each.result()["outcome"] for each in greedy + modest} == {"ok"}
        batch = pool.submit(one.post, "/run/long-batch", batch_of(*["import time; time.sleep(0.1)"] * 30))
        assert eventually(lambda: one.status("queue") > 20)
        assert re.search(r"^rocstar_sandbox_waiting [123]\d", one.get("/metrics")[1], re.M)
        assert all(each["run_success"] for each in batch.result()[1]["results"]), "those of a batch wait"


def test_tokens_are_asked_for_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("one\ntwo\n")
    with running(token="one", token_file=str(file)) as url:
        http = Http(url)

        def status(token: str) -> int:
            return http.get("/v1/status", Authorization=f"Bearer {token}")[0]

        assert http.get("/ping") == (200, "pong"), "the pulse asks for no token"
        assert http.get("/status")[0] == http.get("/v1/status")[0] == status("wrong") == 401
        assert http.post("/token/wrong/v1/run", {"code": "1"})[0] == 401
        assert http.post("/token/one/run_code", {"code": "print(1)"})[1]["status"] == "Success"
        file.write_text("two\nthree\n")
        assert eventually(lambda: status("three") == 200)
        assert (status("one"), status("two")) == (401, 200)
        file.write_text("\n")
        time.sleep(2 * core.TOKEN_SECONDS)
        assert status("two") == 200, "a list that cannot be read changes nothing"


def test_each_change_of_the_tokens_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core, "TOKEN_SECONDS", -1.0)
    (file := tmp_path / "tokens").write_text("one\ntwo\n")
    tokens = core.CallerTokens(Settings(token="one", token_file=file))
    for text in ("two\none\n", "", "", "two\none\n", "", "three\none\n"):
        file.write_text(text)
        tokens.now()
    said = ["2 tokens are accepted now", "the tokens stay", "can be read again", "the tokens stay", "2 tokens are"]
    assert [part in line for part, line in zip(said, caplog.messages, strict=True)] == [True] * 5, caplog.messages


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"host": "0.0.0.0"}, "set ROCSTAR_SANDBOX_TOKEN or give --token-file FILE"),
        ({"host": "sandbox.example"}, "--open-to-network"),
        ({"slots": 10**6}, "--daemons 1 and --slots 1000000 take 4194.4 GB at rest, and "),
        ({"daemons": 3, "slots": 2}, "--slots 2 must be at least --daemons 3"),
        ({"max_held_mb": 0}, "--max-held-mb must be at least 1, got 0"),
        ({"port": 70_000}, "--port must be from 0 to 65535, got 70000"),
        ({"patience_seconds": float("nan")}, "--patience-seconds must be above 0, got nan"),
        ({"token": "zwei Worte"}, "printable ASCII"),
        ({"wall_seconds": 1e5}, "limit wall_seconds is at most 600"),
        ({"memory_mb": 5000}, "limit memory_bytes is at most 4294967296 here, got 5242880000; the operator's"),
        ({"min_isolation": "L9"}, "--min-isolation L9 is none of L1, L2, L3"),
        ({"nodes": " , "}, "--nodes ' , ' must name services, each once; write http://"),
        (
            {"nodes": "http://a:1", "slots": 8},
            "--slots is of services that run programs; with --nodes, give it to these",
        ),
        ({"nodes": "http://a:1", "preload": ""}, "--preload is of services"),
        ({"nodes": "http://a:1,http://b:1,http://a:1"}, "must name services, each once"),
    ],
)
def test_a_service_that_would_be_unsafe_or_senseless_is_not_started(changes: dict[str, Any], sentence: str) -> None:
    assert sentence in complaint(Settings(**changes))


def test_a_public_address_is_served_with_a_token_or_by_permission() -> None:
    assert complaint(Settings(host="0.0.0.0", token="x")) == ""
    assert complaint(Settings(host="0.0.0.0", open_to_network=True)) == ""
    hosts = ("127.0.0.9", "::1", "localhost", "10.0.0.1", "my-host")
    assert [is_loopback(host) for host in hosts] == [True, True, True, False, False]


def test_a_service_that_cannot_start_says_why() -> None:
    with pytest.raises(RuntimeError, match="no_such_module"):
        RunningService(preload="no_such_module")
