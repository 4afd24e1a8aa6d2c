"""Calls and answers that cannot be taken: told to their caller alone, and never a host that is lost for the others."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rocstar.sandbox import fetch, launcher, wire
from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import MAX_OUTPUT_BYTES, Limits, ProgramOutcome, Request, Response, SandboxDown
from tests.sandbox.support import eventually, program_processes, run

WAIT_SECONDS = 60.0  # a bound on what would otherwise be for ever
TOO_LONG = "é" * (wire.MAX_FRAME_BYTES // 6)  # two bytes of UTF-8, six of JSON in ASCII
WIDE = Limits(wall_seconds=30.0, cpu_seconds=30.0, output_bytes=MAX_OUTPUT_BYTES)


async def beside_another(client: SandboxClient, *requests: Request) -> list[Response]:
    """Their responses, while a call of somebody else runs from before them until after them."""
    first = client.process.pid
    other = asyncio.ensure_future(run(client, "import time\ntime.sleep(2)\n7", wall_seconds=60.0))
    assert await asyncio.to_thread(eventually, lambda: bool(program_processes(client)))
    responses = [await client.run(request) for request in requests]
    ended = await other
    assert (ended.value, ended.attempt, client.process.pid) == ("7", 1, first)
    return responses


@pytest.mark.parametrize("place", ["code", "stdin", "files"])
async def test_a_request_too_long_for_a_frame_is_rejected_and_harms_nobody(
    own_client: SandboxClient, place: str
) -> None:
    requests = {
        "code": Request(id="long", code=TOO_LONG),
        "stdin": Request(id="long", code="1", stdin=TOO_LONG),
        "files": Request(id="long", code="1", files={"f": b"x" * (wire.MAX_FRAME_BYTES * 3 // 4)}),
    }
    (response,) = await beside_another(own_client, requests[place])
    assert (response.id, response.outcome) == ("long", ProgramOutcome.REJECTED)
    assert f"at most {wire.MAX_FRAME_BYTES} are taken; send less" in response.message
    assert own_client.pending == {}


async def test_the_longest_request_that_fits_is_run(own_client: SandboxClient) -> None:
    request = Request(id="most", code="import sys\nlen(sys.stdin.read())", limits=WIDE)
    room = wire.MAX_FRAME_BYTES - len(wire.encode_frame(wire.request_message(request))) - 100
    (response,) = await beside_another(own_client, Request(id="most", code=request.code, stdin="x" * room, limits=WIDE))
    assert response.value == str(room), response


async def test_a_sessions_cell_too_long_for_a_frame_is_rejected_and_the_session_goes_on(
    own_client: SandboxClient,
) -> None:
    session = own_client.open_session(limits=WIDE)
    await session.run("x = 20")
    refused = await session.run(f"y = '{TOO_LONG}'")
    assert (refused.outcome, refused.committed) == (ProgramOutcome.REJECTED, False)
    assert (await session.run("x + 1")).value == "21"
    await session.close()


@pytest.mark.parametrize("byte", [0, 255], ids=["control", "no text"])
async def test_the_longest_answer_fits_a_frame(client: SandboxClient, byte: int) -> None:
    """As much output as may be asked for, six bytes in JSON for each; as many files; a value as long as it is kept."""
    first = client.process.pid
    code = f"""
        import os
        class Long:
            def __repr__(self): return "\\0" * 10**6
        open("f", "wb").write(bytes({fetch.MAX_BYTES}))
        for _ in range({MAX_OUTPUT_BYTES // 2**16}): os.write(1, bytes([{byte}]) * 2**16)
        Long()
    """
    response = await client.run(Request(id="most", code=textwrap.dedent(code), fetch=["f"], limits=WIDE))
    assert (response.outcome, response.attempt, client.process.pid) == (ProgramOutcome.OK, 1, first), response.message
    assert response.stdout == ("\0" if byte == 0 else "\ufffd") * MAX_OUTPUT_BYTES
    assert response.value is not None and len(response.value) > 10**4
    assert response.files["f"] == bytes(fetch.MAX_BYTES)


async def test_more_output_than_a_frame_can_hold_may_not_be_asked_for(client: SandboxClient) -> None:
    response = await run(client, "1", output_bytes=MAX_OUTPUT_BYTES + 1)
    assert response.outcome is ProgramOutcome.REJECTED
    assert response.message == f"limit output_bytes is at most {MAX_OUTPUT_BYTES}, got {MAX_OUTPUT_BYTES + 1}"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"code": None}, "code must be str, got None"),
        ({"code": 5}, "code must be str, got 5"),
        ({"stdin": 5}, "stdin must be str, got 5"),
        ({"seed": "x"}, "seed must be int, got 'x'"),
        ({"files": {"a": 5}}, "the file 'a' must be text, or bytes in base64"),
        ({"files": {"a": {"base64": "x"}}}, "the file 'a' must be text, or bytes in base64"),
        ({"fetch": [1]}, "the paths in fetch must be text"),
        ({"limits": Limits(output_bytes=65536.0)}, "output_bytes must be int, got 65536.0"),  # type: ignore[arg-type]
        ({"limits": Limits(memory_bytes=5e8)}, "memory_bytes must be int, got 500000000.0"),  # type: ignore[arg-type]
        ({"limits": Limits(wall_seconds="5")}, "wall_seconds must be int or float, got '5'"),  # type: ignore[arg-type]
    ],
)
async def test_a_field_of_the_wrong_kind_is_told_and_costs_nobody_the_host(
    client: SandboxClient, wrong: dict[str, Any], told: str
) -> None:
    first = client.process.pid
    response = await client.run(Request(**{"id": "odd", "code": "1"} | wrong))
    assert (response.outcome, response.message) == (ProgramOutcome.REJECTED, told)
    assert ((await run(client, "1")).attempt, client.process.pid) == (1, first)


GARBLER = f"""
import json, socket, sys, time
sys.path.insert(0, {launcher.ROOT!r})
from rocstar.sandbox import wire
HELLO = wire.info_message(wire.HostInfo(isolation="L1", failed_probes=(), slots=1, preload=()))
connection = socket.socket(fileno=json.loads(sys.argv[1])["fd"])
connection.setblocking(True)
"""
GREET = "connection.sendall(wire.encode_frame(HELLO)); connection.recv(2**16)\n"
SAY = "connection.sendall({frame}); time.sleep(600)\n"
NO_FRAMES = {
    "too long": "wire.FRAME_HEADER.pack(wire.MAX_FRAME_BYTES + 1)",
    "no JSON": "wire.FRAME_HEADER.pack(2) + b'{{'",
    "no text": "wire.FRAME_HEADER.pack(2) + bytes([255, 255])",
    "too deep": "wire.FRAME_HEADER.pack(10**6) + b'[' * 10**6",
    "no message": "wire.encode_frame([])",
    "no kind": "wire.encode_frame({})",
    "no response": "wire.encode_frame({'kind': 'response', 'id': '0'})",
}
Garble = Callable[..., None]


@pytest.fixture
def garble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Garble:
    """Makes the first `hosts` hosts say the frame, once they are called or (not `greeting`) at once, and be silent."""
    well, start, script = launcher.BOOT, launcher.start_host, tmp_path / "garbler.py"

    def arrange(frame: str, *, hosts: int = 1, greeting: bool = True) -> None:
        script.write_text(GARBLER + GREET * greeting + SAY.format(frame=frame))
        boots = iter([f"exec(open({str(script)!r}).read())"] * hosts)

        def started(settings: Mapping[str, Any]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
            monkeypatch.setattr(launcher, "BOOT", next(boots, well))
            return start(settings)

        monkeypatch.setattr(launcher, "start_host", started)

    return arrange


@pytest.mark.parametrize("frame", NO_FRAMES.values(), ids=NO_FRAMES)
async def test_a_host_that_sends_what_cannot_be_read_is_replaced_and_its_call_run_again(
    garble: Garble, frame: str
) -> None:
    garble(frame)
    with SandboxClient.start(slots=1, preload=()) as client:
        first = client.process
        response = await asyncio.wait_for(run(client, "1 + 1"), WAIT_SECONDS)
        assert (response.value, response.attempt) == ("2", 2)
        assert client.process is not first and first.poll() == -signal.SIGKILL


async def test_what_came_before_an_unreadable_frame_is_taken(garble: Garble) -> None:
    answer = "wire.encode_frame(wire.response_message(wire.Response(id='0', outcome='ok', value='seen')))"
    garble(f"{answer} + {NO_FRAMES['no JSON']}")
    with SandboxClient.start(slots=1, preload=()) as client:
        response = await asyncio.wait_for(run(client, "1 + 1"), WAIT_SECONDS)
        assert (response.value, response.attempt) == ("seen", 1)
        assert (await asyncio.wait_for(run(client, "1 + 1"), WAIT_SECONDS)).value == "2"


async def test_a_call_for_which_two_hosts_cannot_be_read_learns_that_the_sandbox_is_down(garble: Garble) -> None:
    garble(NO_FRAMES["too long"], hosts=2)
    with SandboxClient.start(slots=1, preload=()) as client:
        with pytest.raises(SandboxDown, match="sent what cannot be read and was killed"):
            await asyncio.wait_for(run(client, "1"), WAIT_SECONDS)
        assert (await asyncio.wait_for(run(client, "1"), WAIT_SECONDS)).value == "1"


def test_a_host_that_starts_with_what_cannot_be_read_is_not_taken_into_service(garble: Garble) -> None:
    garble(NO_FRAMES["no JSON"], greeting=False)
    with pytest.raises(SandboxDown, match="started with what cannot be read"):
        SandboxClient.start(slots=1, preload=())
