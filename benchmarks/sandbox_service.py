"""What the HTTP service costs and holds. Prints a table for each part and, last, one JSON line.

- http: CPU per call over HTTP against the same calls through a client of this library, interleaved; callers excluded.
- hostile: so many callers at once, each with a connection and one call under way: throughput and latency. First all of
  them are good, then a tenth is hostile, at another address: they send the programs of `hostile_programs`, half a body
  and no more, or ask for floods of output that they never read. The figures are those of the good ones; memory is that
  of the serving process, at most.

Every answer is checked: a call prints a number of its own, so that no answer can pass for another's. Throughput is
that of this machine with the callers on it.

    python benchmarks/sandbox_service.py [--parts http,hostile] [--counts 1,16,256,2000]
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import hostile_programs
import uvloop
from frame import (
    at_once,
    by_turns,
    cpu_seconds,
    environment,
    free_port,
    parser,
    peak_bytes,
    print_rows,
    report,
    rocstar,
    serving,
    spent,
)

from rocstar.sandbox.call import Call, Limits
from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.container import open_files

HOST, HOSTILE_HOST = "127.0.0.1", "127.0.0.2"
HALF = b"POST /v1/run HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + bytes(500_000)
OPENING_AT_ONCE = 500  # connections being opened; more only run into the kernel's queue of half-open ones
CALLERS, CALLS = 16, 400  # of the part `http`, in each round
LIMITS = {"wall_seconds": 60.0, "cpu_seconds": 60.0}  # a busy machine must not end a call


@dataclass(slots=True)
class Tally:
    """What became of the calls."""

    lost: int = 0
    """Not answered at all."""
    wrong: list[str] = field(default_factory=list)
    """Answered, but not rightly: the first 200 characters of each such answer."""
    seconds: list[float] = field(default_factory=list)
    """From sending to the right answer, one per right call."""

    def figures(self, wall_seconds: float) -> dict[str, float | int]:
        ranks = statistics.quantiles(self.seconds, n=100)
        times = {f"p{rank}_ms": round(1000 * ranks[rank - 1], 1) for rank in (50, 95, 99)}
        rate = round(len(self.seconds) / wall_seconds, 1)
        return {"right": len(self.seconds), "wrong": len(self.wrong), "lost": self.lost, "calls_per_s": rate, **times}


class Connection:
    """One caller's connection, kept alive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, path: str, message: object) -> None:
        body = json.dumps(message).encode()
        fields = f"Host: {HOST}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self.writer.write(f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)

    async def post(self, path: str, message: object) -> dict[str, Any]:
        """Raises OSError, EOFError or ValueError where no whole answer comes."""
        self.send(path, message)
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        answer: dict[str, Any] = json.loads(await self.reader.readexactly(length))
        return answer


async def connect(port: int, count: int, source: str = HOST) -> list[Connection]:
    """source: the callers' own address; the service gives each address a share."""

    async def one(_: int) -> Connection:
        return Connection(*await asyncio.open_connection(HOST, port, local_addr=(source, 0)))

    return await at_once(OPENING_AT_ONCE, one, range(count))


async def call_in_a_loop(connection: Connection, numbers: Iterator[int], more: Callable[[], bool], seen: Tally) -> None:
    while more() and (number := next(numbers, None)) is not None:
        sent = time.monotonic()
        try:
            answer = await connection.post("/v1/run", {"code": f"print({number})", "limits": LIMITS})
        except (OSError, EOFError, ValueError):
            seen.lost += 1
            return
        if answer.get("stdout") == f"{number}\n":
            seen.seconds.append(time.monotonic() - sent)
        else:
            seen.wrong.append(str(answer)[:200])


async def load(port: int, callers: int, numbers: Iterator[int], more: Callable[[], bool]) -> tuple[Tally, float]:
    """What came of it, and the wall seconds from the first call to the last answer."""
    connections = await connect(port, callers)
    seen, began = Tally(), time.monotonic()
    await asyncio.gather(*(call_in_a_loop(each, numbers, more, seen) for each in connections))
    wall_seconds = time.monotonic() - began
    for connection in connections:
        connection.writer.close()
    return seen, wall_seconds


@contextmanager
def service(*options: str) -> Iterator[tuple[int, int]]:
    """A service of its own: its port and its process id."""
    port = free_port()
    command = rocstar("sandbox", "serve", *options)
    with serving(command, port, lambda: asyncio.run(first_answer(port)), env=environment()) as pid:
        yield port, pid


async def first_answer(port: int) -> bool:
    (connection,) = await connect(port, 1)
    answer = await connection.post("/v1/run", {"code": "print(1)"})
    connection.writer.close()
    if answer.get("stdout") != "1\n":
        raise SystemExit(f"the service answered {answer}")
    return True


