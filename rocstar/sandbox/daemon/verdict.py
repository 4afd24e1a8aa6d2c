"""From the daemon's observations of a program to the response for its caller. Pure: values in, Response out.

The kernel's facts have priority. The report of the program's own process only distinguishes kinds of failure and shows
the value of its last expression; it may be forged, so every field is bounded, and a report with a field out of bounds
is ignored as a whole.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, json, structs

from rocstar.sandbox.call import Call, Failure, Outcome, ProgramOutcome, Response, ServiceOutcome, failed, fault
from rocstar.sandbox.slot.channel import (
    MAX_FILES_BYTES,
    MAX_IMAGES_BYTES,
    MAX_MESSAGE,
    MAX_TYPE,
    MAX_VALUE_BYTES,
    Ended,
)

MAX_REPORT_BYTES = 256 * 2**10  # of a program
MAX_LONG_REPORT_BYTES = 26 * 2**20  # of a program or a session's cell: value, files, images and head
MAX_HEAD_BYTES = 2**20  # of JSON, mostly paths of files
PNG = b"\x89PNG\r\n\x1a\n"
STARVED = "the machine was busy and gave it hardly any CPU"
CPU_SHARE = 0.5  # of the limit: the kernel enforces it by ticks, which on a busy machine run ahead of the clock

ENDED_BY: dict[str, Outcome] = {
    "wall": ProgramOutcome.WALL_TIMEOUT,
    "output": ProgramOutcome.OUTPUT_LIMIT,
    "memory": ProgramOutcome.MEMORY,
    "processes": ProgramOutcome.SIGNAL,
    "cpu": ProgramOutcome.CPU_TIMEOUT,
    "cancelled": ServiceOutcome.CANCELLED,
}
"""By `Response.kill_reason`."""

Size = Annotated[int, Meta(ge=0, le=2**40)]


class ProgramReport(Struct):
    """Head of the report of a program's process; the announced bytes follow it in this order."""

    exception: tuple[str, str, Annotated[int, Meta(ge=1, le=2**31)] | None] | None = None
    """Type, message, line."""
    value: Size | None = None
    """Bytes of the repr of the last expression that were kept."""
    files: Annotated[list[tuple[str, Size]], Meta(max_length=1_000)] = []
    """Path and size."""
    images: Annotated[list[Size], Meta(max_length=100)] = []
    dropped: Size = 0
    """Bytes of the value that were not kept."""
    status: Annotated[int, Meta(ge=0, le=255)] = 0
    """Exit status that a session's cell would have had."""
    refused: str = ""
    """Why a cell was not run."""


class Seen(NamedTuple):
    """The daemon's observations of a program or a cell."""

    stdout: bytes
    stderr: bytes
    dropped: int
    """Bytes of both streams that were read and not kept."""
    report: bytes
    """The report as received over control, without its length."""
    reason: str
    """Why the program was ended, or which limit it exceeded: a key of ENDED_BY; empty when it ended by itself."""
    run_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_bytes: int = 0
    files: bytes = b""
    """The report with the files; for a cell the same as `report`."""


NOTHING = ProgramReport(status=1)
decode = json.Decoder(ProgramReport).decode


def program(call: Call, seen: Seen, ended: Ended | None) -> Response:
    """The response to a plain call. `ended`: None if the slot did not report the program's end."""
    if seen.reason == "starved":
        return fault(call.id, f"after {seen.run_seconds:.1f} s it had not ended, but {STARVED}")
    report, parts = parse(seen.report)
    if ended is None or (ended.stopped and seen.reason) or seen.reason in ("output", "wall"):
        return response_of(call, seen, report, parts, None)
    code = os.waitstatus_to_exitcode(ended.wait_status)
    # A program can send itself the signal that the kernel sends at the limit.
    spent = ended.own_cpu_seconds >= CPU_SHARE * math.ceil(call.limits.cpu_seconds)
    if spent and not seen.reason and code in (-signal.SIGXCPU, -signal.SIGKILL):
        seen = seen._replace(reason="cpu")
    return response_of(call, seen, report, parts, code)


