"""deploy/haproxy.cfg, with the real HAProxy in front of two services."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.driver import eventually
from tests.sandbox_service.support import Http, RunningService

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "haproxy.cfg"
HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def front(nodes: list[RunningService], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    if HAPROXY is None:
        pytest.skip("haproxy is not installed (apt-get install haproxy)")
    address = f"127.0.0.1:{free_port()}"
    text = CONFIGURATION.read_text().replace("127.0.0.1:8700", address)
    for number, node in enumerate(nodes, 1):
        text = text.replace(f"10.0.0.{number}:8700", node.url.removeprefix("http://"))
    path = tmp_path_factory.mktemp("haproxy") / "haproxy.cfg"
    path.write_text(text)
    process = subprocess.Popen([HAPROXY, "-db", "-q", "-f", str(path)])
    http = Http(f"http://{address}")
    assert eventually(lambda: is_up(http))
    yield http
    process.terminate()
    process.wait(10)


def is_up(http: Http) -> bool:
    try:
        return http.get("/ping") == (200, "pong")
    except OSError:
        return False


def test_calls_are_spread_and_the_cells_of_a_session_are_not(front: Http, nodes: list[RunningService]) -> None:
    for number in range(20):
        assert front.run(f"print({number})")["stdout"] == f"{number}\n"
    assert all(Http(node.url).status("calls").get("ok", 0) >= 5 for node in nodes)
    for key in ("one", "two", "three"):
        session = front.post("/v1/sessions", {}, X_Session=key)[1]["session"]
        for number in range(1, 4):
            cell = {"code": "n = globals().get('n', 0) + 1; n"}
            _, response = front.post(f"/v1/sessions/{session}/cells", cell, X_Session=key)
            assert response["value"] == str(number)
        assert front.send("DELETE", f"/v1/sessions/{session}", None, X_Session=key)[0] == 204


def test_a_service_that_ends_is_left_out(front: Http, nodes: list[RunningService]) -> None:
    assert nodes[0].stop() == 0
    assert [front.run("print(1)")["stdout"] for _ in range(10)] == ["1\n"] * 10
