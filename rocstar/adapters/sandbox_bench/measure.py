"""Measures a service: correctly reported ends, successful attacks, leftovers, and the time of a call with growing
numbers of callers."""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import create_server

from rocstar.adapters.sandbox_bench.programs import (
    BODIES,
    FINDS_A_FILE,
    KNOWN,
    LEAVES_A_FILE,
    LEAVES_A_PROCESS,
    PRINTS_FOR_EVER,
    KnownProgram,
    attack,
)
from rocstar.adapters.sandbox_bench.systems import End, Runs, opened

AT_ONCE = 4  # known ends
TRIES = 3  # after a failure of the service to run a program
HELD = KnownProgram("", "print(6 * 7)", "ok", "42", seconds=60.0)
"""A program that a service must still run after an attack."""


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Times of calls, with this many callers at once."""

    p50_ms: float
    p99_ms: float
    calls_a_second: float
    cpu_ms: float
    """CPU of the whole machine per call, since services have many processes; exact if nothing else computes."""
    wrong: int
    """Calls that were answered wrongly."""


@dataclass(slots=True)
class Findings:
    """The findings of one service."""

    right: int = 0
    programs: int = 0
    wrong: list[str] = field(default_factory=list)
    """Name of a program, its known end, and the reported one."""
    held: int = 0
    attacks: int = 0
    got_through: list[str] = field(default_factory=list)
    latency: dict[int, LoadTimes] = field(default_factory=dict)
    """By callers."""

    @property
    def is_well(self) -> bool:
        """No wrong report, and no successful attack."""
        return not (self.wrong or self.got_through or any(load.wrong for load in self.latency.values()))


async def compared(
    systems: Sequence[str],
    asked: Sequence[KnownProgram],
    callers: Sequence[int],
    *,
    token: str,
    attacks: bool,
    calls: int,
    slots: int,
) -> dict[str, Findings]:
    """Measure each system in order, after checking that all are reachable. asked: programs whose expected result is
    that of bare Python; by default those of known ends. calls: least at each number of callers. slots: programs at
    once, of systems that start here. Raises ConfigError, SandboxDown, Unavailable."""
    for system in systems:
        async with opened(system, token, slots) as runs:
            await runs(HELD)
    programs = await with_truth(asked, slots) if asked else KNOWN
    found = {}
    for system in systems:
        async with opened(system, token, slots) as runs:
            found[system] = await measured(runs, programs, callers, attacks=attacks, calls=calls)
    return found


async def with_truth(asked: Sequence[KnownProgram], slots: int) -> list[KnownProgram]:
    """Each with its result in bare Python."""
    async with opened("python", "", slots) as runs:
        reported = await asyncio.gather(*map(runs, asked))
    return [program._replace(ends=said.ends, stdout=said.stdout) for program, said in zip(asked, reported, strict=True)]


def rows(found: Mapping[str, Findings]) -> list[str]:
    """Lines for people: a table, and the names of wrong ends and successful attacks."""
    loads = [f"{count} callers" for count in next(iter(found.values())).latency]
    width = max(map(len, found)) + 1
    lines = ["p50 / p99 / CPU of the whole machine a call, ms", _row(" " * width, "right", "attacks held", *loads)]
    for system, one in found.items():
        times = [f"{load.p50_ms:.1f} / {load.p99_ms:.1f} / {load.cpu_ms:.1f}" for load in one.latency.values()]
        held = f"{one.held} of {one.attacks}" if one.attacks else "not tried"
        lines.append(_row(system.ljust(width), f"{one.right} of {one.programs}", held, *times))
    for system, one in found.items():
        lines += [f"{system}: {said}" for said in (*one.wrong, *(f"got through: {name}" for name in one.got_through))]
        bad = {count: load.wrong for count, load in one.latency.items() if load.wrong}
        lines += [f"{system}: {wrong} calls were answered wrongly at {count} callers" for count, wrong in bad.items()]
    return lines


def _row(system: str, right: str, held: str, *times: str) -> str:
    return f"{system}{right:>10}{held:>14}" + "".join(f"{each:>27}" for each in times)


async def measured(
    runs: Runs, programs: Sequence[KnownProgram], callers: Sequence[int], *, attacks: bool, calls: int
) -> Findings:
    found = Findings(programs=len(programs))
    await _truth(runs, programs, found)
    if attacks:
        await _attacked(runs, found)
    for count in callers:
        found.latency[count] = await _loaded(runs, count, max(calls, count))
    return found


async def _truth(runs: Runs, programs: Sequence[KnownProgram], found: Findings) -> None:
    free = asyncio.Semaphore(AT_ONCE)

    async def ask(program: KnownProgram) -> None:
        async with free:
            for _ in range(TRIES):
                reported = await runs(program)
                if reported.ends != "refused":
                    break
        if is_right(program, reported):
            found.right += 1
        else:
            shown = "other output" if reported.ends == program.ends else reported.ends
            found.wrong.append(f"{program.name}: expected {program.ends}, got {shown}")

    await asyncio.gather(*map(ask, programs))


def is_right(program: KnownProgram, reported: End) -> bool:
    same = reported.stdout.strip() == program.stdout.strip()
    return reported.ends == program.ends and (same or program.ends != "ok")


# -- attacks -----------------------------------------------------------------------------------------------------------


@contextmanager
def _surroundings() -> Iterator[tuple[subprocess.Popen[bytes], dict[str, int | str]]]:
    """A process to be seen and killed, and all that there is: it, a port that listens, and a file to be read."""
    os.environ["ROCSTAR_BENCH_SECRET"] = "x"
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder, closing(create_server(("127.0.0.1", 0))) as listener:
        secret = Path(folder, "secret")
        secret.write_text("x")
        canary = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "rocstar-bench-canary"])
        try:
            yield canary, {"canary": canary.pid, "port": listener.getsockname()[1], "secret": str(secret)}
        finally:
            canary.kill()
            canary.wait()
            del os.environ["ROCSTAR_BENCH_SECRET"]


async def _attacked(runs: Runs, found: Findings) -> None:
    for name in BODIES:
        with _surroundings() as (canary, there):
            reported = await runs(KnownProgram(name, attack(name, **there), "ok", "held", seconds=20.0))  # type: ignore[arg-type]
            killed = canary.poll() is not None
        got = killed or (reported.ends == "ok" and reported.stdout.strip() != "held")
        await _note(runs, found, name, not got)
    reported = await runs(KnownProgram("", PRINTS_FOR_EVER, "failed", seconds=5.0))
    await _note(runs, found, "prints forever", len(reported.stdout) < 2**26)
    mark = f"rocstar-bench-{secrets.token_hex(8)}"
    await runs(KnownProgram("", LEAVES_A_PROCESS.replace("{mark}", mark), "ok"))
    await asyncio.sleep(1.0)
    await _note(runs, found, "leaves a process behind", not _processes(mark))
    await runs(KnownProgram("", LEAVES_A_FILE.replace("{mark}", mark), "ok"))
    left = await runs(KnownProgram("", FINDS_A_FILE.replace("{mark}", mark), "ok"))
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(tempfile.gettempdir(), mark))
    await _note(runs, found, "leaves a file for the next program", left.stdout.strip() != "found")


async def _note(runs: Runs, found: Findings, name: str, held: bool) -> None:
    """An attack counts as held only if the service still runs programs."""
    alive = is_right(HELD, await runs(HELD))
    found.attacks += 1
    found.held += held and alive
    if not (held and alive):
        found.got_through.append(name if not held else f"{name} (no program runs after it)")


def _processes(mark: str) -> list[str]:
    """Of this machine, with that word in their command."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [place.parent.name] if mark in place.read_bytes().decode(errors="replace").split("\0") else []
        except OSError:
            continue
    return found


