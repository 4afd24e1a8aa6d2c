"""The pure parts, where the whole is too coarse: framing, verdicts, the filter, emptying a folder."""

from __future__ import annotations

import os
import signal
import struct
from pathlib import Path

import pytest

from rocstar.sandbox import rootfs, seccomp, verdict, wire
from rocstar.sandbox.slotwire import Answer, Ended
from rocstar.sandbox.wire import Failure, Isolation, Limits, ProgramOutcome, Request, Response, ServiceOutcome


def answer(status: int = 0, ended: Ended = Ended.ITSELF, *, out: int = 0, report: int = 0, cpu: float = 0.0) -> Answer:
    return Answer(status, ended, True, 0.1, cpu, 0, 0, 0, 0.0, False, out, 0, report, 0)


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        (answer(), ProgramOutcome.OK),
        (answer(3 << 8), ProgramOutcome.EXIT_NONZERO),
        (answer(signal.SIGSEGV), ProgramOutcome.SIGNAL),
        (answer(signal.SIGKILL), ProgramOutcome.SIGNAL),
        (answer(signal.SIGKILL, cpu=2.1), ProgramOutcome.CPU_TIMEOUT),
        (answer(signal.SIGXCPU), ProgramOutcome.CPU_TIMEOUT),
        (answer(signal.SIGKILL, Ended.WALL), ProgramOutcome.WALL_TIMEOUT),
        (answer(signal.SIGKILL, Ended.OUTPUT), ProgramOutcome.OUTPUT_LIMIT),
        (answer(0, Ended.OUTPUT), ProgramOutcome.OUTPUT_LIMIT),
        (answer(signal.SIGKILL, Ended.CANCELLED), ServiceOutcome.CANCELLED),
    ],
)
def test_outcome_follows_the_kernel(given: Answer, outcome: wire.Outcome) -> None:
    response = verdict.response("1", given, b"", cpu_limit=2.0)
    assert response.outcome is outcome


@pytest.mark.parametrize(
    ("given", "passed", "outcome", "reason"),
    [
        (answer(), "memory", ProgramOutcome.MEMORY, "memory"),  # a child was killed, and its parent did not mind
        (answer(signal.SIGKILL), "memory", ProgramOutcome.MEMORY, "memory"),
        (answer(signal.SIGKILL, Ended.WALL), "memory", ProgramOutcome.MEMORY, "memory"),
        (answer(signal.SIGKILL, Ended.CANCELLED), "processes", ProgramOutcome.SIGNAL, "processes"),
        (answer(signal.SIGKILL, Ended.OUTPUT), "memory", ProgramOutcome.OUTPUT_LIMIT, "output"),
    ],
)
def test_a_limit_of_the_whole_call_explains_its_end(
    given: Answer, passed: str, outcome: wire.Outcome, reason: str
) -> None:
    response = verdict.response("1", given, b"", cpu_limit=2.0, passed=passed)
    assert (response.outcome, response.kill_reason) == (outcome, reason)


@pytest.mark.parametrize(
    "report",
    [b"", b"\n", b"{", b"[]\n", b"null\n", b'{"has_value": 1}\n', b'{"exception":1,"has_value":0,"dropped":1e999}\n'],
)
def test_reports_that_make_no_sense_are_ignored(report: bytes) -> None:
    response = verdict.response("1", answer(1 << 8, report=len(report)), report, cpu_limit=1.0)
    assert (response.outcome, response.exception, response.value) == (ProgramOutcome.EXIT_NONZERO, None, None)


def test_requests_and_responses_survive_the_wire() -> None:
    response = Response(
        id="a",
        outcome=ProgramOutcome.EXCEPTION,
        exit_code=0,
        exception=Failure(type="E", message="\ud800", line=None),
        stdout="\0\udfff",
        value="",
        failed_probes=("x",),
    )
    frame = wire.encode_frame(wire.response_message(response))
    reader = wire.FrameReader()
    messages = [message for n in range(len(frame)) for message in reader.feed(frame[n : n + 1])]
    assert [wire.parse_response(message) for message in messages] == [response]
    assert wire.request_message(Request(id="a", code="1", limits=Limits(processes=3)))["processes"] == 3


def test_a_frame_no_peer_of_ours_would_send_is_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        list(wire.FrameReader().feed(struct.pack("!I", 2**32 - 1)))


def test_program_and_service_outcomes_share_no_name() -> None:
    assert not {str(outcome) for outcome in ProgramOutcome} & {str(outcome) for outcome in ServiceOutcome}
    assert Isolation.L1 < Isolation.L2 < Isolation.L3


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_jumps_stay_inside_and_both_machines_have_one(machine: str) -> None:
    for code in (
        seccomp.build(machine, local_sockets=True, own_files=False, slot=1),
        seccomp.build(machine, local_sockets=False, own_files=True, slot=None),
        seccomp.build_without_signals(machine),
    ):
        rows = list(struct.iter_unpack("HBBI", code))
        assert rows[-1][0] == seccomp.RETURN
        assert len(rows) < 4096
        for at, (operation, if_true, if_false, _) in enumerate(rows):
            if operation not in (seccomp.LOAD, seccomp.RETURN):
                assert at + 1 + max(if_true, if_false) < len(rows)


def test_emptying_a_folder_never_follows_links_out_of_it(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (inside / "a/b").mkdir(parents=True)
    os.symlink(outside, inside / "a/link")
    os.symlink(outside / "kept", inside / "file-link")
    os.chmod(inside / "a/b", 0)
    rootfs.empty(str(inside))
    assert list(inside.iterdir()) == []
    assert (outside / "kept").read_text() == "kept"
