"""Load on a service, and what came of it: every answer is checked. For `rocstar sandbox bench` and the benchmarks.

A call prints a number of its own, so that no answer can pass for another's. Not here: the many processes that a large
load needs (`benchmarks/sandbox_service.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from rocstar.sandbox.service.connection import Address, Closed, Connection, Lost

PROGRAMS: dict[str, str] = {
    "W1": "print({n} * 7 + 1)",
    "W2": "import numpy as np; print(int(round(np.linalg.det(np.eye(4)))) * {n} * 7 + 1)",
    "W3": "import sympy as sp; x = sp.symbols('x'); print(int(sp.integrate(2 * x, (x, 0, 1))) * {n} * 7 + 1)",
}
OPENING_AT_ONCE = 500  # connections being opened; more only run into the kernel's queue of half-open ones


@dataclass(slots=True)
class Tally:
    """What became of the calls."""

    right: int = 0
    """Answered, with the right output."""
    wrong: list[str] = field(default_factory=list)
    """Answered otherwise: the first 200 characters of each such answer."""
    lost: int = 0
    """Not answered at all."""
    seconds: list[float] = field(default_factory=list)
    """Time from sending to the right answer, one per right call."""
    finished: list[float] = field(default_factory=list)
    """When, since the start of the load."""
    wall_seconds: float = 0.0
    """From the first call sent to the last answer."""

    def merged(self, others: Sequence[Tally]) -> Tally:
        everyone = [self, *others]
        return Tally(
            right=sum(each.right for each in everyone),
            wrong=[text for each in everyone for text in each.wrong],
            lost=sum(each.lost for each in everyone),
            seconds=[value for each in everyone for value in each.seconds],
            finished=sorted(value for each in everyone for value in each.finished),
            wall_seconds=max(each.wall_seconds for each in everyone),
        )

    def figures(self) -> dict[str, float | int]:
        """Counts, throughput (calls/s) and latencies (ms)."""
        ranked = sorted(self.seconds)
        at = {f"p{int(100 * q)}_ms": round(1000 * quantile(ranked, q), 1) for q in (0.5, 0.95, 0.99)}
        rate = self.right / self.wall_seconds if self.wall_seconds else 0.0
        counts = {"right": self.right, "wrong": len(self.wrong), "lost": self.lost}
        return {**counts, "wall_seconds": round(self.wall_seconds, 3), "calls_per_second": round(rate, 1), **at}


def quantile(ranked: Sequence[float], q: float) -> float:
    """Of a sorted list; nan when it is empty."""
    return ranked[min(int(q * len(ranked)), len(ranked) - 1)] if ranked else float("nan")


def call_body(program: str, number: int) -> bytes:
    return msgspec.json.encode({"code": program.replace("{n}", str(number)), "id": str(number)})


def expected(number: int) -> str:
    return f"{number * 7 + 1}\n"


class Record:
    """Checks answers and puts them into a Tally, against one clock."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.start = time.monotonic()

    def one(self, number: int, sent: float, result: object) -> None:
        now = time.monotonic()
        if isinstance(result, dict) and result.get("stdout") == expected(number) and result.get("id") == str(number):
            self.tally.right += 1
            self.tally.seconds.append(now - sent)
            self.tally.finished.append(now - self.start)
        else:
            self.tally.wrong.append(str(result)[:200])

    def done(self) -> Tally:
        self.tally.wall_seconds = time.monotonic() - self.start
        return self.tally


async def open_many(address: Address, count: int, local_host: str | None = None) -> list[Connection]:
    """Raises OSError when one cannot be had."""
    gate = asyncio.Semaphore(OPENING_AT_ONCE)

    async def one() -> Connection:
        async with gate:
            return await Connection.open(address, local_host)

    return await asyncio.gather(*(one() for _ in range(count)))


async def closed_loop(
    connections: Sequence[Connection], program: str, numbers: Iterator[int], more: Callable[[], bool]
) -> Tally:
    """Each connection sends its next call as soon as its last one is answered, while `more()` and numbers last."""
    record = Record()
    await asyncio.gather(*(caller(each, program, numbers, more, record) for each in connections))
    return record.done()


async def caller(
    connection: Connection, program: str, numbers: Iterator[int], more: Callable[[], bool], record: Record
) -> None:
    while more() and (number := next(numbers, None)) is not None:
        sent = time.monotonic()
        try:
            answer = await connection.ask("POST", "/v1/run", call_body(program, number))
        except Closed:
            return
        except Lost:
            record.tally.lost += 1
            return
        record.one(number, sent, msgspec.json.decode(answer.body) if answer.status == 200 else answer.body)


async def streamed(connection: Connection, program: str, numbers: Sequence[int]) -> Tally:
    """All calls in one streaming batch."""
    record = Record()
    rest = bytearray()

    def sink(data: bytes) -> None:
        nonlocal rest
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            message = msgspec.json.decode(line)
            record.one(numbers[message["index"]], record.start, message["result"])

    connection.sink = sink
    body = b'{"calls":[' + b",".join(call_body(program, number) for number in numbers) + b"]}"
    with suppress(Lost):
        await connection.ask("POST", "/v1/stream", body)
    connection.sink = None
    record.tally.lost = len(numbers) - record.tally.right - len(record.tally.wrong)
    return record.done()


async def bench(address: Address, program: str, callers: int, calls: int) -> Tally:
    """`calls` calls by `callers` callers in this process. Raises OSError where the service cannot be reached."""
    connections = await open_many(address, callers)
    try:
        return await closed_loop(connections, program, iter(range(calls)), lambda: True)
    finally:
        for connection in connections:
            connection.close()
