"""The router's connections to its nodes: what nodes say becomes facts, what was decided becomes frames.

    node to router   hello {name, label, slots, capacity, info, running, done}   once per connection, see `gate`
                     results {from, results}   numbered without gaps over all connections of a node
                     beat {slots, capacity, others, cpu_seconds}
    router to node   welcome {proof, ack}, then calls {calls, ack}, withdraw {id}, ack {ack}, tell {message}

A node keeps a result until its number is acknowledged. So when a connection breaks, what was on the way comes again
with the next one, and what came before is not counted twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rocstar.sandbox.router import auth, codec
from rocstar.sandbox.router.decide import RouterState
from rocstar.sandbox.router.gate import Gate
from rocstar.sandbox.router.link import Link, split
from rocstar.sandbox.router.nouns import Node
from rocstar.sandbox.wire import HostInfo, SandboxDown


@dataclass(slots=True, eq=False)
class Peer:
    """A node's connection; kept while the node is away and expected back."""

    info: HostInfo
    link: Link | None = None
    received: int = -1
    """Number of its last result that came."""
    acknowledged: int = -1
    cpu_seconds: float = 0.0


class Peers:
    """Consumes frames of nodes and tells the state; `on_result` gets each result, `on_change` hears of all else."""

    def __init__(
        self,
        state: RouterState,
        gate: Gate,
        on_result: Callable[[str, dict[str, Any]], None],
        on_change: Callable[[], None],
    ) -> None:
        self.state = state
        self.gate = gate
        self.gate.on_node = self.on_hello
        self.on_result = on_result
        self.on_change = on_change
        self.peers: dict[str, Peer] = {}
        self.past_cpu_seconds = 0.0
        self.loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.gate.attach(loop)
        for link in self.links():
            link.attach(loop)

    def detach(self) -> None:
        if self.loop is not None:
            self.gate.detach()
            for link in self.links():
                link.detach()
        self.loop = None

    def close(self) -> None:
        self.detach()
        self.gate.close()
        for link in self.links():
            link.close()
        self.peers.clear()

    def links(self) -> list[Link]:
        return [peer.link for peer in self.peers.values() if peer.link is not None]

    # What nodes say.

    def on_hello(self, link: Link, hello: Mapping[str, Any]) -> None:
        """Raises ValueError, which ends the connection, on a hello that is not one."""
        try:
            name, label, nonce = str(hello["name"]), str(hello["label"]), str(hello["nonce"])
            info = codec.parse_info(hello["info"])
            node = Node(name, label, int(hello["slots"]), int(hello["capacity"]), time.monotonic())
            running = [str(call_id) for call_id in hello["running"]]
            done = [(int(number), str(call_id)) for number, call_id in hello["done"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a hello: {error!r}") from error
        peer = self.peers.setdefault(name, Peer(info))
        if peer.link is not None:
            peer.link.close()  # the node knows that it is broken, we did not yet
        peer.link = link
        link.on_message = partial(self.on_message, name, peer)
        link.on_end = partial(self.on_end, name, peer)
        self.welcome(peer, nonce, name)
        holds = [*running, *(call_id for number, call_id in done if number > peer.received)]
        self.state.joined(node, holds, now=time.monotonic())
        self.on_change()

    def welcome(self, peer: Peer, nonce: str, name: str) -> None:
        assert peer.link is not None
        proof = auth.proof(self.gate.token, auth.ROUTER, nonce, name)
        peer.link.send({"kind": "welcome", "proof": proof, "ack": peer.received})
        peer.acknowledged = peer.received

    def on_message(self, name: str, peer: Peer, message: Mapping[str, Any]) -> None:
        self.state.heard(name, now=time.monotonic())
        if message["kind"] == "results":
            results = message["results"]
            peer.received = message["from"] + len(results) - 1
            for result in results:
                self.on_result(name, result)
        else:
            peer.cpu_seconds = message["cpu_seconds"]
            self.state.reported(name, slots=message["slots"], capacity=message["capacity"], others=message["others"])
        self.on_change()

    def on_end(self, name: str, peer: Peer) -> None:
        peer.link = None
        self.state.disconnected(name, now=time.monotonic())
        self.on_change()

    # What was decided.

    def send_calls(self, node: Node, bodies: Sequence[bytes]) -> None:
        """A node that was lost in this very turn gets nothing; the state sends its calls again."""
        peer = self.peers.get(node.name)
        if peer is not None and peer.link is not None:
            for part in split(bodies):
                # The acknowledgement goes first: a call that failed there may be sent there again.
                peer.link.send_list("calls", part, ack=peer.received)
            peer.acknowledged = peer.received

    def withdraw(self, node: Node, call_id: str) -> None:
        if (link := self.link_of(node)) is not None:
            link.send({"kind": "withdraw", "id": call_id})

    def tell(self, name: str, message: Mapping[str, Any]) -> None:
        """What a node is told of a session, if it is there to hear it."""
        peer = self.peers.get(name)
        if peer is not None and peer.link is not None:
            peer.link.send({"kind": "tell", "message": message})

    def hang_up(self, node: Node) -> None:
        if (link := self.link_of(node)) is not None:
            link.close()
            self.peers[node.name].link = None

    def link_of(self, node: Node) -> Link | None:
        peer = self.peers.get(node.name)
        return peer.link if peer is not None else None

    def tick(self, *, beat: bool) -> None:
        """Acknowledge what came; with `beat` also where nothing did, so that nodes see that we live. Forget nodes
        that are not expected back."""
        for name, peer in list(self.peers.items()):
            if peer.link is not None:
                if beat or peer.acknowledged < peer.received:
                    peer.link.send({"kind": "ack", "ack": peer.received})
                    peer.acknowledged = peer.received
            elif name not in self.state.nodes:
                self.past_cpu_seconds += self.peers.pop(name).cpu_seconds

    # All nodes together.

    def info(self) -> HostInfo:
        """Of all connected nodes. Raises SandboxDown when there is none."""
        infos = [peer.info for peer in self.peers.values() if peer.link is not None]
        if not infos:
            raise SandboxDown(f"no node is connected to the router at {self.gate.address}")
        return codec.combined(infos)

    def cpu_seconds(self) -> float:
        return self.past_cpu_seconds + sum(peer.cpu_seconds for peer in self.peers.values())
