"""The frames of one service; a gateway over several: calls, sessions, a node that dies; and deploy/haproxy.cfg,
with the real HAProxy in front of two."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import InvalidStatus

from rocstar.sandbox import wire
from rocstar.sandbox.call import Call, ForkRefused, Limits, ProgramOutcome, Response, SandboxDown, ServiceOutcome
from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import FrameKind
from tests.sandbox.driver import eventually
from tests.sandbox.scripted import INFO
from tests.sandbox_service.support import SLEEPER, Http, RunningService, batch_of, running

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "haproxy.cfg"
HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RunningService]]:
    """Two services, to stand behind something."""
    started = [RunningService(), RunningService()]
    yield started
    for node in started:
        node.stop()


def call(code: str, **fields: Any) -> Call:
    return Call(id="x", code=code, **fields)


def frames_url(http: Http) -> str:
    return f"ws{http.url.removeprefix('http')}/v1/frames"


async def test_the_client_runs_programs_and_sessions_at_a_service(http: Http) -> None:
    client = await asyncio.to_thread(SandboxClient.connect, [http.url])
    with client:
        assert client.info().slots == 4
        response = await client.run(call("print(open('f').read())", files={"f": b"in"}))
        assert (response.id, response.stdout) == ("x", "in\n")
        async with client.open_session() as session:
            await session.run("x = 20")
            assert (await session.run("x + 1")).value == "21"
            branches = await session.fork(2)
            assert await asyncio.to_thread(eventually, lambda: http.status("sessions") == 3)
            assert [(await branch.run("x += 1; x")).value for branch in branches] == ["21", "21"]
            with pytest.raises(ForkRefused, match="descriptor"):
                await session.run("import os\nends = os.pipe()")
                await session.fork(1)
            for branch in branches:
                await branch.close()
        answers = await asyncio.gather(*(client.run(call(f"print({n})")) for n in range(50)))
        assert [int(answer.stdout) for answer in answers] == list(range(50))
        big = "x" * (3 * 2**20)
        assert (await client.run(call("print(len(input()))", stdin=big))).stdout == f"{len(big)}\n"


IMPATIENT = """
import functools, uvicorn
uvicorn.Config = functools.partial(uvicorn.Config, ws_ping_interval=0.05, ws_ping_timeout=0.05)
"""


async def test_a_caller_that_stands_still_for_longer_than_pings_are_answered_keeps_its_connection() -> None:
    """As one that learns does; uvicorn's own default closes it after 40 s."""
    with running(first=IMPATIENT) as url, await asyncio.to_thread(SandboxClient.connect, [url]) as client:
        before = client.nodes[0].connection
        await asyncio.to_thread(time.sleep, 0.5)
        assert (await client.run(call("6 * 7"))).value == "42"
        assert client.nodes[0].connection is before


class Closing:
    """A service that closes its first connection after the hello, and answers calls on later ones."""

    def __init__(self) -> None:
        self.connections = 0

    async def __call__(self, socket: ServerConnection) -> None:
        self.connections += 1
        await socket.send(wire.pack(FrameKind.HELLO, 0, wire.encode(INFO)))
        if self.connections == 1:
            return
        reader = wire.FrameReader()
        async for data in socket:
            assert isinstance(data, bytes)
            for frame in reader.feed(data):
                if frame.kind is FrameKind.CALL:
                    response = Response(id="x", outcome=ProgramOutcome.OK, value="42")
                    await socket.send(wire.pack(FrameKind.RESPONSE, frame.number, wire.encode(response)))


