"""Frames and what they carry: nothing is lost on the way, and what no peer of ours would send is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.sandbox import wire
from rocstar.sandbox.call import Call, Failure, Limits, ProgramOutcome, Response, ServiceOutcome
from rocstar.sandbox.wire import MAX_FRAME_BYTES, Frame, FrameReader, Kind

FRAMES = st.lists(
    st.builds(Frame, st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.binary(max_size=50)), max_size=8
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
    [wire.HEADER.pack(MAX_FRAME_BYTES + 1, Kind.CALL, 0), wire.HEADER.pack(0, 99, 0), wire.HEADER.pack(0, 0, 0)],
    ids=["too long", "no kind", "kind 0"],
)
def test_what_is_no_frame_is_refused_and_what_came_before_it_is_taken(data: bytes) -> None:
    frames = FrameReader().feed(wire.pack(Kind.PING, 7) + data)
    assert next(frames) == Frame(Kind.PING, 7, b"")
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