# -- load --------------------------------------------------------------------------------------------------------------


async def _loaded(runs: Runs, callers: int, calls: int) -> LoadTimes:
    """Each caller sends its next call when the last is answered."""
    seconds: list[float] = []
    wrong, left = 0, iter(range(calls))

    async def caller() -> None:
        nonlocal wrong
        for number in left:
            began = time.perf_counter()
            reported = await runs(KnownProgram("", f"print({number} * 3)", "ok", seconds=60.0))
            seconds.append(time.perf_counter() - began)
            wrong += reported != End("ok", reported.stdout) or reported.stdout.strip() != str(number * 3)

    began, busy = time.perf_counter(), _busy_seconds()
    await asyncio.gather(*(caller() for _ in range(callers)))
    whole, busy = time.perf_counter() - began, _busy_seconds() - busy
    percentiles = statistics.quantiles(seconds, n=100, method="inclusive")
    return LoadTimes(
        p50_ms=round(1000 * percentiles[49], 2),
        p99_ms=round(1000 * percentiles[98], 2),
        calls_a_second=round(calls / whole, 1),
        cpu_ms=round(1000 * busy / calls, 2),
        wrong=wrong,
    )


def _busy_seconds() -> float:
    """CPU seconds of the whole machine, for all processes."""
    user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")
