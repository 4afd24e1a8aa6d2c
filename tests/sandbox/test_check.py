"""Frames, and the calls in them: nothing is lost on the way; what cannot be run is refused with a sentence, before
anything of it runs, and holds nobody up."""

from __future__ import annotations

import reprlib
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack, structs

from rocstar.sandbox import check, wire
from rocstar.sandbox.call import MAX_OUTPUT_BYTES, Call, Failure, Limits, ProgramOutcome, Response, ServiceOutcome
from rocstar.sandbox.wire import MAX_FRAME_BYTES, Frame, FrameKind, FrameReader
from tests.sandbox.driver import Daemon, needs_empty_folder

NAN, INFINITE = float("nan"), float("inf")
LIMITS: dict[str, list[float]] = {
    "wall_seconds": [0, -1, 0.001, NAN, INFINITE, -INFINITE, 1e300],
    "cpu_seconds": [0, -1, 0.001, NAN, INFINITE, 1e300],
    "memory_bytes": [0, -1, 1, 2**20, 2**41, 2**63 - 1],
    "output_bytes": [0, -1, MAX_OUTPUT_BYTES + 1, 2**62],
    "processes": [0, -1, 2**20],
}
PATHS = ["", ".", "/", "/etc/passwd", "..", "../x", "a/../b", "a/..", "a/", "a/.", "x\0y", "n" * 256, "é" * 128]
PATHS += ["a/" * 60 + "b", "/".join(["n" * 200] * 21)]
FILES: list[dict[str, bytes]] = [
    *({path: b""} for path in PATHS),
    {"a": b"", "a/b": b""},
    {"a/b/c": b"", "a/b": b""},
    {"a": b"", "./a": b""},
    {"a/b": b"", "a//b": b""},
    {".stdin": b""},
    {f"{n}": b"" for n in range(1001)},
    {f"{n}/{n}/f": b"" for n in range(500)},
    {f"{n:04}{'x' * 200}": b"" for n in range(600)},
    {"f": bytes(48 * 2**20 + 1)},
]
CALLS: list[dict[str, Any]] = [
    *({"limits": Limits(**{name: value})} for name, values in LIMITS.items() for value in values),  # type: ignore[arg-type]
    *({"files": files} for files in FILES),
    *({"fetch": (path,)} for path in PATHS),
    {"fetch": tuple(map(str, range(1001)))},
    {"fetch": ("x" * 255,) * 500},
    {"code": "x" * (16 * 2**20 + 1)},
    {"stdin": "x" * (48 * 2**20 + 1)},
    {"stdin": "x" * 2**20, "limits": Limits(memory_bytes=2**22)},
    {"id": "x" * 10_001},
    *({"patience_seconds": seconds} for seconds in (-1.0, NAN, INFINITE)),
    {"cell": 1},
    {"session": "s" * 201, "cell": 1},
    {"session": "s"},
    {"session": "s", "cell": -1},
    {"session": "s", "cell": 1, "stdin": "x"},
]
DEFAULT = structs.asdict(Limits())
GOOD: dict[str, Any] = {"id": "1", "code": "print('ran')"}
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "negative numbers": b"\xff" * 100,
    "deep": b"\x91" * 100_000,
    "deep in an unknown field": b"\x81\xa1x" + b"\x91" * 100_000 + b"\x90",
    "an array": msgpack.encode([1, 2]),
    "without code": msgpack.encode({"id": "1"}),
    "without an id": msgpack.encode({"code": "1"}),
    "half a call": msgpack.encode(GOOD)[:-1],
    "a byte behind it": msgpack.encode(GOOD) + b"x",
    "code that is no text": b"\x82\xa2id\xa1x\xa4code\xa3\xed\xa0\x80",
    **{f"{name} 7": msgpack.encode(GOOD | {name: 7}) for name in ("id", "code", "stdin", "limits", "files", "fetch")},
    **{f"{name} x": msgpack.encode(GOOD | {name: "x"}) for name in ("seed", "limits", "patience_seconds", "cell")},
    **{f"{name} null": msgpack.encode(GOOD | {name: None}) for name in ("code", "stdin", "files", "limits", "cell")},
    "half a byte of memory": msgpack.encode(GOOD | {"limits": {"memory_bytes": 1.5}}),
    "text for a file's bytes": msgpack.encode(GOOD | {"files": {"a": "text"}}),
    "a number for a path": msgpack.encode(GOOD | {"fetch": [1]}),
}
"""What is no call at all."""


def shown(fields: dict[str, Any]) -> str:
    """The name of a case: its first field, and of limits the one that is wrong."""
    name, value = next(iter(fields.items()))
    wrong = (
        value if name != "limits" else {key: one for key, one in structs.asdict(value).items() if one != DEFAULT[key]}
    )
    return f"{name} {reprlib.repr(wrong)}"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as started:
        yield started


@pytest.mark.parametrize("fields", CALLS, ids=shown)
def test_a_call_that_cannot_be_run_is_refused_with_a_sentence(daemon: Daemon, fields: dict[str, Any]) -> None:
    call = Call(**GOOD | fields)
    response = daemon.answer(daemon.submit_body(wire.encode(call)))
    assert (response.id, response.outcome, response.stdout) == (call.id, ProgramOutcome.REJECTED, "")
    assert len(response.message.split()) > 3 and len(response.message) < 1500


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_what_is_no_call_is_refused_under_its_number(daemon: Daemon, body: bytes) -> None:
    response = daemon.answer(daemon.submit_body(body))
    assert (response.id, response.outcome) == ("", ProgramOutcome.REJECTED)
    assert response.message.startswith("the call cannot be read")


