"""The router: takes calls like one sandbox does, and has them run by many nodes. I/O around `decide.RouterState`.

    caller ── Router.run ── queue ── micro-batch ── link ── node (a process with a SandboxClient, here or elsewhere)

Nodes connect to the router, never the other way; one that fell off the network comes back and gives the results it
has. Not here: starting nodes (`local`), their side (`uplink`, `agent`), their connections (`peers`), and every
decision (`decide`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocstar.sandbox import wire
from rocstar.sandbox.router import codec
from rocstar.sandbox.router.decide import RouterState
from rocstar.sandbox.router.gate import Gate
from rocstar.sandbox.router.homes import Homes
from rocstar.sandbox.router.nouns import Call, GiveUp, HangUp, Node, Policy, Send, Withdraw
from rocstar.sandbox.router.peers import Peers
from rocstar.sandbox.session import Session, SessionLost
from rocstar.sandbox.wire import HostInfo, Limits, ProgramOutcome, Request, Response, SandboxDown, ServiceOutcome

TICK_SECONDS = 0.1  # how exactly deadlines, silence and absence are seen
PAUSE_SECONDS = 1.0  # a tick so late means that our own process stood still: the silence was ours
BEAT_TICKS = 5  # ticks between two signs of life to the nodes
MAX_CALL_BYTES = wire.MAX_FRAME_BYTES - 4096  # a node's sandbox gets it in one frame, with little added


@dataclass(slots=True, eq=False, kw_only=True)
class Pending(Call):
    request_id: str
    body: bytes
    """The request as its node gets it, encoded once."""
    future: asyncio.Future[Response]
    sent: float = 0.0
    answered_by: str = ""
    """Name of the node."""


class Router:
    """Runs programs on nodes. The same face as `SandboxClient`: run, open_session, info, cpu_seconds, close.

    Consumes calls and what nodes send; produces responses. A call is unblocked by its result, by `queue_seconds` in
    the queue, by its last attempt lost, or by `close`. Works from one event loop at a time and outlives loops."""

    def __init__(
        self,
        *,
        address: str,
        token: str,
        policy: Policy | None = None,
        queue_seconds: float = 600.0,
        seed: int | None = None,
    ) -> None:
        """Listen for nodes. address: `host:port` (port 0 takes a free one) or `unix:/path`. token: what nodes must
        know. queue_seconds: how long a call waits for a node before it is `overloaded`. seed: of the choice between
        two nodes. Raises ValueError and OSError."""
        self.queue_seconds = queue_seconds
        self.state = RouterState(policy or Policy(), random.Random(seed))
        self.gate = Gate(address, token)
        self.peers = Peers(self.state, self.gate, self.on_result, self.pump_soon)
        self.homes = Homes(self.run_cell, self.peers.tell, self.state.nodes.__contains__)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.timers: dict[str, asyncio.TimerHandle] = {}
        self.counter = 0
        self.pumping = False
        self.ticks = 0
        self.closed = False

    @property
    def address(self) -> str:
        """Where nodes find us."""
        return self.gate.address

    async def run(self, request: Request) -> Response:
        """Run one program somewhere. Cancelling the awaiting task withdraws it. A call whose node failed is tried
        again elsewhere; lost too often it is `internal`. Raises SandboxDown when the router is closed."""
        self.attach(asyncio.get_running_loop())
        key = self.next_key()
        return await self.carry_out(self.pending(key, request.id, codec.encoded_request(request, key)))

    def open_session(self, *, limits: Limits | None = None, seed: int | None = None) -> Session:
        """A notebook, as `SandboxClient.open_session` opens it. It lives in one node and moves when that is lost."""
        return Session(self.homes, limits or Limits(), wire.fresh_seed() if seed is None else seed)

    async def run_cell(self, message: Mapping[str, Any], node: str) -> tuple[Response, str]:
        """A session's cell, at `node` while that lives; its response and the node's name that gave it. Raises
        SessionLost when the node that got it does not know its session."""
        self.attach(asyncio.get_running_loop())
        key = self.next_key()
        call = self.pending(key, message["id"], codec.encoded_cell(message, key))
        call.wants = node
        return await self.carry_out(call), call.answered_by

    async def carry_out(self, call: Pending) -> Response:
        if len(call.body) > MAX_CALL_BYTES:
            size = f"the call takes {len(call.body)} bytes on the wire; at most {MAX_CALL_BYTES} are accepted"
            return Response(id=call.request_id, outcome=ProgramOutcome.REJECTED, message=size)
        if not self.state.submit(call):
            full = f"{len(self.state.queue)} calls are waiting already"
            return Response(id=call.request_id, outcome=ServiceOutcome.OVERLOADED, message=full)
        self.pump_soon()
        try:
            return await call.future
        except asyncio.CancelledError:
            self.state.cancel(call.id)
            self.pump_soon()
            raise

    def next_key(self) -> str:
        self.counter += 1
        return str(self.counter)

    def pending(self, key: str, request_id: str, body: bytes) -> Pending:
        assert self.loop is not None
        return Pending(
            id=key,
            arrived=time.monotonic(),
            patience=self.queue_seconds,
            request_id=request_id,
            body=body,
            future=self.loop.create_future(),
        )

    def info(self) -> HostInfo:
        """All connected nodes together: the weakest isolation, every failed probe, the sum of slots, what all have
        preloaded. Raises SandboxDown when there is none."""
        return self.peers.info()

    def nodes(self) -> list[Node]:
        """Nodes that are connected or may come back, with their load."""
        return list(self.state.nodes.values())

    def cpu_seconds(self) -> float:
        """CPU of all nodes and of what runs in them, as of their last reports, seconds."""
        return self.peers.cpu_seconds()

    async def wait_for_nodes(self, count: int, *, seconds: float) -> None:
        """Until `count` nodes are connected. Raises SandboxDown when they are not there in time."""
        self.attach(asyncio.get_running_loop())
        until = time.monotonic() + seconds
        while (there := sum(node.connected for node in self.nodes())) < count:
            if time.monotonic() >= until:
                raise SandboxDown(f"{there} of {count} nodes connected to {self.address} within {seconds} seconds")
            await asyncio.sleep(TICK_SECONDS / 4)

    def close(self) -> None:
        """Let go of all nodes. Calls still awaited raise SandboxDown. May be called twice."""
        if self.closed:
            return
        self.closed = True
        self.detach()
        self.peers.close()
        for call in list(self.state.calls.values()):
            assert isinstance(call, Pending)
            if not call.future.done() and not call.future.get_loop().is_closed():
                call.future.set_exception(SandboxDown("the router was closed"))

    # The event loop.

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listen from this loop. Calls of an earlier loop ended with it. Raises SandboxDown after `close`."""
        if self.closed:
            raise SandboxDown("the router is closed")
        if self.loop is loop:
            return
        self.detach()
        for call_id in list(self.state.calls):
            self.state.cancel(call_id)
        self.loop = loop
        self.peers.attach(loop)
        self.ticked = 0.0  # nobody listened until now
        self.tick()

    def detach(self) -> None:
        if self.loop is not None and not self.loop.is_closed():
            for timer in self.timers.values():
                timer.cancel()
        self.timers.clear()
        self.peers.detach()
        self.loop = None
        self.pumping = False

    def later(self, name: str, seconds: float, then: Any) -> None:
        """One timer of each name."""
        assert self.loop is not None
        if (old := self.timers.get(name)) is not None:
            old.cancel()
        self.timers[name] = self.loop.call_later(seconds, then)

    def tick(self) -> None:
        now = time.monotonic()
        if now - self.ticked > PAUSE_SECONDS:
            self.state.resumed(now)
        self.ticked = now
        self.ticks += 1
        self.gate.sweep(now)
        self.state.passed(now)
        self.peers.tick(beat=self.ticks % BEAT_TICKS == 0)
        self.pump_soon()
        self.later("tick", TICK_SECONDS, self.tick)

    def pump_soon(self) -> None:
        """Once per turn of the loop, however many calls and results came in it."""
        if not self.pumping and self.loop is not None:
            self.pumping = True
            self.loop.call_soon(self.pump)

    def pump(self) -> None:
        """Carry out what the state decides."""
        self.pumping = False
        if self.loop is None:
            return
        now = time.monotonic()
        for decision in self.state.decide(now):
            if isinstance(decision, Send):
                self.send(decision.node, decision.calls, now)
            elif isinstance(decision, GiveUp):
                self.give_up(decision, now)
            elif isinstance(decision, Withdraw):
                self.peers.withdraw(decision.node, decision.call_id)
            elif isinstance(decision, HangUp):
                self.peers.hang_up(decision.node)
        due = self.state.next_at()
        if due is not None:
            self.later("linger", max(0.0, due - now), self.pump)

    def send(self, node: Node, calls: Sequence[Call], now: float) -> None:
        bodies = []
        for call in calls:
            assert isinstance(call, Pending)
            call.sent = now
            bodies.append(call.body)
        self.peers.send_calls(node, bodies)

    # Answers.

    def on_result(self, name: str, message: dict[str, Any]) -> None:
        """A node's result. What cannot be read is the node's fault."""
        key = message["id"]
        call = self.state.calls.get(key)
        fault = codec.fault_of(message)
        response = None
        lost = message["outcome"] == codec.LOST
        if isinstance(call, Pending) and not fault and not lost:
            try:
                response = wire.parse_response(self.completed(call, name, message))
            except (KeyError, TypeError, ValueError) as error:
                fault = f"its answer cannot be read ({error!r})"
        if self.state.finished(name, key, now=time.monotonic(), fault=fault) is not call or call is None:
            return
        assert isinstance(call, Pending)
        call.answered_by = name
        if response is not None:
            settle(call, response)
        elif lost and not call.future.done():
            call.future.set_exception(SessionLost())

    def completed(self, call: Pending, name: str, message: dict[str, Any]) -> dict[str, Any]:
        """The node's message with what only the router knows."""
        node = self.state.nodes.get(name)
        message["id"] = call.request_id
        message["attempt"] = message.get("attempt", 1) + call.attempt - 1
        message["queue_seconds"] = message.get("queue_seconds", 0.0) + call.sent - call.arrived
        message["node"] = node.label if node is not None else name
        return message

    def give_up(self, decision: GiveUp, now: float) -> None:
        call = decision.call
        outcome = ServiceOutcome.OVERLOADED if decision.overloaded else ServiceOutcome.INTERNAL
        assert isinstance(call, Pending)
        response = Response(
            id=call.request_id,
            outcome=outcome,
            message=decision.reason,
            attempt=call.attempt,
            queue_seconds=now - call.arrived,
        )
        settle(call, response)


def settle(call: Call | None, response: Response) -> None:
    assert isinstance(call, Pending)
    if not call.future.done():  # cancelled in this very turn
        call.future.set_result(response)
