"""What the service holds and what its front costs. Prints tables and, last, one JSON line.

- front: CPU per call of the HTTP front alone, in front of a scripted sandbox that answers at once.
- callers: so many callers at once, each with a connection and one call under way: throughput and latency.
- streams, connections: so many calls submitted at once, by a few streaming batches, or by as many connections with one
  call each where descriptors permit; when a share of them was answered, and the memory of the front (supervisor and
  workers, without the sandboxes below them).
- start: from the command to the answer of the first call.

Every answer is checked. Throughput is that of this machine with the load generator on it.

    python benchmarks/sandbox_service.py [--parts front,start,callers,streams,connections] [--at-once 45000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from rocstar.sandbox.service.connection import Address
from rocstar.sandbox.service.ledger import Ledger
from rocstar.sandbox.service.load import PROGRAMS, Tally, closed_loop, open_many, quantile, streamed
from rocstar.sandbox.service.local import LocalService, start
from rocstar.sandbox.service.protocol import raise_descriptor_limit
from rocstar.sandbox.service.remote import ask
from rocstar.sandbox.service.settings import Settings

GENERATORS = 3
STREAMS = 9
SPARE_DESCRIPTORS = 512
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def in_generators(work: Callable[..., Tally], *arguments: Any) -> Tally:
    """Run `work(address, number, ...)` in every generator process, all starting at the same moment."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(GENERATORS), context.Queue()
    processes = [
        context.Process(target=generate, args=(work, number, barrier, results, arguments))
        for number in range(GENERATORS)
    ]
    for process in processes:
        process.start()
    tallies = [results.get() for _ in processes]
    for process in processes:
        process.join()
    failed = [text for text in tallies if isinstance(text, str)]
    assert not failed, failed[0]
    return tallies[0].merged(tallies[1:])


def generate(work: Callable[..., Any], number: int, barrier: Any, results: Any, arguments: tuple[Any, ...]) -> None:
    raise_descriptor_limit()
    try:
        results.put(uvloop.run(work(number, barrier, *arguments)))
    except Exception as error:  # told to the parent, which stops
        barrier.abort()
        results.put(repr(error))


async def call_in_a_loop(number: int, barrier: Any, url: str, program: str, callers: int, seconds: float) -> Tally:
    connections = await open_many(Address.of(url), share_of(callers, number), f"127.0.0.{2 + number}")
    barrier.wait()
    end = time.monotonic() + seconds
    return await closed_loop(connections, program, numbers_of(number), lambda: time.monotonic() < end)


async def call_once_each(number: int, barrier: Any, url: str, program: str, calls: int) -> Tally:
    connections = await open_many(Address.of(url), share_of(calls, number), f"127.0.0.{2 + number}")
    barrier.wait()
    limited = iter([next(numbers) for numbers in [numbers_of(number)] for _ in connections])
    return await closed_loop(connections, program, limited, lambda: True)


