"""The caller's side: starts the sandbox host as a child process, sends it programs, and starts another if it dies.

`SandboxClient.start` is synchronous and needs no event loop, so a trainer can call it before it imports torch. Calls
are made from one event loop at a time; a client outlives loops (`asyncio.run` may be used again and again).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from rocstar.sandbox import wire
from rocstar.sandbox.host_process import START_SECONDS, UNREADABLE, HostProcess, complaint
from rocstar.sandbox.session import Session, SessionLost
from rocstar.sandbox.watchdog import Watchdog
from rocstar.sandbox.wire import HostInfo, Isolation, Limits, ProgramOutcome, Request, Response, SandboxDown

GRACE_SECONDS = 5.0  # a slot that has not answered so long after the deadline is stuck itself
MAX_ATTEMPTS = 2
SESSION_SLOTS = 32  # some megabytes each
SESSION_IDLE_SECONDS = 600.0
SILENT_SECONDS = 30.0  # the host's loop never blocks for a second, so it is stopped or hung


@dataclass(slots=True)
class Pending:
    frame: bytes
    future: asyncio.Future[Response]
    attempt: int = 1


class SandboxClient:
    """Runs untrusted programs in a host process apart from this one. Make it with `start`.

    Every long-lived part hangs on `self.host`: the loop's reader consumes its messages and resolves the futures in
    `self.pending`; when it dies, or says nothing for `silent_seconds` while calls are pending, or what cannot be read,
    it is replaced and what was pending is sent once more."""

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
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        """`skip_plans`: how many of the strongest ways to isolate (`jail.PLANS`) are not even tried; `compiled`: may
        slots run the compiled loop; `node`: what responses call this machine, its host name if empty;
        `session_slots`: sessions kept alive at once, `session_idle_seconds`: for how long without a cell;
        `silent_seconds`: a host that gives no sign of life for so long under a call is taken for frozen."""
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
        self.host: HostProcess | None = None
        self.closed = False
        self.silent_seconds = silent_seconds
        self.watchdog = Watchdog(
            seconds=silent_seconds,
            waiting=lambda: bool(self.pending),
            ask=lambda: self.tell({"kind": "ping"}),
            on_frozen=self.host_frozen,
        )

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
        """Start a host process; its first message tells whether it serves. Raises SandboxDown."""
        self.refusal = ""
        self.host = HostProcess(self.settings)
        self.process, self.workdirs = self.host.process, self.host.workdirs
        self.watchdog.patience = START_SECONDS  # until it has said hello

    def await_hello(self) -> None:
        try:
            self.take(self.running_host().first_messages())
        except UNREADABLE as error:
            raise SandboxDown("the sandbox host started with what cannot be read") from error
        if self.refusal:
            raise SandboxDown(self.refusal)

    def running_host(self) -> HostProcess:
        """Raises SandboxDown where there is none."""
        if self.host is None:
            raise SandboxDown("the sandbox host has not started")
        return self.host

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
        """Send a call of any kind; its response. Raises like `run`, and SessionLost when the host says so.

        One that is too long for a frame would end the host for everybody: it is rejected here."""
        self.ready()
        key = f"{next(self.ids)}"
        frame = wire.encode_frame({**message, "id": key})
        if why := complaint(frame):
            return Response(id=message["id"], outcome=ProgramOutcome.REJECTED, message=why)
        pending = Pending(frame, asyncio.get_running_loop().create_future())
        self.pending[key] = pending
        self.running_host().send(frame)
        try:
            response = await pending.future
        except asyncio.CancelledError:
            self.tell({"kind": "cancel", "id": key})
            raise
        finally:
            self.pending.pop(key, None)
        return replace(response, id=message["id"], attempt=response.attempt + pending.attempt - 1)

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send what has no answer; to nobody where there is no host."""
        if self.host is not None:
            self.host.send(wire.encode_frame(message))

    def ready(self) -> None:
        if self.closed:
            raise SandboxDown("the sandbox client is closed")
        if self.host is None:
            self.launch()
        self.attach(asyncio.get_running_loop())

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read and write in this loop. Calls of an earlier loop ended with it."""
        if self.loop is loop:
            return
        self.detach()
        host, self.loop = self.running_host(), loop
        loop.add_reader(host.socket.fileno(), self.on_readable)
        host.outbox.attach(loop)
        self.watchdog.start(loop)

    def detach(self) -> None:
        host, loop, self.loop = self.running_host(), self.loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(host.socket.fileno())
        host.outbox.detach()
        self.watchdog.stop()

    def on_readable(self) -> None:
        try:
            messages = self.running_host().messages()
            self.take(messages or ())
        except UNREADABLE:
            self.process.kill()
            self.host_lost("the sandbox host sent what cannot be read and was killed")
            return
        if messages is None:
            self.host_lost("the sandbox host died under this call")
        else:
            self.watchdog.heard()

    def take(self, messages: Iterable[Mapping[str, Any]]) -> None:
        for message in messages:
            self.host_cpu_seconds = message.get("total_cpu_seconds", self.host_cpu_seconds)
            if message["kind"] == "response":
                self.resolve(wire.parse_response(message))
            elif message["kind"] == "lost":
                self.lose(message["id"])
            elif message["kind"] == "hello":
                self.host_info = wire.parse_info(message)
                self.watchdog.patience = self.silent_seconds
            elif message["kind"] == "refused":
                self.refusal = message["message"]

    def resolve(self, response: Response) -> None:
        pending = self.pending.get(response.id)
        if pending is not None and not pending.future.done():
            pending.future.set_result(response)

    def lose(self, key: str) -> None:
        pending = self.pending.get(key)
        if pending is not None and not pending.future.done():
            pending.future.set_exception(SessionLost())

    def host_frozen(self) -> None:
        self.process.kill()
        self.host_lost(f"the sandbox host gave no sign of life for {self.watchdog.patience:g} seconds and was killed")

    def host_lost(self, reason: str) -> None:
        """Send again to a fresh host what has been tried once; the rest learns that the sandbox is down, and why.

        A host that nobody waits for is not replaced before the next call: one that dies at once would be for ever."""
        loop = self.loop
        self.release()
        reason = self.refusal or reason
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
            self.running_host().send(pending.frame)

    def release(self) -> None:
        """Let go of the host and see it out."""
        if self.host is not None:
            self.detach()
            host, self.host = self.host, None
            host.end()

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