def http_ms(port: int, pid: int) -> float:
    """CPU of the service, its sandbox included, for each call."""
    with spent(lambda: cpu_seconds(pid)) as used:
        seen, _ = uvloop.run(load(port, CALLERS, iter(range(CALLS)), lambda: True))
    assert len(seen.seconds) == CALLS, (seen.lost, seen.wrong[:1])
    return 1000 * used.cpu / CALLS


def native_ms(client: SandboxClient) -> float:
    """CPU of this process and its sandbox, for each call; as many under way."""
    sandbox = client.nodes[0].connection.process.pid
    with spent(lambda: cpu_seconds(sandbox) + time.process_time()) as used:
        uvloop.run(native_load(client))
    return 1000 * used.cpu / CALLS


async def native_load(client: SandboxClient) -> None:
    numbers = iter(range(CALLS))

    async def caller() -> None:
        for number in numbers:
            response = await client.run(Call(id=str(number), code=f"print({number})", limits=Limits(**LIMITS)))
            assert response.stdout == f"{number}\n", response

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


def http(rounds: int) -> dict[str, Any]:
    """The first round brings everything up."""
    with service("--preload", "", "--slots", "2") as (port, pid), SandboxClient.start(slots=2, preload=()) as client:
        ways = {"http": lambda: http_ms(port, pid), "native": lambda: native_ms(client)}
        seen = by_turns(ways, range(rounds + 1))[1:]
    medians = {f"{name}_cpu_ms": round(statistics.median(costs[name] for costs in seen), 3) for name in ways}
    return {**medians, "http_adds_ms": round(medians["http_cpu_ms"] - medians["native_cpu_ms"], 3)}


async def disturb(connection: Connection, first: int, port: int) -> None:
    """A hostile caller, forever: an eighth sends half a body, an eighth reads nothing, the others send programs."""
    kind = first % 8
    for number in itertools.count(first):
        row = hostile_programs.ROWS[number % len(hostile_programs.ROWS)]
        seconds = hostile_programs.LOOP_SECONDS if row.loops else 2.0
        message = {"code": row.code, "limits": {**(row.limits or {}), "wall_seconds": seconds}}
        try:
            if kind == 0:
                connection.writer.write(HALF)
                await asyncio.sleep(5)
            elif kind == 1:
                connection.reader._transport.pause_reading()  # type: ignore[attr-defined]
                connection.send("/v1/run", {"code": "print('x' * 10**6)"})
                await connection.writer.drain()
                await asyncio.sleep(1)
            else:
                await connection.post("/v1/run", message)
        except (OSError, EOFError, ValueError):  # closed on, rightly
            connection.writer.close()
            (connection,) = await connect(port, 1, HOSTILE_HOST)


async def load_beside(port: int, good: int, bad: int, seconds: float) -> tuple[Tally, float]:
    """What came of the good callers' calls beside hostile ones that had a second before them."""
    hostile = await connect(port, bad, HOSTILE_HOST)
    tasks = [asyncio.ensure_future(disturb(each, number, port)) for number, each in enumerate(hostile)]
    await asyncio.sleep(1)
    until = time.monotonic() + seconds
    seen, wall_seconds = await load(port, good, itertools.count(), lambda: time.monotonic() < until)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seen, wall_seconds


def hostile(counts: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    rows = []
    for count in counts:
        for bad in sorted({0, count // 10}):
            with service("--preload", "") as (port, pid):
                seen, wall_seconds = uvloop.run(load_beside(port, count - bad, bad, seconds))
                mib = peak_bytes(pid) // 2**20
            rows.append({"callers": count, "hostile": bad, **seen.figures(wall_seconds), "mib": mib})
            print("\n".join(seen.wrong[:3]), end="")
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--parts", default="http,hostile")
    arguments.add_argument("--rounds", type=int, default=5, help="of the part http")
    arguments.add_argument("--counts", default="1,16,256,2000", help="callers at once")
    arguments.add_argument("--seconds", type=float, default=8.0, help="of each count of callers")
    options = arguments.parse_args()
    open_files()
    parts = options.parts.split(",")
    found: dict[str, Any] = {}
    if "http" in parts:
        found["http"] = http(options.rounds)
        print("\na call over HTTP and through a client")
        print_rows([found["http"]])
    if "hostile" in parts:
        found["hostile"] = hostile([int(count) for count in options.counts.split(",")], options.seconds)
        print("\ncallers at once, alone and with a tenth of them hostile")
        print_rows(found["hostile"])
    report(**found)
    sys.exit(any(row["wrong"] or row["lost"] for row in found.get("hostile", [])))


if __name__ == "__main__":
    main()
