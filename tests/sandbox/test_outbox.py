"""The writer below client and router: all arrives, in order, whatever the socket takes and whichever loop runs."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from rocstar.sandbox.outbox import Outbox

BLOCKS = [os.urandom(1) * 100_000 for _ in range(40)]  # four megabytes: far more than a socket holds


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


async def read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += await asyncio.get_running_loop().sock_recv(connection, size - len(data))
    return data


async def test_what_the_socket_does_not_take_at_once_follows_in_order(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    outbox = Outbox(pair[0])
    outbox.attach(asyncio.get_running_loop())
    for block in BLOCKS:
        outbox.send(block)
    assert not outbox.push(), "nobody has read, so something must wait"
    assert await read(pair[1], 4_000_000) == b"".join(BLOCKS)
    outbox.send(b"after")
    assert await read(pair[1], 5) == b"after"
    outbox.detach()


def test_what_waits_outlives_the_loop_that_wrote_it(pair: tuple[socket.socket, socket.socket]) -> None:
    outbox = Outbox(pair[0])

    async def send_and_leave() -> None:
        outbox.attach(asyncio.get_running_loop())
        for block in BLOCKS:
            outbox.send(block)

    async def read_all() -> bytes:
        outbox.attach(asyncio.get_running_loop())
        data = await read(pair[1], 4_000_000)
        outbox.detach()
        return data

    asyncio.run(send_and_leave())
    assert asyncio.run(read_all()) == b"".join(BLOCKS)


def test_without_a_loop_the_rest_goes_out_when_pushed(pair: tuple[socket.socket, socket.socket]) -> None:
    outbox, received = Outbox(pair[0]), b""
    done = outbox.push(b"".join(BLOCKS))
    assert not done
    while not done:
        received += pair[1].recv(10**6)
        done = outbox.push()
    while len(received) < 4_000_000:
        received += pair[1].recv(10**6)
    assert received == b"".join(BLOCKS)


async def test_bytes_for_a_connection_that_is_gone_are_dropped(pair: tuple[socket.socket, socket.socket]) -> None:
    outbox = Outbox(pair[0])
    outbox.attach(asyncio.get_running_loop())
    pair[1].close()
    outbox.send(b"nobody")
    assert outbox.push(), "nothing may be kept"
    outbox.detach()
