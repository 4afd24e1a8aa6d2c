"""The caller's side: starts the sandbox host as a child process, sends it programs, and starts another if it dies.

`SandboxClient.start` is synchronous and needs no event loop, so a trainer can call it before it imports torch. Calls
are made from one event loop at a time; a client outlives loops (`asyncio.run` may be used again and again).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from rocstar.sandbox import launcher, wire
from rocstar.sandbox.session import Session, SessionLost
from rocstar.sandbox.wire import HostInfo, Isolation, Limits, Request, Response, SandboxDown, ServiceOutcome

START_SECONDS = 120.0  # preloading can be slow on a cold, shared file system
CLOSE_SECONDS = 5.0
GRACE_SECONDS = 5.0  # a slot that has not answered so long after the deadline is stuck itself
MAX_ATTEMPTS = 2
SESSION_SLOTS = 32  # some megabytes each
SESSION_IDLE_SECONDS = 600.0


@dataclass(slots=True)
class Pending:
    message: Mapping[str, Any]
    future: asyncio.Future[Response]
    attempt: int = 1


class SandboxClient:
    """Runs untrusted programs in a host process apart from this one. Make it with `start`.

    Every long-lived part hangs on `self.socket`: the loop's reader consumes frames from it and resolves the futures in
    `self.pending`; when it closes, the host is replaced and what was pending is sent once more."""

    def __init__(
        self,
        *,
        slots: int,
        preload: Sequence[str],
        min_isolation: Isolation = Isolation.L1,
        grace_seconds: float = GRACE_SECONDS,
        skip_plans: int = 0,
        compiled: bool = True,
        node: str = "",
        session_slots: int = SESSION_SLOTS,
        session_idle_seconds: float = SESSION_IDLE_SECONDS,
    ) -> None:
        """`skip_plans`: how many of the strongest ways to isolate (`jail.PLANS`) are not even tried; `compiled`: may
        slots run the compiled loop; `node`: what responses call this machine, its host name if empty;
        `session_slots`: sessions kept alive at once, `session_idle_seconds`: for how long without a cell."""
        self.settings = {
            "slots": slots,
            "preload": list(preload),
            "min_isolation": min_isolation,
            "grace_seconds": grace_seconds,
            "skip_plans": skip_plans,
            "compiled": compiled,
            "node": node,
            "session_slots": session_slots,
            "session_idle_seconds": session_idle_seconds,
        }
        self.pending: dict[str, Pending] = {}
        self.ids = itertools.count()
        self.past_cpu_seconds = 0.0
        self.host_cpu_seconds = 0.0
        self.host_info: HostInfo | None = None
        self.refusal = ""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.has_host = False
        self.closed = False

    @classmethod
    def start(
        cls,
        *,
        slots: int = 2,
        preload: Sequence[str] = ("numpy", "sympy"),
        min_isolation: str = Isolation.L1,
        node: str = "",
    ) -> SandboxClient:
        """Start a host and wait until it serves. Raises SandboxDown when it cannot: a preload that does not import,
        less isolation than `min_isolation`, no way to fork."""
        client = cls(slots=slots, preload=preload, min_isolation=Isolation(min_isolation), node=node)
        client.launch()
        try:
            client.await_hello()
        except SandboxDown:
            client.close()
            raise
        return client

    def launch(self) -> None:
        """Start a host process; its first frame tells whether it serves. Raises SandboxDown."""
        self.workdirs = f"{tempfile.gettempdir()}/rocstar-sandbox-{os.getpid()}-{os.urandom(6).hex()}"
        try:
            self.socket, self.process = launcher.start_host({**self.settings, "workdirs": self.workdirs})
        except OSError as error:
            raise SandboxDown(f"the sandbox host could not be started ({error})") from error
        self.reader = wire.FrameReader()
        self.unsent = bytearray()
        self.refusal = ""
        self.has_host = True

    def await_hello(self) -> None:
        self.socket.settimeout(START_SECONDS)
        while self.host_info is None and not self.refusal:
            try:
                data = self.socket.recv(65536)
            except TimeoutError:
                raise SandboxDown(f"the sandbox host did not start within {START_SECONDS} seconds") from None
            if not data:
                raise SandboxDown(f"the sandbox host died while starting, exit code {self.process.wait()}")
            self.take(data)
        self.socket.setblocking(False)
        if self.refusal:
            raise SandboxDown(self.refusal)

    def info(self) -> HostInfo:
        """What the host said of itself when it started. Raises SandboxDown before that."""
        if self.host_info is None:
            raise SandboxDown("the sandbox host has not started")
        return self.host_info

    def cpu_seconds(self) -> float:
        """CPU of host, slots and programs since `start`, as of the last answer, seconds."""
        return self.past_cpu_seconds + self.host_cpu_seconds

    async def run(self, request: Request) -> Response:
        """Run one program. Cancelling the awaiting task ends the program and frees its slot.

        Raises SandboxDown when the client is closed or the host died twice under this call."""
        return await self.call(wire.request_message(request))

    def open_session(self, *, limits: Limits | None = None, seed: int | None = None) -> Session:
        """A notebook: cells that share their names. Nothing is started before its first cell."""
        return Session(self, limits or Limits(), wire.fresh_seed() if seed is None else seed)

    async def call(self, message: Mapping[str, Any]) -> Response:
        """Send a call of any kind; its response. Raises like `run`, and SessionLost when the host says so."""
        self.ready()
        key = f"{next(self.ids)}"
        pending = Pending({**message, "id": key}, asyncio.get_running_loop().create_future())
        self.pending[key] = pending
        self.send(pending.message)
        try:
            response = await pending.future
        except asyncio.CancelledError:
            self.send({"kind": "cancel", "id": key})
            raise
        finally:
            self.pending.pop(key, None)
        return replace(response, id=message["id"], attempt=response.attempt + pending.attempt - 1)

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send what has no answer; to nobody where there is no host."""
        if self.has_host and not self.closed:
            self.send(message)

    def ready(self) -> None:
        if self.closed:
            raise SandboxDown("the sandbox client is closed")
        if not self.has_host:
            self.launch()
        self.attach(asyncio.get_running_loop())

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read the socket from this loop. Calls of an earlier loop ended with it."""
        if self.loop is loop:
            return
        if self.loop is not None and not self.loop.is_closed():
            self.detach()
        self.loop = loop
        loop.add_reader(self.socket.fileno(), self.on_readable)
        if self.unsent:
            loop.add_writer(self.socket.fileno(), self.on_writable)

    def detach(self) -> None:
        if self.loop is not None and not self.loop.is_closed():
            self.loop.remove_reader(self.socket.fileno())
            self.loop.remove_writer(self.socket.fileno())
        self.loop = None

    def send(self, message: Mapping[str, Any]) -> None:
        waiting = bool(self.unsent)
        self.unsent += wire.encode_frame(message)
        if not waiting:
            self.on_writable()

    def on_writable(self) -> None:
        try:
            sent = self.socket.send(self.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.unsent.clear()  # the reader sees the end as well and acts on it
            return
        del self.unsent[:sent]
        if self.loop is None:
            return
        if self.unsent:
            self.loop.add_writer(self.socket.fileno(), self.on_writable)
        else:
            self.loop.remove_writer(self.socket.fileno())

    def on_readable(self) -> None:
        try:
            data = self.socket.recv(262144)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.take(data)
        else:
            self.host_died()

    def take(self, data: bytes) -> None:
        for message in self.reader.feed(data):
            self.host_cpu_seconds = message.get("total_cpu_seconds", self.host_cpu_seconds)
            if message["kind"] == "response":
                self.resolve(wire.parse_response(message))
            elif message["kind"] == "lost":
                self.lose(message["id"])
            elif message["kind"] == "hello":
                self.host_info = wire.parse_info(message)
            else:
                self.refusal = message["message"]

    def resolve(self, response: Response) -> None:
        pending = self.pending.get(response.id)
        if pending is not None and not pending.future.done():
            pending.future.set_result(response)

    def lose(self, key: str) -> None:
        pending = self.pending.get(key)
        if pending is not None and not pending.future.done():
            pending.future.set_exception(SessionLost())

    def host_died(self) -> None:
        """Send again to a fresh host what has been tried once; the rest learns that the sandbox is down.

        A host that nobody waits for is not replaced before the next call: one that dies at once would be for ever."""
        loop = self.loop
        self.release()
        reason = self.refusal or "the sandbox host died under this call"
        self.past_cpu_seconds += self.host_cpu_seconds
        self.host_cpu_seconds = 0.0
        waiting = [pending for pending in self.pending.values() if not pending.future.done()]
        again = [pending for pending in waiting if pending.attempt < MAX_ATTEMPTS and not self.refusal]
        if again and loop is not None:
            try:
                self.relaunch(loop, again)
            except SandboxDown as error:
                reason, again = str(error), []
        for pending in waiting:
            if pending not in again:
                pending.future.set_exception(SandboxDown(reason))

    def relaunch(self, loop: asyncio.AbstractEventLoop, again: Sequence[Pending]) -> None:
        self.launch()
        self.attach(loop)
        for pending in again:
            pending.attempt += 1
            self.send(pending.message)

    def release(self) -> None:
        """Let go of the host and see it out."""
        if not self.has_host:
            return
        self.has_host = False
        self.detach()
        self.socket.close()
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.workdirs, ignore_errors=True)  # there only where slots got no file system of their own

    def close(self) -> None:
        """End the host and all that runs in it. Calls still awaited raise SandboxDown. May be called twice."""
        if self.closed:
            return
        self.closed = True
        for pending in self.pending.values():
            if not pending.future.done() and not pending.future.get_loop().is_closed():
                pending.future.set_exception(SandboxDown("the sandbox client was closed"))
        self.release()

    def __enter__(self) -> SandboxClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_once(
    code: str, *, stdin: str = "", limits: Limits | None = None, preload: Sequence[str] = (), seed: int | None = None
) -> Response:
    """Start a sandbox, run one program, end it. Raises SandboxDown."""
    request = Request(id="once", code=code, stdin=stdin, limits=limits or Limits(), seed=seed)
    with SandboxClient.start(slots=1, preload=preload) as client:
        return asyncio.run(client.run(request))


def is_service_fault(response: Response) -> bool:
    """The outcome says nothing about the program."""
    return isinstance(response.outcome, ServiceOutcome)
