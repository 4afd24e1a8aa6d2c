"""Callers who err or mean harm: each gets one plain sentence, and everybody else is served on."""

from __future__ import annotations

import base64
import json
import socket
from typing import Any

import pytest

from rocstar.sandbox.service import local
from rocstar.sandbox.service.settings import Settings, complaint, is_loopback
from rocstar.sandbox.wire import SandboxDown
from tests.sandbox_service.support import Http, Notebook, eventually, running_cell


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"", 400, "the request is not valid JSON"),
        (b"[1", 400, "the request has a wrong field: Expected `object`, got `array`"),
        (b'{"code": 1}', 400, "Expected `str`, got `int` - at `$.code`"),
        (b'{"cod": "1"}', 400, "`cod`"),
        (b'{"code": "\xff"}', 400, "the request is not valid JSON"),
        (b'{"code": "1", "limits": {"wall_seconds": -1}}', 400, "> 0.0 - at `$.limits.wall_seconds`"),
        (b'{"code": "1", "limits": {"wall_seconds": 1e308}}', 400, "at most 600 here, got 1e+308"),
        (b'{"code": "1", "limits": {"memory_bytes": 99999999999}}', 400, "the operator's --max-memory-mb says so"),
        (b'{"code": "1", "limits": {"processes": 100000}}', 400, "<= 256"),
        (b'{"code": "1", "patience_seconds": 0}', 400, "$.patience_seconds"),
        (b"[" * 100_000, 400, "the request"),
        (b'{"code": "' + b"x" * (33 * 2**20) + b'"}', 413, "the body is longer than"),
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


@pytest.mark.parametrize("path", ["/v1/run", "/v1/notebook", "/v1/sessions/ID/cells", "/run_code", "/run_jupyter"])
def test_a_call_that_grows_too_long_on_its_way_to_the_sandbox_harms_nobody(http: Http, path: str) -> None:
    """Below the limit on bodies, above that on frames: two bytes of UTF-8 are six of ASCII."""
    text = "é" * (15 * 2**20)
    notebook = Notebook.open(http)
    with running_cell(notebook):
        if path == "/run_code":
            status, told = http.post(path, json.dumps({"code": "1", "stdin": text}, ensure_ascii=False).encode())
            assert (status, told["status"]) == (200, "Failed")
        elif path == "/run_jupyter":
            message = json.dumps({"cells": [f"x = '{text}'"]}, ensure_ascii=False).encode()
            status, told = http.post(path, message)
            assert status == 413
        else:
            asked: dict[str, Any] = {"cells": [text]} if "notebook" in path else {"code": text}
            where = path.replace("ID", Notebook.open(http).name)
            status, told = http.post(where, json.dumps(asked, ensure_ascii=False).encode())
            assert status in (400, 413)
            assert "bytes" in str(told.get("error") or told.get("message"))
        assert http.get("/status")[1]["running"] == 1, "the cell of another caller runs on"
    assert notebook.close() == 204


def test_the_most_that_one_program_may_give_back_is_given_back(http: Http) -> None:
    code = (
        "import os\nopen('f', 'wb').write(b'x' * (16 * 2**20 - 10))\n"
        "for _ in range(63): os.write(1, bytes([255]) * 65536)"
    )
    response = http.run(code, fetch=["f"], limits={"output_bytes": 4 * 2**20, "wall_seconds": 20})
    assert (response["outcome"], len(response["stdout"])) == ("ok", 63 * 65536)
    assert len(base64.b64decode(response["files"]["f"])) == 16 * 2**20 - 10
    status, told = http.post("/v1/run", {"code": "1", "limits": {"output_bytes": 4 * 2**20 + 1}})
    assert (status, "output_bytes" in told["error"]) == (400, True)


def test_files_outside_the_working_directory_are_rejected_with_a_response(http: Http) -> None:
    status, response = http.post("/v1/run", {"code": "1", "files": {"../x": ""}})
    assert (status, response["outcome"]) == (400, "rejected")
    assert "'../x' is not a relative path" in response["message"]


@pytest.mark.parametrize("path", ["/v1/batch", "/v1/stream"])
def test_a_batch_of_a_million_is_refused_and_so_is_an_empty_one(http: Http, path: str) -> None:
    million = b'{"calls":[' + b",".join([b'{"code":"1"}'] * 1_000_000) + b"]}"
    assert http.post(path, million) == (
        413,
        {"error": "the batch has 1000000 calls and at most 50000 are taken; send several batches"},
    )
    assert http.post(path, {"calls": []})[0] == 400


