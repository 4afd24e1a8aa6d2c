"""What a caller is told, from what was seen: the kernel's word first, the program's own within bounds."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import structs

from rocstar.sandbox import wire
from rocstar.sandbox.call import Call, Limits, ProgramOutcome, Response, ServiceOutcome
from rocstar.sandbox.daemon import verdict, watch
from rocstar.sandbox.daemon.verdict import Seen
from rocstar.sandbox.daemon.worker import RunningCall
from rocstar.sandbox.slot.channel import Ended

CALL = Call(id="1", code="", limits=Limits(output_bytes=1000, cpu_seconds=2.0, wall_seconds=1.0), fetch=("a", "b"))
SEEN = Seen(stdout=b"", stderr=b"", dropped=0, report=b"", reason="")
ENDED = Ended(0, False, False, 0.5, 0.25, 0.25, 1.0, 10**6, True)


def told(report: bytes = b"", *, status: int = 0, reason: str = "", stopped: bool = False, **ended: float) -> Response:
    """Of a program whose slot reported this wait status; what is told must fit into a frame."""
    seen = SEEN._replace(report=report, reason=reason)
    response = verdict.program(CALL, seen, ENDED._replace(wait_status=status, stopped=stopped, **ended))
    assert wire.decode_response(wire.encode(response)) == response
    return response


def report(tail: bytes = b"", **head: object) -> bytes:
    return json.dumps(head).encode() + b"\n" + tail


FORGED = {
    "no JSON": b"garbage\n",
    "no object": b"[1, 2]\n",
    "no text": b"\xff\xfe\n",
    "huge integer": b'{"dropped": ' + b"9" * 5000 + b"}\n",
    "integer beyond 64 bits": b'{"dropped": 99999999999999999999}\n',
    "negative": b'{"dropped": -1}\n',
    "NaN": b'{"dropped": NaN}\n',
    "infinite": b'{"dropped": 1e999}\n',
    "fraction": b'{"value": 0.5}\n',
    "value longer than the tail": report(b"1", value=2),
    "value shorter than the tail": report(b"123", value=2),
    "sizes that overflow": report(b"", value=2**40, files=[["a", 2**40]]),
    "exception of two": report(exception=["E", "m"]),
    "exception without text": report(exception=[1, 2, 3]),
    "exception's huge line": b'{"exception": ["E", "m", ' + b"9" * 40 + b"]}\n",
    "half a character": b'{"exception": ["E", "\\ud800", 1]}\n',
    "deep": b'{"x": ' + b"[" * 100_000,
    "long head": b'{"x": "' + b"x" * 2**21 + b'"}\n',
    "many files": report(files=[["a", 0]] * 1001),
}


def test_a_program_that_the_machine_kept_from_a_cpu_is_a_fault_of_ours_and_no_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert told(reason="starved").outcome is ServiceOutcome.INTERNAL
    cell = verdict.cell(CALL, SEEN._replace(reason="starved"))
    assert (cell.outcome, cell.state_lost) == (ServiceOutcome.INTERNAL, True)
    slot: Any = SimpleNamespace(process=1, cpu_seconds=0.0, fair_share=1.0)
    monkeypatch.setattr(watch, "descendants", lambda process: [2])
    for waited, cpu, starved in ((3.0, 0.1, True), (1.5, 0.1, False), (3.0, 1.2, False), (3.0, 3.9, False)):  # of 4 s
        monkeypatch.setattr(watch, "content", lambda pid, name, waited=waited: f"0 {waited * 1e9:.0f} 1")
        monkeypatch.setattr(watch, "cpu_seconds", lambda pid, cpu=cpu, with_children=False: cpu * (pid == 2))
        assert watch.Waits(slot).are_long(4.0) is starved
        assert watch.Waits(slot).for_others(4.0) == waited * (cpu < 3.9)  # its own processes have a whole CPU
    monkeypatch.setattr(watch, "descendants", lambda process: [2, 3])  # and a child that it has not waited for
    assert watch.Waits(slot, notebook=2).for_others(9.0) == 0.0  # an earlier cell's


@pytest.mark.parametrize(("waited", "seconds"), [(0.0, 1.0), (0.05, 1.0), (1.0, 2.0), (9.0, 4.0)])
def test_the_time_that_a_program_waits_for_a_cpu_is_no_part_of_its_wall_time(waited: float, seconds: float) -> None:
    slot = Mock()
    run = RunningCall(CALL, slot, [(Mock(), 0.0)], Mock())
    run.waits = Mock(for_others=lambda age: waited)
    run.begin(Mock())
    while not run.reason:
        run.on_timer()
    *ticks, _ = [call.args[0] for call in slot.loop.call_later.call_args_list]
    assert sum(ticks) == pytest.approx(seconds)


@pytest.mark.parametrize("body", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("status", [0, 3 << 8])
def test_a_report_that_cannot_be_is_as_none(body: bytes, status: int) -> None:
    assert told(body, status=status) == told(status=status)
    assert verdict.cell(CALL, SEEN._replace(report=body)).outcome is ProgramOutcome.EXIT_NONZERO


@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGKILL])
def test_the_signal_of_the_cpu_limit_counts_only_when_it_was_reached(number: int) -> None:
    response = told(status=number, own_cpu_seconds=2.01)
    assert (response.outcome, response.kill_reason) == (ProgramOutcome.CPU_TIMEOUT, "cpu")
    assert told(status=number, own_cpu_seconds=0.1, cpu_seconds=9.0).outcome is ProgramOutcome.SIGNAL


def test_a_reported_exception_is_a_failure_whatever_an_exit_hook_made_of_the_status() -> None:
    body = report(exception=["ValueError", "x" * 5000, 3])
    failed = told(body, status=1 << 8)
    assert failed.exception is not None
    assert (failed.exception.type, len(failed.exception.message), failed.exception.line) == ("ValueError", 2000, 3)
    assert told(body) == structs.replace(failed, exit_code=0)
    assert told(report(exception=["MemoryError", "", None]), status=1 << 8).outcome is ProgramOutcome.MEMORY


@pytest.mark.parametrize(
    ("size", "dropped", "kept", "truncated"),
    [(10, 0, 10, 0), (10, 500, 10, 0), (1000, 500, 1000, 500), (1000, 2**39, 1000, 0), (1500, 0, 1000, 500)],
)
def test_a_truncation_counts_only_where_there_can_have_been_one(
    size: int, dropped: int, kept: int, truncated: int
) -> None:
    response = told(report(b"v" * size, value=size, dropped=dropped))
    assert (len(response.value or ""), response.truncated_bytes) == (kept, truncated)


def test_files_are_those_that_were_asked_for_and_as_much_as_is_allowed() -> None:
    large = verdict.MAX_FILES_BYTES
    body = report(b"1" + bytes(large) + b"22", files=[["c", 1], ["a", large], ["b", 2]])
    assert verdict.program(CALL, SEEN._replace(files=body), ENDED).files == {"a": bytes(large)}


def test_images_are_png_and_nothing_else() -> None:
    png = verdict.PNG + b"data"
    body = report(b"v" + png + b"GIF89a", value=1, images=[len(png), 6], status=0)
    response = verdict.cell(CALL, SEEN._replace(report=body))
    assert (response.images, response.value) == ((png,), "v")


def test_only_a_cell_with_files_can_be_refused_by_its_own_process() -> None:
    body = report(refused="no room", status=1)
    cell = Call(id="1", code="", files={"f": b""}, session="s", cell=2)
    assert verdict.cell(cell, SEEN._replace(report=body)).message == "no room"
    assert told(body, status=1 << 8).outcome is ProgramOutcome.EXIT_NONZERO
