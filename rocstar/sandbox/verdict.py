"""From what a slot saw to what a caller is told. Pure: bytes in, Response out."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from typing import Any

from rocstar.sandbox import wire
from rocstar.sandbox.slotwire import Answer, Ended
from rocstar.sandbox.wire import Failure, Outcome, ProgramOutcome, Response, ServiceOutcome

ENDED_BY_US: dict[int, Outcome] = {
    Ended.WALL: ProgramOutcome.WALL_TIMEOUT,
    Ended.OUTPUT: ProgramOutcome.OUTPUT_LIMIT,
    Ended.CANCELLED: ServiceOutcome.CANCELLED,
}
PASSED: dict[str, Outcome] = {"memory": ProgramOutcome.MEMORY, "processes": ProgramOutcome.SIGNAL}
KILL_REASON: dict[Outcome, str] = {
    ProgramOutcome.WALL_TIMEOUT: "wall",
    ProgramOutcome.CPU_TIMEOUT: "cpu",
    ProgramOutcome.OUTPUT_LIMIT: "output",
    ServiceOutcome.CANCELLED: "cancelled",
}


def response(request_id: str, answer: Answer, body: bytes, cpu_limit: float, passed: str = "") -> Response:
    """`body`: stdout, stderr, report and files, one after the other. `cpu_limit`: seconds. `passed`: a limit of the
    whole call that others than the slot saw passed (`memory`, `processes`)."""
    middle = answer.stdout_bytes + answer.stderr_bytes
    end = middle + answer.report_bytes
    report = parse_report(body[middle:end])
    failure = parse_failure(report.get("exception"))
    code = os.waitstatus_to_exitcode(answer.wait_status)
    by_itself = answer.ended == Ended.ITSELF
    fate = outcome(answer, code, failure, cpu_limit, passed)
    stdout, stderr = body[: answer.stdout_bytes], body[answer.stdout_bytes : middle]
    return Response(
        id=request_id,
        outcome=fate,
        exit_code=code if code >= 0 and by_itself else None,
        signal=signal_name(-code) if code < 0 and by_itself else None,
        exception=failure if code > 0 else None,
        stdout=text(stdout),
        stderr=text(stderr),
        value=text(value) if code == 0 and (value := report.get("value")) is not None else None,
        truncated_bytes=answer.dropped_stdout + answer.dropped_stderr + int(report.get("dropped", 0)),
        stdout_bytes=answer.stdout_bytes + answer.dropped_stdout,
        stderr_bytes=answer.stderr_bytes + answer.dropped_stderr,
        invalid_utf8=not all(map(is_text, (stdout, stderr, report.get("value") or b""))),
        kill_reason=passed if fate in PASSED.values() and passed else KILL_REASON.get(fate, ""),
        run_seconds=answer.run_seconds,
        cpu_seconds=answer.cpu_seconds,
        peak_memory_bytes=answer.peak_memory_bytes,
        committed=answer.committed,
        files=parse_files(body[end:]),
    )


def outcome(answer: Answer, code: int, failure: Failure | None, cpu_limit: float, passed: str = "") -> Outcome:
    """A limit of the whole call that was passed explains whatever came of it, but for what was wanted from outside and
    for output, which is cut before.

    The kernel's word first (`code`: exit code, or minus the signal); the program's own report only tells kinds of
    failure apart."""
    if passed in PASSED and answer.ended != Ended.OUTPUT:
        return PASSED[passed]
    if answer.ended != Ended.ITSELF:
        return ENDED_BY_US[answer.ended]
    if code == 0:
        return ProgramOutcome.OK
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and answer.cpu_seconds >= cpu_limit):
        return ProgramOutcome.CPU_TIMEOUT
    if code < 0:
        return ProgramOutcome.SIGNAL
    if failure is None:
        return ProgramOutcome.EXIT_NONZERO
    return ProgramOutcome.MEMORY if failure.type == "MemoryError" else ProgramOutcome.EXCEPTION


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"  # real-time signals have no names


def parse_report(report: bytes) -> dict[str, Any]:
    """What the program's process said of itself: `exception`, `value`, `dropped`. Empty when it left none, or a
    forged one that does not parse."""
    head, _, value = report.partition(b"\n")
    try:
        parsed = json.loads(head)
        has_value = bool(parsed["has_value"])
        dropped = max(0, int(parsed["dropped"]))
        said = {"exception": parsed["exception"], "dropped": dropped}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return {}
    return said | ({"value": value} if has_value else {})


def parse_failure(said: object) -> Failure | None:
    if not (isinstance(said, list) and len(said) == 3):
        return None
    kind, message, line = said
    return Failure(type=str(kind), message=str(message), line=line if isinstance(line, int) else None)


def parse_files(packed: bytes) -> Mapping[str, bytes]:
    """The inverse of `fetch.packed`; none where the slot could not send all of it."""
    try:
        return wire.decoded(json.loads(packed)) if packed else {}
    except ValueError:
        return {}


def text(data: bytes) -> str:
    """UTF-8 with lone surrogates kept; where it is neither, the bad bytes are replaced."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")


def is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True