def test_unknown_paths_and_methods_are_told(http: Http) -> None:
    assert http.get("/nowhere") == (404, {"error": "there is no /nowhere here; GET /docs lists what there is"})
    assert http.get("/v1/run") == (405, {"error": "/v1/run is not called by GET; see GET /docs"})


def test_a_web_page_of_another_site_is_refused(http: Http) -> None:
    assert http.post("/v1/run", {"code": "1"}, Origin="http://evil.example")[0] == 403
    assert http.get("/status", Host="evil.example")[0] == 403
    assert http.get("/status", Host="localhost:8700")[0] == 200


def test_endless_headers_are_cut_off(http: Http) -> None:
    with http.socket() as connection:
        connection.sendall(b"GET /status HTTP/1.1\r\n" + b"x-filler: " + b"y" * 80_000)
        assert connection.recv(4096).startswith(b"HTTP/1.1 431")


def test_nonsense_instead_of_http_is_refused_and_the_service_goes_on(http: Http) -> None:
    with http.socket() as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")
    assert http.run("print(1)")["outcome"] == "ok"


def test_a_slow_request_is_cut_off_whether_in_its_headers_or_its_body() -> None:
    with local.local_service(("--preload", "", "--slots", "1", "--request-seconds", "0.5")) as url:
        http = Http(url)
        head = b"POST /v1/run HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{"
        for beginning in (head[:20], head):
            with http.socket() as connection:
                connection.sendall(beginning)
                assert connection.recv(4096).startswith(b"HTTP/1.1 408")
        assert http.run("print(1)")["outcome"] == "ok"


def test_a_caller_that_goes_away_in_the_middle_of_its_body_leaves_nothing_behind(http: Http) -> None:
    before = http.get("/status")[1]["calls"]
    with http.socket() as connection:
        connection.sendall(b"POST /v1/run HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{")
    assert eventually(lambda: http.get("/status")[1]["running"] == 0)
    assert http.get("/status")[1]["calls"] == before


def test_a_stream_whose_reader_stalls_is_held_and_others_are_served(http: Http) -> None:
    shouting = {"code": "print('x' * 60000)"}
    with http.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"calls": [shouting] * 400}).encode()
        head = b"POST /v1/stream HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        assert eventually(lambda: http.get("/status")[1]["running"] == 0 and http.get("/status")[1]["queue"] == 0)
        before = http.get("/status")[1]["calls"]["ok"]
        assert http.run("print(1)")["outcome"] == "ok"
        assert http.get("/status")[1]["calls"]["ok"] == before + 1 < 400


def test_a_token_is_asked_of_everybody_but_the_pulse() -> None:
    with local.local_service(("--preload", "", "--slots", "1", "--token", "s3cret")) as url:
        http = Http(url)
        assert http.get("/ping") == (200, "pong")
        assert http.get("/status")[0] == 401
        assert http.post("/v1/run", {"code": "1"}, Authorization="Bearer wrong")[0] == 401
        assert http.post("/token/wrong/v1/run", {"code": "1"})[0] == 401
        assert http.post("/v1/run", {"code": "1"}, Authorization="Bearer s3cret")[0] == 200
        assert http.post("/token/s3cret/run_code", {"code": "print(1)"})[1]["status"] == "Success"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"host": "0.0.0.0"}, "give --token SECRET, or say --open-to-network"),
        ({"host": "sandbox.example"}, "give --token SECRET"),
        ({"workers": 3, "slots": 2}, "--slots 2 must be at least --workers 3"),
        ({"port": 70_000}, "--port must be from 0 to 65535, got 70000"),
    ],
)
def test_a_service_that_would_be_unsafe_or_senseless_is_not_started(changes: dict[str, Any], sentence: str) -> None:
    assert sentence in complaint(Settings(**changes))


def test_a_public_address_is_served_with_a_token_or_by_permission() -> None:
    assert complaint(Settings(host="0.0.0.0", token="x")) == ""
    assert complaint(Settings(host="0.0.0.0", open_to_network=True)) == ""
    assert [is_loopback(host) for host in ("127.0.0.9", "::1", "localhost", "10.0.0.1", "my-host")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_a_service_that_cannot_start_says_why() -> None:
    with pytest.raises(SandboxDown, match="no_such_module"):
        local.start(("--preload", "no_such_module"))
    with pytest.raises(SandboxDown, match="--token SECRET"):
        local.start(("--host", "0.0.0.0"))
