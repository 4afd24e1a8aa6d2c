"""One answer, told piece by piece: what is shown, and that the tokens are those of a rollout."""

from __future__ import annotations

import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.dialogue.codec import Codec
from rocstar.dialogue.model_template import load_model_template
from rocstar.dialogue.tokenizer_files import read_model_files
from rocstar.errors import ContractBroken
from rocstar.serving.agent import Event, Ran, VisibleText, answered
from rocstar.types import Finish, Sampling, Trajectory
from tests.dialogue.folders import LLAMA, LLAMA_MARKERS, PYTHON, byte_level, folder_of
from tests.dialogue.test_marked_calls import loaded
from tests.rollout.examples import ANSWER, CODEC, QUESTION, STOP, TEMPLATE, Endless, attempt, program, roller
from tests.rollout.test_episode import sum_tool
from tests.serving.examples import Piecewise

RUN = program("print(2+3)")
GREEDY = Sampling(max_new_tokens=1, temperature=0.0)


async def events_of(engine: Any) -> list[Event]:
    async with aclosing(answered(roller(engine, verifier=None), QUESTION, None, GREEDY)) as events:  # type: ignore[type-var]
        return [event async for event in events]


async def test_words_calls_and_results_come_in_their_order() -> None:
    events = await events_of(Piecewise([f"Let me add. {RUN}", ANSWER]))
    said = "".join(event for event in events if isinstance(event, str))
    assert said.replace("\n", "") == f"Let me add. {ANSWER}"
    (ran,) = [event for event in events if isinstance(event, Ran)]
    assert (ran.call.arguments, ran.told) == ({"code": "print(2+3)"}, "5")
    first_call = next(place for place, event in enumerate(events) if isinstance(event, Ran))
    assert isinstance(events[0], str) and first_call > 0
    assert isinstance(events[-1], Trajectory)


async def test_a_watched_attempt_has_the_tokens_of_one_that_nobody_watches() -> None:
    replies = [f"Let me add. {RUN}", ANSWER]
    ended = (await events_of(Piecewise(replies)))[-1]
    assert isinstance(ended, Trajectory)
    unwatched = await attempt(list(replies), sum_tool())
    assert ended.token_ids == unwatched.token_ids
    assert ended.turns[0].completion.finish is Finish.STOP


async def test_an_outage_is_told_as_a_fault_and_a_bug_as_itself() -> None:
    ended = (await events_of(Piecewise([RUN])))[-1]
    assert isinstance(ended, Trajectory)
    assert "the script is over" in str(ended.fault)

    class Broken(Piecewise):
        async def generate(self, *_: Any, **__: Any) -> Any:
            raise ContractBroken("a bug")

    with pytest.raises(ContractBroken):
        await events_of(Broken([]))


async def test_whoever_stops_listening_stops_the_engine() -> None:
    import asyncio

    engine = Endless()
    events = answered(roller(engine, verifier=None), QUESTION, None, GREEDY)
    listening = asyncio.ensure_future(anext(events))
    await engine.asked.wait()
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    await events.aclose()  # type: ignore[attr-defined]
    assert engine.cancelled and len(engine.closed) == 1


@given(st.lists(st.sampled_from(["a", "<", "<tool", "<tool_call>", " b\n", RUN, "<|im", "é"]), max_size=8), st.data())
def test_however_it_is_cut_the_text_outside_calls_is_shown_once(parts: list[str], data: st.DataObject) -> None:
    ids = [*CODEC.encode("".join(parts)), STOP]
    visible, shown = VisibleText(CODEC, TEMPLATE), ""
    for end in sorted(data.draw(st.sets(st.integers(1, len(ids)), max_size=5))):
        shown += visible.fresh(ids[:end])
    shown += visible.rest(ids)
    assert shown == visible.fresh(ids) + visible.rest(ids), "the next completion is shown from its beginning"
    assert TEMPLATE.stop not in shown


def test_of_a_harmony_turn_the_answer_is_shown(tmp_path: Path) -> None:
    template = loaded("harmony", tmp_path)
    codec = byte_level(*template.reserved, "</s>")
    call = ' to=functions.python<|channel|>commentary json<|message|>{"code": "1"}<|call|>'
    answer = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    for text, shown in ((call, ""), (answer, "42")):
        visible, ids, told = VisibleText(codec, template), codec.encode(text), ""
        for end in range(1, len(ids) + 1):
            told += visible.fresh(ids[:end])
        assert told + visible.rest(ids) == shown


def test_no_part_of_a_llama_call_is_shown(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LLAMA, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    template, codec = load_model_template(folder, [PYTHON]), byte_level(*LLAMA_MARKERS)
    shown = VisibleText(codec, template)
    ids, told = codec.encode('So. {"name": "python", "parameters": {"code": "1"}}'), ""
    for end in range(1, len(ids) + 1):
        told += shown.fresh(ids[:end])
    assert told + shown.rest(ids) == "So. "


def test_no_token_that_ends_an_answer_is_shown(tmp_path: Path) -> None:
    """GLM's template ends no answer: what ends one is what begins the next turn, one of several tokens."""
    template = loaded("glm", tmp_path)
    other = "<|user|>"
    trained = byte_level(*template.reserved, "</s>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [trained.token_id(other)]}))
    codec = Codec(trained._saved, read_model_files(tmp_path))
    visible, ids = VisibleText(codec, template), codec.encode(f"So 7{other}")
    assert visible.fresh(ids) + visible.rest(ids) == "So 7"
