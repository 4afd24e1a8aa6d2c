"""One client process over four daemons with 45,000 calls in flight, one daemon killed by SIGKILL in the middle.

Stubs answer without running anything, so that the client alone is measured: calls a second, and per CPU second of the
client. `--real` runs real programs in four real daemons instead. Every answer is checked: none may be lost, wrong, or
come twice. The waiting time is from `run` to its return. Prints a table and, last, one JSON line.

    python benchmarks/sandbox_dispatch.py [--calls 300000] [--in-flight 45000]
    python benchmarks/sandbox_dispatch.py --real [--calls 45000] [--slots 4]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from frame import START_SECONDS, parser, print_figures, report, spent

from rocstar.sandbox import wire
from rocstar.sandbox.call import Call, DaemonInfo, DaemonSettings, Isolation, Limits, ProgramOutcome, Response
from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.client.node import ChildConnection
from rocstar.sandbox.wire import FrameKind, FrameReader

PROGRAM = "import math\nprint({n}, math.factorial({n} % 20))\n"
LIMITS = Limits(wall_seconds=60.0, cpu_seconds=60.0)


@dataclass
class Tally:
    answers: Counter[int] = field(default_factory=Counter)
    wrong: int = 0
    lost: int = 0
    sent_again: int = 0
    wait_seconds: list[float] = field(default_factory=list)

    @property
    def done(self) -> int:
        return self.answers.total() + self.lost


async def closed_loop(client: SandboxClient, tally: Tally, calls: int, in_flight: int) -> None:
    """`in_flight` callers, each with its next call as soon as the last is answered."""
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            sent = time.monotonic()
            call = Call(id=str(number), code=PROGRAM.replace("{n}", str(number)), limits=LIMITS)
            response = await client.run(call)
            tally.wait_seconds.append(time.monotonic() - sent)
            tally.answers[number] += 1
            tally.lost += response.outcome is not ProgramOutcome.OK
            tally.wrong += response.id != call.id or not response.stdout.startswith(f"{number} ")
            tally.sent_again += response.attempt > 1

    await asyncio.gather(*(caller() for _ in range(in_flight)))


async def with_a_death(client: SandboxClient, pid: int, tally: Tally, calls: int, in_flight: int) -> None:
    working = asyncio.ensure_future(closed_loop(client, tally, calls, in_flight))
    while tally.done < calls / 2 and not working.done():  # noqa: ASYNC110 - the tally's owner knows no event
        await asyncio.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    await working


def stub(path: str) -> None:
    """Answer every call at once, with what its program would print."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    connection, _ = server.accept()
    connection.sendall(wire.pack(FrameKind.HELLO, 0, wire.encode(DaemonInfo(isolation=Isolation.L3, slots=64))))
    reader = FrameReader()
    while data := connection.recv(2**18):
        replies = bytearray()
        for frame in reader.feed(data):
            if frame.kind is FrameKind.CALL:
                call = wire.decode_call(frame.body)
                response = Response(id=call.id, outcome=ProgramOutcome.OK, stdout=f"{call.id} 1\n")
                replies += wire.pack(FrameKind.RESPONSE, frame.number, wire.encode(response))
            elif frame.kind is FrameKind.PING:
                replies += wire.pack(FrameKind.USAGE, 0, b"\x80")
        connection.sendall(replies)


@contextmanager
def stubs(count: int) -> Iterator[tuple[list[str], list[int]]]:
    """Addresses and process ids."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{number}" for number in range(count)]
        processes = [subprocess.Popen([sys.executable, __file__, "--stub", path]) for path in paths]
        try:
            deadline = time.monotonic() + START_SECONDS
            while not all(Path(path).exists() for path in paths) and time.monotonic() < deadline:
                time.sleep(0.05)
            yield [f"unix:{path}" for path in paths], [process.pid for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()


@contextmanager
def daemons(count: int, slots: int) -> Iterator[tuple[SandboxClient, int]]:
    """A client over children, and the process id of one of them."""
    with SandboxClient(DaemonSettings(slots=slots, preload=()), daemons=count) as client:
        client.launch()
        client.await_hello()
        connection = client.nodes[0].connection
        assert isinstance(connection, ChildConnection)
        yield client, connection.process.pid


def measure(client: SandboxClient, pid: int, calls: int, in_flight: int) -> dict[str, float]:
    tally = Tally()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)  # as a service should: the calls in flight are alive, none is garbage
    with spent() as seconds:
        asyncio.run(with_a_death(client, pid, tally, calls, in_flight))
    waits = sorted(tally.wait_seconds)
    return {
        "calls": calls,
        "in_flight": in_flight,
        "lost": calls - len(tally.answers) + tally.lost,
        "answered_twice": tally.answers.total() - len(tally.answers),
        "wrong": tally.wrong,
        "sent_again": tally.sent_again,
        "calls_per_second": round(calls / seconds.wall),
        "calls_per_cpu_second": round(calls / seconds.cpu),
        "wait_p50_seconds": round(waits[len(waits) // 2], 3),
        "wait_p99_seconds": round(waits[int(0.99 * len(waits))], 3),
        "wait_max_seconds": round(waits[-1], 3),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--real", action="store_true", help="real programs in real daemons")
    arguments.add_argument("--calls", type=int, help="300,000; with --real 45,000")
    arguments.add_argument("--in-flight", type=int, default=45_000)
    arguments.add_argument("--daemons", type=int, default=4)
    arguments.add_argument("--slots", type=int, default=4, help="of each real daemon")
    arguments.add_argument("--stub", metavar="PATH", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.stub:
        stub(options.stub)
        return
    calls = options.calls or (45_000 if options.real else 300_000)
    if options.real:
        with daemons(options.daemons, options.slots) as (client, pid):
            row = measure(client, pid, calls, options.in_flight)
    else:
        with stubs(options.daemons) as (addresses, pids), SandboxClient.connect(addresses) as client:
            row = measure(client, pids[0], calls, options.in_flight)
    print_figures(row)
    report(real=options.real, daemons=options.daemons, **row)
    if row["lost"] or row["answered_twice"] or row["wrong"]:
        raise SystemExit("calls were lost, wrong or answered twice")


if __name__ == "__main__":
    main()
