"""A node's side of its connection to one router: runs the calls that come, keeps results until they arrived.

A call id is run once: when it comes again it is already running or its result is already on record. The record of
a result goes when the router has acknowledged it. Frames: see `peers`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rocstar.sandbox.router import auth, codec
from rocstar.sandbox.router.address import connect
from rocstar.sandbox.router.link import MAX_FRAME_BYTES, Link, split
from rocstar.sandbox.router.work import Withdraw, Work

REDIAL_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0)  # between attempts to connect; the last one again and again
SILENT_SECONDS = 15.0  # the router beats twice a second; so long a silence is a connection that broke unnoticed
HANDSHAKE_SECONDS = 10.0
BEAT_SECONDS = 0.5
STUCK_SECONDS = 30.0  # beyond the longest wall limit: then the sandbox below us hangs
FLUSH_SECONDS = 0.001  # results that come closer together travel together


class Refused(Exception):
    """The other side does not know our token, or we not its."""


@dataclass(frozen=True, slots=True)
class Running:
    withdraw: Withdraw
    wall_seconds: float


class Uplink:
    """Consumes calls of one router, produces their results. `keep` runs for ever: it connects, and connects again."""

    def __init__(self, address: str, token: str, work: Work, describe: Callable[[Uplink], Mapping[str, Any]]):
        """describe: the node's name, label, slots, capacity, others and cpu_seconds, now."""
        self.address = address
        self.token = token
        self.work = work
        self.describe = describe
        self.link: Link | None = None
        self.running: dict[str, Running] = {}
        self.records: dict[int, tuple[str, bytes]] = {}
        """Results not acknowledged: number -> (call id, result), in order."""
        self.done: set[str] = set()
        """Their ids."""
        self.next_number = 0
        self.unsent_from = 0
        self.flushing = False
        self.flushed = 0.0
        self.heard = 0.0
        self.progressed = time.monotonic()
        """When a call last came to an idle uplink or was last finished."""

    async def keep(self) -> None:
        """Be connected, for ever. Raises Refused."""
        failures = 0
        while True:
            try:
                await self.connect()
                failures = 0
                await self.beat()
            except (OSError, EOFError, TimeoutError):
                failures += 1
            self.hang_up()
            await asyncio.sleep(REDIAL_SECONDS[min(failures, len(REDIAL_SECONDS) - 1)])

    async def connect(self) -> None:
        """Raises OSError, EOFError, TimeoutError and Refused."""
        link = Link(await connect(self.address))
        inbox: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        link.on_message, link.on_end = inbox.put_nowait, lambda: inbox.put_nowait(None)
        link.attach(asyncio.get_running_loop())
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                welcome = await self.shake_hands(link, inbox)
        except BaseException:
            link.close()
            raise
        self.link = link
        self.heard = time.monotonic()
        link.limit = MAX_FRAME_BYTES
        link.on_message, link.on_end = self.on_message, self.on_end
        self.acknowledged(welcome["ack"])
        self.unsent_from = next(iter(self.records), self.next_number)
        self.flush()
        while not inbox.empty():  # came right behind the welcome
            message = inbox.get_nowait()
            if message is None:
                raise EOFError
            self.on_message(message)

    async def shake_hands(self, link: Link, inbox: asyncio.Queue[dict[str, Any] | None]) -> dict[str, Any]:
        challenge = await answer(inbox)
        me = self.describe(self)
        nonce = auth.new_nonce()
        hello = {
            "kind": "hello",
            "proof": auth.proof(self.token, auth.NODE, str(challenge.get("nonce")), me["name"]),
            "nonce": nonce,
            "info": codec.info_message(self.work.info()),
            "running": list(self.running),
            "done": [(number, call_id) for number, (call_id, _) in self.records.items()],
            **me,
        }
        link.send(hello)
        welcome = await answer(inbox)
        if not auth.is_proven(welcome.get("proof"), self.token, auth.ROUTER, nonce, me["name"]):
            raise Refused(f"the router at {self.address} and this node have different tokens")
        return welcome

    async def beat(self) -> None:
        """Tell the load twice a second, until the connection ends. Raises EOFError."""
        slept = time.monotonic()
        while self.link is not None:
            now = time.monotonic()
            if now - slept > 2 * BEAT_SECONDS:
                self.heard = now  # we ourselves stood still
            elif now - self.heard > SILENT_SECONDS:
                raise EOFError
            slept = now
            self.link.send({"kind": "beat", **self.describe(self)})
            await asyncio.sleep(BEAT_SECONDS)
        raise EOFError

    def on_end(self) -> None:
        self.link = None

    def hang_up(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    def on_message(self, message: dict[str, Any]) -> None:
        self.heard = time.monotonic()
        if "ack" in message:
            self.acknowledged(message["ack"])
        if message["kind"] == "calls":
            self.start(message["calls"])
        elif message["kind"] == "withdraw":
            running = self.running.get(message["id"])
            if running is not None:
                running.withdraw()
        elif message["kind"] == "tell":
            self.work.tell(message["message"])

    def start(self, calls: Sequence[Mapping[str, Any]]) -> None:
        if not self.running:
            self.progressed = time.monotonic()
        for call in calls:
            call_id = call["id"]
            if call_id not in self.running and call_id not in self.done:
                withdraw = self.work.begin(call, partial(self.finish, call_id))
                cells = 1 + len(call.get("history", ()))  # earlier ones of its session are run first
                self.running[call_id] = Running(withdraw, call["wall_seconds"] * cells)

    def finish(self, call_id: str, result: bytes) -> None:
        del self.running[call_id]
        self.progressed = time.monotonic()
        self.records[self.next_number] = (call_id, result)
        self.done.add(call_id)
        self.next_number += 1
        self.flush_soon()

    def flush_soon(self) -> None:
        """At once when the last results are a while ago, else together with those that come meanwhile."""
        if not self.flushing:
            self.flushing = True
            wait = self.flushed + FLUSH_SECONDS - time.monotonic()
            loop = asyncio.get_running_loop()
            loop.call_later(wait, self.flush) if wait > 0 else loop.call_soon(self.flush)

    def flush(self) -> None:
        self.flushing = False
        self.flushed = time.monotonic()
        if self.link is None:
            return
        for part in split([self.records[number][1] for number in range(self.unsent_from, self.next_number)]):
            self.link.send_list("results", part, **{"from": self.unsent_from})
            self.unsent_from += len(part)

    def is_stuck(self, now: float) -> bool:
        """Calls run, and none has ended for longer than any of them may take."""
        longest = max((each.wall_seconds for each in self.running.values()), default=0.0)
        return bool(self.running) and now - self.progressed > longest + STUCK_SECONDS

    def acknowledged(self, number: int) -> None:
        while self.records and (oldest := next(iter(self.records))) <= number:
            self.done.discard(self.records.pop(oldest)[0])


async def answer(inbox: asyncio.Queue[dict[str, Any] | None]) -> dict[str, Any]:
    """Raises EOFError when the connection ends, Refused when we are."""
    message = await inbox.get()
    if message is None:
        raise EOFError
    if message.get("kind") == "refused":
        raise Refused(str(message.get("message")))
    return message