def many(name: str, count: int, entry: bytes) -> bytes:
    """A call whose field announces and has so many entries."""
    kind = b"\xdf" if name == "files" else b"\xdd"
    field = msgpack.encode(name) + kind + count.to_bytes(4, "big") + entry * count
    return b"\x83" + b"".join(msgpack.encode(part) for pair in GOOD.items() for part in pair) + field


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (many("files", 3_000_000, b"\xa1f\xc4\x00"), "`object` of length <= 10000 - at `$.files`"),
        (many("fetch", 10_000_000, b"\xa1f"), "`array` of length <= 10000 - at `$.fetch`"),
        (b"\xdf\x00\x50\x00\x00" + b"\xa1a\x01" * 5_242_880, "the call has 5242880 fields; there are only"),
        (
            b"\x84" + many("files", 1_000_000, b"\xa1f\xc4\x00")[1:] + msgpack.encode("files") + b"\x80",
            "`object` of length <= 10000 - at `$.files`",
        ),
    ],
    ids=["files", "fetch", "fields", "twice"],
)
def test_millions_of_entries_are_refused_before_they_are_built(daemon: Daemon, body: bytes, told: str) -> None:
    response = daemon.answer(daemon.submit_body(body))
    assert (response.outcome, told in response.message) == (ProgramOutcome.REJECTED, True), response
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"fields|length"):
        wire.decode_call(body)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@needs_empty_folder
def test_the_largest_calls_are_run(daemon: Daemon) -> None:
    folders = {f"{n % 400}/{n}": b"x" for n in range(1000)}
    response = daemon.run("import os\nsum(len(files) for _, _, files in os.walk('.'))", files=folders)
    assert response.value == "1000", response
    files = {"large": bytes(20 * 2**20)}
    response = daemon.run(
        "import os, sys\nos.path.getsize('large'), len(sys.stdin.read())", files=files, stdin="é" * 10**6
    )
    assert response.value == f"({20 * 2**20}, 1000000)", response


@pytest.mark.parametrize("name", LIMITS)
def test_the_smallest_limits_start_a_program(daemon: Daemon, name: str) -> None:
    response = daemon.run("import os\nos.write(1, b'x');", **{name: check.BOUNDS[name][0]})
    if name == "wall_seconds":
        assert response.outcome in (ProgramOutcome.OK, ProgramOutcome.WALL_TIMEOUT)
    else:
        assert (response.outcome, response.stdout) == (ProgramOutcome.OK, "x"), response


FRAMES = st.lists(
    st.builds(Frame, st.sampled_from(FrameKind), st.integers(0, 2**64 - 1), st.binary(max_size=50)), max_size=8
)


@given(FRAMES, st.lists(st.integers(0, 500)))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(frames: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(wire.pack(*frame) for frame in frames)
    edges = [0, *sorted(cuts), len(stream)]
    reader = FrameReader()
    found = [frame for a, b in pairwise(edges) for frame in reader.feed(stream[a:b])]
    assert found == frames


@pytest.mark.parametrize(
    "data",
    [wire.HEADER.pack(MAX_FRAME_BYTES + 1, FrameKind.CALL, 0), wire.HEADER.pack(0, 99, 0), wire.HEADER.pack(0, 0, 0)],
    ids=["too long", "no kind", "kind 0"],
)
def test_what_is_no_frame_is_refused_and_what_came_before_it_is_taken(data: bytes) -> None:
    frames = FrameReader().feed(wire.pack(FrameKind.PING, 7) + data)
    assert next(frames) == Frame(FrameKind.PING, 7, b"")
    with pytest.raises(ValueError):
        next(frames)


def test_calls_and_responses_survive_the_wire() -> None:
    call = Call(id="é", code="1", limits=Limits(wall_seconds=2.0), files={"a": bytes(range(256))}, session="s", cell=3)
    assert wire.decode_call(wire.encode(call)) == call
    failure = Failure(type="E", message="\0", line=None)
    response = Response(id="x", outcome=ProgramOutcome.EXCEPTION, exception=failure, images=(b"\xff",), value="")
    assert wire.decode_response(wire.encode(response)) == response
    overloaded = wire.decode_response(wire.encode(Response(id="x", outcome=ServiceOutcome.OVERLOADED)))
    assert overloaded.outcome is ServiceOutcome.OVERLOADED


def test_program_and_service_outcomes_share_no_name() -> None:
    assert not {*ProgramOutcome} & {*ServiceOutcome}


@pytest.mark.parametrize(("name", "which", "letter", "own"), check.HARD_LIMITS)
def test_limits_beyond_those_of_this_user_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, which: int, letter: str, own: int
) -> None:
    hard = own + {"processes": 100, "memory_bytes": 2**30, "cpu_seconds": 300}[name]
    monkeypatch.setattr("resource.getrlimit", lambda asked: (hard, hard) if asked == which else (-1, -1))
    assert not check.complaint(Call(id="a", code="", limits=Limits(**{name: hard - own})))
    told = check.complaint(Call(id="a", code="", limits=Limits(**{name: hard - own + 1})))
    assert f"limit {name} is {hard - own + 1}, and of the {hard}" in told and f"(ulimit -H{letter})" in told
