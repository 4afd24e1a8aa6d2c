"""Servers and the open files that a process may have: a connection is one."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

SERVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from rocstar.support.listen import ended_by_signals, listener, quiet_server

place = listener("127.0.0.1", 0)
server = quiet_server(Starlette(routes=[Route("/", lambda _: Response(open("/proc/self/comm").read()))]))
with ended_by_signals(server):
    print(place.getsockname()[1], flush=True)
    server.run([place])
"""
CALLERS = 100


@pytest.mark.parametrize(("hard", "answered"), [(4096, CALLERS), (64, 32)])
def test_a_server_may_open_what_the_hard_limit_allows_and_refuses_who_comes_beyond(hard: int, answered: int) -> None:
    command = [sys.executable, "-c", SERVER, str(hard)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server,
        ExitStack() as stack,
    ):
        stack.callback(server.kill)
        assert server.stdout and server.stderr
        place = ("127.0.0.1", int(server.stdout.readline()))
        callers = [stack.enter_context(socket.create_connection(place, timeout=60)) for _ in range(CALLERS)]
        refused = []
        for caller in callers[:answered]:
            caller.sendall(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
            assert caller.recv(12) == b"HTTP/1.1 200"
        for caller in callers[answered:]:
            refused.append(caller.recv(4096).decode())
        assert all("503" in said and "too many connections are open" in said for said in refused)
        server.terminate()
        assert server.wait(60) == 0 and server.stderr.read() == ""
