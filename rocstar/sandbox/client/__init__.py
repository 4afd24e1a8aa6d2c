"""The caller's side of the sandbox: one client over one or many daemons, local children or remote ones. It sends calls
to them and returns their answers.

`SandboxClient.start` is synchronous and needs no event loop, so a trainer can call it before it imports torch. Calls
are made from one event loop at a time; a client outlives loops (`asyncio.run` may be used again and again).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from msgspec.structs import replace

from rocstar.sandbox import wire
from rocstar.sandbox.call import (
    CALLER,
    Call,
    DaemonInfo,
    DaemonSettings,
    Isolation,
    Limits,
    ProgramOutcome,
    Response,
    SandboxDown,
    ServiceOutcome,
    SessionLost,
    Usage,
    failed,
)
from rocstar.sandbox.client.dispatch import Dispatch, Entry, GiveUp, Open, Send
from rocstar.sandbox.client.node import TICKS, Node, Token, child, service_at
from rocstar.sandbox.client.session import Session
from rocstar.sandbox.wire import Frame, FrameKind

__all__ = ["SandboxClient", "Session", "run_once"]

SILENT_SECONDS = 30.0  # a daemon's loop never blocks for a second; one that is silent for this long has ended or hangs
RETRIED = {ServiceOutcome.INTERNAL, ServiceOutcome.OVERLOADED}
Pending = Entry[Node]
"""A call whose caller waits."""


class SandboxClient:
    """Runs untrusted programs in daemons outside this process. Created by `start` or `connect`.

    Long-lived: `run` submits calls to the dispatch and awaits their futures, which `_on_frames` and
    `_carry_out` end; a timer runs `_carry_out` when the dispatch has timed work."""

    def __init__(
        self, settings: DaemonSettings | None = None, *, daemons: int = 1, silent_seconds: float = SILENT_SECONDS
    ) -> None:
        """No daemon is started before `launch` or the first call. daemons: child processes, each with these settings.
        silent_seconds: a daemon that holds a call and sends nothing for this long is given up."""
        self._dispatch: Dispatch[Node] = Dispatch(random.random)
        self._silent_seconds = silent_seconds
        self._numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room: asyncio.Semaphore | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._settling = False
        self.closed = False
        self.nodes: Sequence[Node] = self._dispatch.nodes
        """The daemons, up or down."""
        self.on_event: Callable[[str, str], None] = lambda kind, sentence: None
        """Called with a change of a daemon's state, one of EVENTS, and a sentence about it."""
        for _ in range(daemons):
            self._use(child(replace(settings or DaemonSettings(), daemons=daemons)))

    @classmethod
    def start(
        cls,
        *,
        slots: int = 2,
        preload: Sequence[str] = ("numpy", "sympy"),
        min_isolation: str = Isolation.L3,
        daemons: int = 1,
    ) -> Self:
        """Start daemons and wait until they serve. Raises SandboxDown when one fails: a preload that cannot be
        imported, less isolation than `min_isolation`, a failed fork."""
        isolation = Isolation(min_isolation)
        settings = DaemonSettings(slots=slots, preload=tuple(preload), min_isolation=isolation)
        return cls(settings, daemons=daemons).served()

    @classmethod
    def connect(
        cls,
        addresses: Sequence[str],
        *,
        token: Token = "",
        min_isolation: str = Isolation.L3,
        silent_seconds: float = SILENT_SECONDS,
    ) -> Self:
        """Use services at `http://host:port`, and wait for the hello of each. Raises SandboxDown, also if one offers
        less isolation."""
        client = cls(daemons=0, silent_seconds=silent_seconds)
        for address in addresses:
            client._use(service_at(address, token, Isolation(min_isolation)))
        return client.served()

    def served(self) -> Self:
        """It, once all daemons serve; closed if one does not. Raises SandboxDown."""
        try:
            self.launch()
            self.await_hello()
        except BaseException:
            self.close()
            raise
        return self

    def launch(self) -> None:
        """Start or connect the daemons; `await_hello`, or the first call, waits for them."""
        self._carry_out()

    def attach(self) -> asyncio.AbstractEventLoop:
        """Use the connections in the running loop from now on; without this, from the first call on."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # calls of an earlier loop ended with it
            self._detach()
            self._forget_all()
            self._loop, self._room = loop, None
            for node in self.nodes:
                node.attach(loop)
            self._tick()
            self._settle()
        return loop

    def await_hello(self) -> None:
        """Wait until all are up, without an event loop. Raises SandboxDown."""
        for node in self.nodes:
            node.await_hello()
            if not node.up:
                raise SandboxDown(node.problem)

    def info(self) -> DaemonInfo:
        """The daemons' descriptions combined: their slots together, the weakest isolation, other fields of the first.
        Raises SandboxDown if none is up."""
        infos = [node.info for node in self.nodes if node.up and node.info is not None]
        if not infos:
            problems = filter(None, (node.problem for node in self.nodes))
            raise SandboxDown("; ".join(problems) or "no sandbox daemon has started")
        return replace(
            infos[0],
            isolation=min(info.isolation for info in infos),
            failed_probes=tuple(dict.fromkeys(probe for info in infos for probe in info.failed_probes)),
            slots=sum(info.slots for info in infos),
            session_slots=sum(info.session_slots for info in infos),
        )

    def usage(self) -> Usage:
        """The load of all daemons together as last reported, programs of other clients included, and calls that wait
        here for a daemon."""
        usages = [node.usage for node in self.nodes if node.up]
        return Usage(
            cpu_seconds=sum(node.cpu_seconds for node in self.nodes),
            waiting=len(self._dispatch.waiting) + sum(usage.waiting for usage in usages),
            running=sum(usage.running for usage in usages),
            sessions=sum(usage.sessions for usage in usages),
        )

    async def run(self, call: Call, *, waits: bool = True, again: bool = True) -> Response:
        """Run one program or cell. Cancelling the awaiting task ends the program. waits: the call waits if all daemons
        are full; else it is `overloaded` at once. again: send it once more when the service has lost it.

        Raises SandboxDown when the client is closed, no daemon can be started or reached, or daemons died
        twice while they held the call; SessionLost for a cell whose session is gone."""
        try:
            body = wire.encode(call)
        except (UnicodeEncodeError, OverflowError) as error:
            return failed(call.id, ProgramOutcome.REJECTED, f"the call cannot be sent ({error})")
        if len(body) > wire.MAX_FRAME_BYTES:
            refusal = f"the call has {len(body)} bytes, and at most {wire.MAX_FRAME_BYTES} are accepted"
            return failed(call.id, ProgramOutcome.REJECTED, refusal)
        if self.closed:
            raise SandboxDown("the sandbox client is closed")
        future: asyncio.Future[Response] = self.attach().create_future()
        number = CALLER.get() << wire.CALLER_SHIFT | next(self._numbers)
        pending = Pending(number, call, future, again=again, waits=waits)
        node = self._dispatch.submit(pending, time.monotonic())
        if node is None:
            self._settle()
        else:
            node.send(FrameKind.CALL, pending.number, body)
        try:
            response = await future
        except asyncio.CancelledError:
            holder = self._dispatch.cancel(pending)
            if holder is not None:
                holder.send(FrameKind.CANCEL, pending.number)
            raise
        if pending.attempt > 1 or response.id != call.id:
            response = replace(response, id=call.id, attempt=response.attempt + pending.attempt - 1)
        return response

    def open_session(
        self, *, limits: Limits | None = None, seed: int | None = None, replay: bool = False, waits: bool = False
    ) -> Session:
        """A notebook: cells that share their names and files; see Session. Its process is started for the first
        cell."""
        return Session(self, limits or Limits(), seed, replay=replay, waits=waits)

    def session_room(self) -> asyncio.Semaphore:
        """Places for sessions that wait for one, as many as the daemons hold; those of the running loop."""
        self.attach()
        if self._room is None:
            self._room = asyncio.Semaphore(sum((node.info or DaemonSettings()).session_slots for node in self.nodes))
        return self._room

    def close_session(self, name: str) -> None:
        """End the session's process."""
        node = self._dispatch.forget(name)
        if node is not None and node.up:
            node.send(FrameKind.CLOSE, body=wire.encode(name))

    def close(self) -> None:
        """End the connections, and child daemons with everything that runs in them. Pending calls raise SandboxDown.
        May be called twice."""
        self.closed = True
        self._detach()
        for node in self.nodes:
            if node.connection is not None:
                node.connection.socket.close()  # first, so that all end at the same time
        for node in self.nodes:
            node.close()
        for pending in self._forget_all():
            if not pending.future.get_loop().is_closed():
                _end(pending, SandboxDown("the sandbox client was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _use(self, node: partial[Node]) -> None:
        self._dispatch.nodes.append(node(self._silent_seconds, self._on_frames, self._on_end))

    def _on_frames(self, node: Node, frames: Sequence[Frame]) -> None:
        """Raises ValueError for a response that cannot be read; the node then still holds its call."""
        for frame in frames:
            pending = node.held.get(frame.number)
            if frame.kind is FrameKind.HELLO and node.info is not None:
                self._dispatch.came_up(node, node.info.slots, time.monotonic())
                kind, again = ("restarted", " again") if node.starts > 1 else ("up", "")
                self.on_event(kind, f"{node.label} is up{again}: {node.slots} slots, {node.info.isolation}")
                self._settle()
            elif pending is None:
                continue
            elif frame.kind is FrameKind.LOST:
                self._dispatch.answered(node, frame.number)
                self._dispatch.forget(pending.call.session)
                _end(pending, SessionLost("the daemon no longer holds this session: its names and files are gone"))
            elif frame.kind is FrameKind.RESPONSE:
                response = wire.decode_response(frame.body)
                if response.id not in (pending.call.id, ""):  # "": the daemon could not read the call
                    problem = f"the sandbox answered with the result of another call, {response.id!r:.80}"
                    response = failed(pending.call.id, ServiceOutcome.INTERNAL, problem)
                self._dispatch.answered(node, frame.number)
                if not self._is_sent_again(node, pending, response.outcome):
                    _end(pending, response)

    def _is_sent_again(self, node: Node, pending: Pending, outcome: str) -> bool:
        if outcome not in RETRIED:
            if self._dispatch.has_room(node, time.monotonic()):
                self._settle()
            return False
        overloaded = outcome is ServiceOutcome.OVERLOADED
        again = self._dispatch.failed(node, pending, time.monotonic(), overloaded=overloaded)
        self._settle()
        return again

    def _on_end(self, node: Node, reason: str) -> None:
        if node.up or reason != node.problem:
            self.on_event("lost" if node.up else "unreachable", reason)
        self._dispatch.died(node, reason, time.monotonic())
        self._settle()

    def _settle(self) -> None:
        """Schedule `_carry_out`, once per turn of the event loop."""
        if self._loop is not None and not self._settling:
            self._settling = True
            self._loop.call_soon(self._carry_out)

    def _carry_out(self) -> None:
        self._settling = False
        if self.closed:
            return
        for decision in self._dispatch.decide(time.monotonic()):
            match decision:
                case Send(pending, node):
                    left = max(0.0, pending.deadline - time.monotonic())
                    node.send(FrameKind.CALL, pending.number, wire.encode(replace(pending.call, patience_seconds=left)))
                case Open(node):
                    node.open(self._loop)
                case GiveUp(pending, answer):
                    _end(pending, answer)
        at = self._dispatch.next_at()
        if self._loop is not None and at is not None:
            self._set_timer("dispatch", at - time.monotonic(), self._carry_out)

    def _tick(self) -> None:
        self._set_timer("tick", self._silent_seconds / TICKS, self._tick)
        for node in self.nodes:
            node.tick()

    def _set_timer(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        if self._loop is not None:
            if name in self._timers:
                self._timers[name].cancel()
            self._timers[name] = self._loop.call_later(max(0.0, seconds), then)

    def _detach(self) -> None:
        self._loop, self._settling = None, False
        for timer in self._timers.values():
            timer.cancel()
        for node in self.nodes:
            node.detach()

    def _forget_all(self) -> list[Pending]:
        """Remove and return all calls, held by a node or waiting."""
        held = (pending for node in self.nodes for pending in node.held.values())
        found = [*self._dispatch.waiting.values(), *held]
        for pending in found:
            self._dispatch.cancel(pending)
        return found


def _end(pending: Pending, answer: Response | SandboxDown) -> None:
    """Answer its caller, or raise the error there."""
    if pending.future.done():
        return
    if isinstance(answer, Response):
        pending.future.set_result(answer)
    else:
        pending.future.set_exception(answer)


def run_once(
    code: str, *, stdin: str = "", limits: Limits | None = None, preload: Sequence[str] = (), seed: int | None = None
) -> Response:
    """Start a sandbox, run one program, end it. Raises SandboxDown."""
    call = Call(id="once", code=code, stdin=stdin, limits=limits or Limits(), seed=seed)
    with SandboxClient.start(slots=1, preload=preload) as client:
        return asyncio.run(client.run(call))