async def test_a_call_to_a_service_that_is_closing_goes_over_the_next_connection() -> None:
    """Before, what was to be sent then raised out of the event loop, and nothing read the end of the connection."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    async with serve(Closing(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with await asyncio.to_thread(SandboxClient.connect, [f"http://127.0.0.1:{port}"]) as client:
            assert (await client.run(call("6 * 7"))).value == "42"
    assert told == []


async def test_cancelling_and_leaving_end_programs_and_sessions(http: Http) -> None:
    client = await asyncio.to_thread(SandboxClient.connect, [http.url])
    with client:
        sleeper = asyncio.create_task(client.run(call(SLEEPER["code"], limits=Limits(wall_seconds=400))))
        assert await asyncio.to_thread(eventually, lambda: http.status("running") == 1)
        sleeper.cancel()
        assert await asyncio.to_thread(eventually, lambda: http.status("running") == 0)
        await client.open_session().run("1")
        assert await asyncio.to_thread(eventually, lambda: http.status("sessions") == 1)
        sleeper = asyncio.create_task(client.run(call(SLEEPER["code"], limits=Limits(wall_seconds=400))))
        assert await asyncio.to_thread(eventually, lambda: http.status("running") == 1)
    with pytest.raises(SandboxDown):
        await sleeper
    assert await asyncio.to_thread(eventually, lambda: http.status("running") == http.status("sessions") == 0)


async def test_the_operators_limits_hold_for_frames_and_nonsense_is_rejected_alone(http: Http) -> None:
    async with connect(frames_url(http)) as socket:
        reader = wire.FrameReader()
        found: dict[int, Response] = {}
        too_long = wire.encode(call("1", limits=Limits(wall_seconds=1e5)))
        for number, body in enumerate((too_long, b"nonsense", wire.encode({"code": 1, "id": "y"}), b"\x81\xa4code")):
            await socket.send(wire.pack(FrameKind.CALL, number, body))
        await socket.send(wire.pack(FrameKind.CALL, 9, wire.encode(call("print(1)"))))
        while len(found) < 5:
            frames = reader.feed(await socket.recv(decode=False))
            found |= {
                frame.number: wire.decode_response(frame.body) for frame in frames if frame.kind is FrameKind.RESPONSE
            }
    assert {found.pop(9).stdout} == {"1\n"}
    assert {response.outcome for response in found.values()} == {ProgramOutcome.REJECTED}
    assert "--max-wall-seconds" in found[0].message


async def test_a_call_that_is_cancelled_at_once_is_answered_and_its_number_free_again(http: Http) -> None:
    asked, cancel = wire.pack(FrameKind.CALL, 1, wire.encode(call("1"))), wire.pack(FrameKind.CANCEL, 1)
    reader, found = wire.FrameReader(), list[Response]()
    async with connect(frames_url(http)) as socket:
        for _ in range(2):
            await socket.send(asked + cancel)
            while not found:  # other frames may come in one message with the answer, and behind it
                frames = reader.feed(await asyncio.wait_for(socket.recv(decode=False), 60))
                found += [wire.decode_response(one.body) for one in frames if one.kind is FrameKind.RESPONSE]
            assert [one.outcome for one in found] == [ServiceOutcome.CANCELLED]
            found.clear()


@pytest.mark.parametrize("data", [wire.pack(FrameKind.HELLO), b"\xff" * 20, "text"])
async def test_what_is_no_frame_ends_the_connection_only(http: Http, data: bytes | str) -> None:
    async with connect(frames_url(http)) as socket:
        await socket.send(data)
        await asyncio.wait_for(socket.wait_closed(), 20)
        assert socket.close_code == 1002
    assert (await asyncio.to_thread(http.run, "print(1)"))["stdout"] == "1\n"


async def test_frames_need_the_token_and_no_page_of_another_site_may_send_them() -> None:
    service = RunningService(token="s3cret")
    evil = {"Authorization": "Bearer s3cret", "Origin": "http://evil.example"}
    for way, headers, status, told in (
        ("", {}, 401, b"a token is needed"),
        ("/token/wrong", {}, 401, b"this token is unknown here"),
        ("", evil, 403, b""),
    ):
        with pytest.raises(InvalidStatus) as refused:
            await connect(frames_url(Http(service.url + way)), additional_headers=headers)
        assert refused.value.response.status_code == status and told in refused.value.response.body
    with pytest.raises(SandboxDown, match=r"401.*`token=`.*ROCSTAR_SANDBOX_TOKEN"):
        await asyncio.to_thread(SandboxClient.connect, [service.url], token="wrong")
    with await asyncio.to_thread(SandboxClient.connect, [service.url], token="s3cret") as client:
        assert (await client.run(call("print(1)"))).stdout == "1\n"
    service.process.terminate()
    assert "ERROR" not in service.process.communicate()[1], "a refused connection is no error in the log"


async def test_a_gateway_spreads_calls_over_its_nodes_and_has_sessions(nodes: list[RunningService]) -> None:
    def work(http: Http) -> None:
        assert http.status("slots") == 4
        results = http.post("/run/long-batch", batch_of(*(f"print({n})" for n in range(60))))[1]["results"]
        assert [result["stdout"] for result in results] == [f"{n}\n" for n in range(60)]
        served = [Http(node.url).status("calls").get("ok", 0) for node in nodes]
        assert all(count > 10 for count in served), served
        with http.under_way("/v1/run", SLEEPER):
            pass
        assert eventually(lambda: http.status("running") == 0)

    with running(nodes=",".join(node.url for node in nodes)) as url:
        await asyncio.to_thread(work, Http(url))
        with await asyncio.to_thread(SandboxClient.connect, [url]) as client:
            session = client.open_session()
            await session.run("x = 1")
            for _ in range(3):  # branches stay at the node of their session, whichever that is
                assert [(await branch.run("x")).value for branch in await session.fork(2)] == ["1", "1"]


def test_a_node_that_dies_loses_no_call_and_is_used_when_it_is_back() -> None:
    bearer = {"Authorization": "Bearer t"}
    nodes = [RunningService(token="t") for _ in range(2)]
    gateway = RunningService(nodes=",".join(node.url for node in nodes), token="t")
    http = Http(gateway.url)
    assert http.get("/v1/status", **bearer)[1].get("slots") == 4, "before any call"

    def run(number: int) -> tuple[int, Any]:
        return http.post("/v1/run", {"code": f"import time; time.sleep(0.05); print({number})"}, **bearer)

    def states() -> dict[str, str]:
        return {node["node"]: node["state"] for node in http.get("/v1/status", **bearer)[1]["nodes"]}

    with ThreadPoolExecutor(20) as pool:
        calls = [pool.submit(run, number) for number in range(60)]
        assert eventually(lambda: http.get("/v1/status", **bearer)[1]["calls"].get("ok", 0) > 10)
        nodes[0].process.kill()
        assert eventually(lambda: states() == {nodes[0].url: "down", nodes[1].url: "up"})
        statuses, answers = zip(*(each.result() for each in calls), strict=True)
    assert set(statuses) == {200}
    assert [answer["stdout"] for answer in answers] == [f"{n}\n" for n in range(60)]
    assert {answer["attempt"] for answer in answers} <= {1, 2}
    nodes[0].process.wait()
    back = RunningService(port=int(nodes[0].url.rpartition(":")[2]), token="t")
    assert eventually(lambda: set(states().values()) == {"up"})
    metrics = http.get("/metrics", **bearer)[1]
    for kind, count in {"lost": 1, "restarted": 1}.items():
        assert f'rocstar_sandbox_node_events_total{{event="{kind}"}} {count}\n' in metrics, metrics
    assert (back.stop(), nodes[1].stop()) == (0, 0)
    assert eventually(lambda: set(states().values()) == {"down"})
    gateway.process.terminate()
    said = gateway.process.communicate()[1]
    assert all(f"{nodes[0].url} {what}" in said for what in ("was lost", "is up again")), said
    assert f"{nodes[1].url} was lost: it ended the connection" in said and "rocstar: stopping; pending calls" in said


def test_callers_of_a_gateway_take_turns_also_after_its_nodes_have_another_token(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("one\ntwo\n")
    (node_file := tmp_path / "of-node").write_text("one\n")
    with (
        running(token="one", token_file=str(node_file)) as node,
        running(token="one", token_file=f"{tmp_path}/tokens", nodes=node) as gateway,
    ):
        for token in ("one", "three"):
            node_file.write_text(f"{token}\none\n")
            assert eventually(lambda token=token: Http(f"{node}/token/{token}").get("/v1/status")[0] == 200)
            alone, crowded = Http(gateway).waits("two", "one")
            assert alone < crowded / 2


SLOW_TO_SEND = """
import asyncio
from starlette.websockets import WebSocket
send_bytes = WebSocket.send_bytes
async def late(self, data):
    await asyncio.sleep(0.5)
    await send_bytes(self, data)