async def stream_all(number: int, barrier: Any, url: str, program: str, calls: int) -> Tally:
    each = STREAMS // GENERATORS
    connections = await open_many(Address.of(url), each)
    numbers = numbers_of(number)
    parts = [[next(numbers) for _ in range(calls // STREAMS)] for _ in connections]
    barrier.wait()
    tallies = await asyncio.gather(
        *(streamed(connection, program, part) for connection, part in zip(connections, parts, strict=True))
    )
    return tallies[0].merged(tallies[1:])


def numbers_of(generator: int) -> Iterator[int]:
    """Numbers that no other generator uses."""
    number = generator
    while True:
        yield number
        number += GENERATORS


def share_of(total: int, number: int) -> int:
    return total // GENERATORS + (number < total % GENERATORS)


def front_pids(service: LocalService) -> list[int]:
    """The supervisor and its workers; sandboxes are their children in turn."""
    pid = service.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def memory_bytes(service: LocalService) -> int:
    """Proportional share of physical memory, all processes of the front."""
    return sum(pss(pid) for pid in front_pids(service))


def pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def watched_memory(service: LocalService) -> Iterator[list[int]]:
    """The most memory seen, as the only item of a list."""
    most, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.25):
            most[0] = max(most[0], memory_bytes(service))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()


@contextmanager
def serving(*options: str) -> Iterator[LocalService]:
    service = start(["--preload", "", *options])
    try:
        yield service
    finally:
        service.stop()


def front(calls: int) -> dict[str, Any]:
    """CPU per call of the front, in a process of its own, its generator excluded."""
    context = multiprocessing.get_context("spawn")
    port, result = context.Value("i", 0), context.Queue()
    process = context.Process(target=serve_scripted, args=(port, result))
    process.start()
    while port.value == 0:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{port.value}"
    before, _ = result.get(), uvloop.run(bench_front(url, calls))
    os.kill(process.pid or 0, 15)
    after = result.get()
    process.join()
    return {"calls": calls, "cpu_ms_per_call": round(1000 * (after - before) / calls, 4)}


async def bench_front(url: str, calls: int) -> None:
    connections = await open_many(Address.of(url), 32)
    tally = await closed_loop(connections, PROGRAMS["W1"], iter(range(calls)), lambda: True)
    assert tally.right == calls, tally.wrong[:1]


def serve_scripted(port: Any, result: Any) -> None:
    """The worker's own server in front of a runner that answers at once."""
    from rocstar.sandbox.service.admission import Admission
    from rocstar.sandbox.service.http import Service
    from rocstar.sandbox.service.server import Server
    from rocstar.sandbox.service.worker import policy_of
    from rocstar.sandbox.wire import HostInfo, Isolation, ProgramOutcome, Request, Response

    class Scripted:
        async def run(self, request: Request) -> Response:
            n = int(request.id)
            return Response(id=request.id, outcome=ProgramOutcome.OK, exit_code=0, stdout=f"{n * 7 + 1}\n")

        def cpu_seconds(self) -> float:
            return 0.0

    settings, ledger, runner = Settings(port=0), Ledger(1), Scripted()
    info = HostInfo(isolation=Isolation.L1, failed_probes=(), slots=settings.slots, preload=())
    service = Service(
        settings=settings,
        admission=Admission(runner, policy_of(settings), ledger.row(0)),
        info=lambda: info,
        ledger=ledger,
        row=ledger.row(0),
        started=time.time(),
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    lifeline, _held = os.pipe()
    server = Server(service, runner)
    result.put(time.process_time())
    port.value = listener.getsockname()[1]
    server.run_until_told(listener, lifeline)
    result.put(time.process_time())


def first_answer(preload: str) -> dict[str, Any]:
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    service = start(["--preload", preload])
    answer = ask(Address.of(service.url), "POST", "/v1/run", {"code": "print(1)"})
    seconds = time.monotonic() - began
    service.stop()
    assert answer["stdout"] == "1\n"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"preload": preload or "none", "first_answer_s": round(seconds, 2), "cpu_s_start_to_end": round(cpu, 2)}


def callers(counts: Sequence[int], seconds: float, workers: int) -> list[dict[str, Any]]:
    rows = []
    with serving("--workers", str(workers)) as service:
        for count in counts:
            with watched_memory(service) as most:
                tally = in_generators(call_in_a_loop, service.url, PROGRAMS["W1"], count, seconds)
            rows.append({"callers": count, **tally.figures(), "front_mib": most[0] >> 20})
    return rows


def at_once(calls: int, how: str, workers: int) -> dict[str, Any]:
    """`how`: `streams` of a few connections, or `connections` with one call each."""
    work = stream_all if how == "streams" else call_once_each
    calls -= calls % STREAMS
    # Opening so many connections takes a while, and so do the answers; nobody here hangs up.
    patience = ("--patience-seconds", "3600", "--keep-alive-seconds", "600")
    with serving("--workers", str(workers), *patience) as service, watched_memory(service) as most:
        tally = in_generators(work, service.url, PROGRAMS["W1"], calls)
        status = ask(Address.of(service.url), "GET", "/v1/status")
    curve = {f"{share:.0%}": round(quantile(tally.finished, share), 2) for share in SHARES}
    counted = {"calls": calls, "service_counted": sum(status["calls"].values())}
    return {"how": how, **counted, **tally.figures(), "answered_after_s": curve, "front_mib": most[0] >> 20}


def connections_possible(workers: int) -> int:
    """Both ends are here: generators and workers each have the hard limit on descriptors."""
    each = resource.getrlimit(resource.RLIMIT_NOFILE)[1] - SPARE_DESCRIPTORS
    return min(GENERATORS, workers) * each


def table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title}")
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="front,start,callers,streams,connections")
    parser.add_argument("--counts", default="1,16,256,2000", help="callers at once")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each count of callers")
    parser.add_argument("--at-once", type=int, default=45_000, help="calls submitted at once")
    parser.add_argument("--workers", type=int, default=3, help="of the run with a connection per call")
    arguments = parser.parse_args()
    parts, found = arguments.parts.split(","), {"benchmark": "sandbox_service", "python": sys.version.split()[0]}
    if "front" in parts:
        found["front"] = [front(20_000) for _ in range(3)]
        table("the front alone", found["front"])
    if "start" in parts:
        found["start"] = [first_answer(preload) for preload in ("", "numpy,sympy") for _ in range(3)]
        table("from the command to the first answer", found["start"])
    if "callers" in parts:
        found["callers"] = callers([int(count) for count in arguments.counts.split(",")], arguments.seconds, 1)
        table("callers at once", found["callers"])
    if "streams" in parts:
        found["streams"] = [at_once(arguments.at_once, "streams", 1)]
        table("calls submitted at once, by streaming batches", found["streams"])
    if "connections" in parts:
        possible = min(arguments.at_once, connections_possible(arguments.workers))
        if possible < arguments.at_once:
            print(f"\nonly {possible} connections are possible: the limit on descriptors is too low for more")
        found["connections"] = [at_once(possible, "connections", arguments.workers)]
        table("calls submitted at once, a connection each", found["connections"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