def cell(call: Call, seen: Seen) -> Response:
    """The response to a cell that reported its end; if its process died, `program` is called instead."""
    if seen.reason == "starved":  # and was interrupted at some place
        return structs.replace(program(call, seen, None), state_lost=True)
    report, parts = parse(seen.report)
    response = response_of(call, seen, report, parts, None if seen.reason else report.status)
    pictures = [("", part) for part in parts[1 + len(report.files) :] if part.startswith(PNG)]
    images = tuple(part for _, part in fitting(pictures, MAX_IMAGES_BYTES))
    return structs.replace(response, images=images) if images else response


def response_of(call: Call, seen: Seen, report: ProgramReport, parts: Sequence[bytes], code: int | None) -> Response:
    """`code`: exit status, or minus the signal; None if the daemon ended the program."""
    # Earlier cells of a session may have made its files impossible to write.
    if code == 1 and report.refused and call.session and (call.files or call.branches):
        return failed(call.id, ProgramOutcome.REJECTED, report.refused[:MAX_MESSAGE])
    failure = None
    if code is not None and code >= 0 and report.exception is not None:  # an exit hook may make the status 0
        kind, message, line = report.exception
        failure = Failure(type=kind[:MAX_TYPE], message=message[:MAX_MESSAGE], line=line)
    value, cut = kept_value(report, parts[0], call) if code == 0 and failure is None else (None, 0)
    return Response(
        id=call.id,
        outcome=outcome(seen.reason, code, failure),
        exit_code=code if code is not None and code >= 0 else None,
        signal=signal_name(-code) if code is not None and code < 0 else None,
        exception=failure,
        stdout=seen.stdout.decode("utf-8", "replace"),
        stderr=seen.stderr.decode("utf-8", "replace"),
        value=None if value is None else value.decode("utf-8", "replace"),
        truncated_bytes=seen.dropped + cut,
        kill_reason=seen.reason,
        run_seconds=seen.run_seconds,
        cpu_seconds=seen.cpu_seconds,
        peak_memory_bytes=seen.peak_memory_bytes,
        files=files(seen.files, call.fetch) if seen.files and call.fetch else {},
    )


def outcome(reason: str, code: int | None, failure: Failure | None) -> Outcome:
    """An exceeded limit has priority over the way in which the program ended."""
    if reason:
        return ENDED_BY[reason]
    if code is None or code < 0:
        return ProgramOutcome.SIGNAL
    if failure is None:
        return ProgramOutcome.EXIT_NONZERO if code else ProgramOutcome.OK
    return ProgramOutcome.MEMORY if failure.type == "MemoryError" else ProgramOutcome.EXCEPTION


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"  # most real-time signals have no names


def parse(report: bytes) -> tuple[ProgramReport, list[bytes]]:
    """Head, and the parts of the tail: the value, files, images; NOTHING as head when it is missing or forged."""
    if not report:
        return NOTHING, [b""]
    head, _, tail = report.partition(b"\n")
    try:
        parsed = decode(head) if len(head) <= MAX_HEAD_BYTES else NOTHING
    except (ValueError, RecursionError):
        return NOTHING, [b""]
    sizes = (parsed.value or 0, *(size for _, size in parsed.files), *parsed.images)
    if sum(sizes) != len(tail):
        return NOTHING, [b""]
    ends = [*accumulate(sizes)]
    return parsed, [tail[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def kept_value(report: ProgramReport, value: bytes, call: Call) -> tuple[bytes | None, int]:
    """The kept part of the value, and the number of dropped bytes. Only a value that fills all its room can have been
    cut, and only from text that fitted into the program's memory."""
    if report.value is None:
        return None, 0
    room = min(call.limits.output_bytes, MAX_VALUE_BYTES)
    if report.value > room:
        return value[:room], report.value - room
    plausible = report.value == room and report.dropped <= call.limits.memory_bytes
    return value, report.dropped if plausible else 0


def files(announced: bytes, fetch: Sequence[str]) -> dict[str, bytes]:
    """The files of a report that are in `fetch`."""
    report, parts = parse(announced)
    named = zip((path for path, _ in report.files), parts[1:], strict=False)
    return dict(fitting([(path, part) for path, part in named if path in fetch], MAX_FILES_BYTES))


def fitting(parts: Iterable[tuple[str, bytes]], room: int) -> Iterator[tuple[str, bytes]]:
    """Those that have room beside the ones before them."""
    for name, part in parts:
        if len(part) <= room:
            yield name, part
            room -= len(part)