WebSocket.send_bytes = late
"""


def test_a_node_that_drains_answers_what_a_gateway_sent_it_however_slowly_it_sends() -> None:
    node = RunningService(SLOW_TO_SEND)
    with running(nodes=node.url) as url:
        slow = {"code": "import time; time.sleep(2); print('done')", "limits": {"wall_seconds": 60}}
        with Http(url).under_way("/v1/run", slow) as connection:
            assert node.stop() == 0
            assert b'"stdout":"done\\n"' in connection.recv(65536)


@pytest.fixture(scope="module")
def front(nodes: list[RunningService], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    if HAPROXY is None:
        pytest.skip("haproxy is not installed (apt-get install haproxy)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    text = CONFIGURATION.read_text().replace("127.0.0.1:8700", address)
    for number, node in enumerate(nodes, 1):
        text = text.replace(f"10.0.0.{number}:8700", node.url.removeprefix("http://"))
    path = tmp_path_factory.mktemp("haproxy") / "haproxy.cfg"
    path.write_text(text)
    process = subprocess.Popen([HAPROXY, "-db", "-q", "-f", str(path)])
    http = Http(f"http://{address}")
    assert eventually(http.answers)
    yield http
    process.terminate()
    process.wait(10)


async def test_calls_are_spread_and_the_cells_of_a_session_are_not(front: Http, nodes: list[RunningService]) -> None:
    for number in range(20):
        assert front.run(f"print({number})")["stdout"] == f"{number}\n"
    assert all(Http(node.url).status("calls").get("ok", 0) >= 5 for node in nodes)
    with await asyncio.to_thread(SandboxClient.connect, [front.url]) as client:
        session = client.open_session()
        values = [(await session.run("n = globals().get('n', 0) + 1; n")).value for _ in range(3)]
    assert values == ["1", "2", "3"]


def test_a_service_that_ends_is_left_out(front: Http, nodes: list[RunningService]) -> None:
    assert nodes[0].stop() == 0
    assert [front.run("print(1)")["stdout"] for _ in range(10)] == ["1\n"] * 10
