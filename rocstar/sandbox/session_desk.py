"""The host's view of sessions: which are alive, in which slot, at which state. It holds no history: a session that was
evicted, or whose slot died, is told so (`lost`) and sends its cells again.

Branches share a slot, where cells run one at a time. Slots are bounded in number (the one used longest ago goes first)
and in idleness. A cell counts among the calls that run at once, like any other (`Host.admit`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rocstar.sandbox import jail, slotwire
from rocstar.sandbox import session_wire as sw
from rocstar.sandbox.crew import Crew
from rocstar.sandbox.jail import SLOTS_PER_NURSERY
from rocstar.sandbox.roster import Roster
from rocstar.sandbox.session_lane import SessionLane
from rocstar.sandbox.session_wire import Order
from rocstar.sandbox.wire import Response, ServiceOutcome

LOOK_SECONDS = 0.01  # between looks at a tier that is coming up
MAX_ATTEMPTS = 2
MAX_SPARE = 8  # slots kept for the next sessions, some megabytes each
SPARE_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    slots: int
    """Slots of sessions at once; branches share one."""
    idle_seconds: float
    """After so long without a cell a slot is ended, seconds."""


@dataclass(slots=True)
class Waiting:
    """A cell in the host."""

    message: Mapping[str, Any]
    task: asyncio.Task[None] | None = None
    lane: SessionLane | None = None
    cancelled: bool = False
    replayed: int = 0
    attempt: int = 1


@dataclass(slots=True)
class Desk:
    """`admit` waits for a turn to run and `leave` gives it back; `reply` sends a message to the client."""

    roster: Roster
    terms: SessionTerms
    admit: Callable[[], Coroutine[Any, Any, None]]
    leave: Callable[[], None]
    finish: Callable[[Response], None]
    reply: Callable[[Mapping[str, Any]], None]
    homes: dict[str, SessionLane] = field(default_factory=dict)
    lanes: list[SessionLane] = field(default_factory=list)
    waiting: dict[str, Waiting] = field(default_factory=dict)
    taken: set[tuple[int, int]] = field(default_factory=set)
    """Tier and number of each slot whose end the nursery has not been told."""
    past_cpu_seconds: float = 0.0
    sweeper: asyncio.TimerHandle | None = None

    def submit(self, message: Mapping[str, Any]) -> None:
        cell = self.waiting[message["id"]] = Waiting(message)
        cell.task = asyncio.create_task(self.serve(cell))

    def branch(self, session: str, new: str) -> None:
        lane = self.homes.get(session)
        if lane is not None and not lane.dead and len(lane.refs) + 1 < sw.MAX_STATES:
            self.homes[new] = lane
            lane.refs[new] = lane.refs[session]
            lane.counts[new] = lane.counts[session]

    def close(self, session: str) -> None:
        lane = self.homes.pop(session, None)
        if lane is None:
            return
        lane.refs.pop(session, None)
        if not lane.refs:
            self.retire(lane)

    def retire(self, lane: SessionLane) -> None:
        """Keep its slot for another session, where a pid namespace makes it certain that nothing of this one is
        left."""
        spare = sum(each.spare for each in self.lanes)
        if lane.dead or lane.busy.locked() or spare >= MAX_SPARE or not lane.crew.plan.namespaces:
            self.end(lane)
        else:
            lane.reset()

    def cancel(self, request_id: str) -> None:
        cell = self.waiting.get(request_id)
        if cell is None:
            return
        cell.cancelled = True
        if cell.lane is not None:
            cell.lane.cancel()

    async def serve(self, cell: Waiting) -> None:
        """One cell from its arrival to its answer."""
        arrived = time.monotonic()
        await self.admit()
        queued = time.monotonic() - arrived
        try:
            response = await self.attempt(cell)
        finally:
            self.leave()
            del self.waiting[cell.message["id"]]
        if response is None:
            self.reply({"kind": "lost", "id": cell.message["id"]})
        else:
            self.finish(replace(response, queue_seconds=queued, attempt=cell.attempt))

    async def attempt(self, cell: Waiting) -> Response | None:
        """None where the history is needed and did not come along."""
        request_id = cell.message["id"]
        while not cell.cancelled:
            lane: SessionLane | str | None = self.homes.get(cell.message["session"])
            if lane is None or (isinstance(lane, SessionLane) and lane.dead):
                if cell.message["cells"] and "history" not in cell.message:
                    return None
                lane = await self.rebuilt(cell)
            response = await self.run(cell, cell.message, lane) if isinstance(lane, SessionLane) else None
            if response is not None:
                return replace(response, replayed_cells=cell.replayed) if cell.replayed else response
            if isinstance(lane, str) or cell.attempt >= MAX_ATTEMPTS:
                why = lane if isinstance(lane, str) else f"its slot died {cell.attempt} times"
                return Response(id=request_id, outcome=ServiceOutcome.INTERNAL, message=why)
            cell.attempt += 1
        return Response(id=request_id, outcome=ServiceOutcome.CANCELLED)

    async def rebuilt(self, cell: Waiting) -> SessionLane | str:
        """A new slot in which the session's history has been run; what went wrong, in words, if something did."""
        history = cell.message.get("history", ())
        code = "\n".join(past["code"] for past in (*history, cell.message))
        lane = await self.open(code)
        if isinstance(lane, str):
            return lane
        if cell.cancelled:  # its session may be closed by now, and nobody would close it again
            self.retire(lane)
            return "its caller is gone"
        session = cell.message["session"]
        self.homes[session] = lane
        lane.refs[session], lane.counts[session] = sw.ROOT, 0
        cell.replayed = 0
        for past in history:
            again = {
                **past,
                "id": cell.message["id"],
                "session": session,
                "commit": True,
                "fetch": [],
                "cells": cell.replayed,
            }
            response = await self.run(cell, again, lane)
            if response is None or not response.committed:
                self.end(lane)
                return f"cell {cell.replayed + 1} of its history could not be run again"
            cell.replayed += 1
        return lane

    async def run(self, cell: Waiting, message: Mapping[str, Any], lane: SessionLane) -> Response | None:
        async with lane.busy:
            session = message["session"]
            base = lane.refs.get(session)
            if lane.dead or base is None or cell.cancelled:
                return None
            if lane.counts[session] != message["cells"]:  # a cell was committed here and cancelled there
                self.close(session)
                return None
            new = next(lane.numbers)
            others = {state for name, state in lane.refs.items() if name != session}
            drop = sorted(lane.states - others - {sw.ROOT})  # the next session starts from that
            order = Order(base, new, message["commit"], drop, slotwire.pack_task(message))
            cell.lane = lane
            try:
                response = await lane.cell(message, order)
            finally:
                cell.lane = None
            if response is not None and response.committed:
                lane.states = (lane.states - set(drop)) | {new}
                if session in lane.refs:
                    lane.refs[session] = new
                    lane.counts[session] += 1
            if lane.dead:
                self.forget(lane)
            return response

    async def open(self, code: str) -> SessionLane | str:
        crew = self.roster.choose(code)
        while not crew.up:
            if crew.problem:
                crew = self.roster.choose(code)
            await asyncio.sleep(LOOK_SECONDS)
        for lane in self.lanes:
            if lane.spare and lane.crew is crew:
                lane.spare = False
                return lane
        self.make_room()
        lane = SessionLane(self.free_number(crew), crew, self.gone)
        self.taken.add((crew.index, lane.number))
        self.lanes.append(lane)
        plan = jail.PLANS.index(crew.plan)
        hello = await crew.raise_slot(lane, {"spawn": lane.number, "plan": plan, "session": 1})
        if hello["problem"]:
            self.forget(lane)
            return str(hello["problem"])
        self.look_later()
        return lane

    def free_number(self, crew: Crew) -> int:
        """From the other end than other slots take theirs."""
        numbers = range(SLOTS_PER_NURSERY - 1, crew.terms.size - 1, -1)
        return next(number for number in numbers if (crew.index, number) not in self.taken)

    def gone(self, lane: SessionLane) -> None:
        """Its slot has ended, and the nursery was told: the number may be used again."""
        self.taken.discard((lane.crew.index, lane.number))
        self.forget(lane)

    def make_room(self) -> None:
        idle = [lane for lane in self.lanes if not lane.busy.locked()]
        idle.sort(key=lambda lane: (not lane.spare, lane.used))
        for lane in idle[: len(self.lanes) - self.terms.slots + 1]:
            self.end(lane)

    def look_later(self) -> None:
        if self.sweeper is None and self.lanes:
            loop = asyncio.get_running_loop()
            pause = min(self.terms.idle_seconds, SPARE_SECONDS) / 4
            self.sweeper = loop.call_later(max(pause, LOOK_SECONDS), self.end_idle)

    def end_idle(self) -> None:
        self.sweeper = None
        for lane in [lane for lane in self.lanes if not lane.busy.locked() and self.is_old(lane)]:
            self.end(lane)
        self.look_later()

    def is_old(self, lane: SessionLane) -> bool:
        limit = min(self.terms.idle_seconds, SPARE_SECONDS) if lane.spare else self.terms.idle_seconds
        return time.monotonic() - lane.used > limit

    def end(self, lane: SessionLane) -> None:
        self.forget(lane)
        lane.dead = True
        lane.crew.kill(lane)
        lane.transport.abort()

    def forget(self, lane: SessionLane) -> None:
        if lane in self.lanes:
            self.lanes.remove(lane)
            self.past_cpu_seconds += lane.cpu_seconds
        for session in lane.refs:
            if self.homes.get(session) is lane:
                del self.homes[session]
        lane.refs.clear()

    def cpu_seconds(self) -> float:
        return self.past_cpu_seconds + sum(lane.cpu_seconds for lane in self.lanes)
