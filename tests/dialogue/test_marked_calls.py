"""Calls with marks of their own: Mistral's, DeepSeek's, GLM's. Checked against vLLM's own parsers, and through a whole
attempt under templates of the published shapes."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.data.sft.check import check_roles
from rocstar.data.sft.format import conversation_of, message_of
from rocstar.data.sft.render import pieces
from rocstar.dialogue import calls
from rocstar.dialogue.calls import HERMES, LLAMA, XML, Syntax
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.feedback import feedback_text
from rocstar.dialogue.marked_calls import MARKED, turn_of, typed
from rocstar.dialogue.model_template import ModelTemplate, load_model_template
from rocstar.dialogue.segments import text_of, written
from rocstar.errors import ConfigError
from rocstar.protocols import ToolSpec, end_of_answer
from rocstar.rollout.environment import AttemptLimits, Conversation, ToolEnvironment
from rocstar.rollout.episode import run_episode
from rocstar.types import Sampling, Trajectory
from tests.dialogue import published
from tests.dialogue.folders import byte_level, folder_of
from tests.dialogue.vllm_calls import read_by_vllm
from tests.rollout.examples import PROBLEM, QUESTION
from tests.scripted import ScriptedEngine, ScriptedTool

PYTHON = ToolSpec(name="python", description="", parameters={"type": "object", "properties": {"code": {}}})
NAMES = (
    *("mistral", "mistral with ids", "list", "list without ids", "nemo", "nemo without ids"),
    *("deepseek v3", "deepseek v3.1", "glm", "harmony"),
)
SYNTAXES: Mapping[str, Syntax] = dict(zip(NAMES, MARKED, strict=True))
TEMPLATES = {
    "mistral": published.MISTRAL,
    "mistral with ids": published.MISTRAL_IDS,
    "list": published.MISTRAL_LIST.replace("BLANK", " "),
    "nemo": published.MISTRAL_LIST.replace("BLANK", ""),
    "deepseek v3": published.DEEPSEEK,
    "deepseek v3.1": published.DEEPSEEK_31,
    "glm": published.GLM,
    "harmony": published.HARMONY,
}
NONE = "42 [x] <a>"
TWO = [("python", {"code": "print(6*7)"}), ("other", {"a": "1 < 2 {}", "b": "é\n"})]


def read(syntax: Syntax, text: str) -> list[tuple[str, Any]]:
    return [(call.tool, call.parse_error or dict(call.arguments)) for call in syntax.parse(text)]


def loaded(name: str, folder: Path) -> ModelTemplate:
    return load_model_template(folder_of(folder, TEMPLATES[name], bos_token="<s>", eos_token="</s>"), [PYTHON])


@pytest.mark.parametrize("name", NAMES)
def test_a_written_turn_is_read_back_and_stripped(name: str) -> None:
    syntax = SYNTAXES[name]
    text = text_of(turn_of(syntax, [written("So.")], TWO))
    assert read(syntax, text) == TWO and syntax.strip(text).strip() == "So."
    assert [call.id for call in syntax.parse(text + "</s>", 3)] == ["call_3", "call_4"]
    assert read(syntax, text_of(syntax.render(*TWO[1]))) == TWO[1:]
    assert read(syntax, "The answer is 42.") == [] and syntax.strip(NONE) == NONE


def test_a_mark_that_ends_a_message_ends_no_call_within_a_string() -> None:
    said = [
        ("python", {"code": f"print('{mark}')"}) for mark in ("<|call|>", "<|end|>", "<|return|><|start|>assistant")
    ]
    text = text_of(SYNTAXES["harmony"].together(said)) + "<|call|>"
    assert read(SYNTAXES["harmony"], text) == said and SYNTAXES["harmony"].strip(text) == ""
    assert (
        read(SYNTAXES["harmony"], text.replace("json<|message|>", "json<|message|>\n ").replace("}<", "} \n<")) == said
    )


@pytest.mark.parametrize("name", [name for name in NAMES if "deepseek" not in name and name != "glm"])
def test_a_mark_in_a_program_s_text_begins_no_call(name: str) -> None:
    said = [("python", {"code": "print('[TOOL_CALLS]rm[ARGS]{}')"}), TWO[1]]
    text = text_of(SYNTAXES[name].together(said))
    assert read(SYNTAXES[name], text) == said and SYNTAXES[name].strip(text) == ""


@pytest.mark.parametrize("name", ["deepseek v3", "deepseek v3.1", "glm"])
def test_marks_in_a_program_s_text_split_no_call(name: str) -> None:
    syntax = SYNTAXES[name]
    marks = [mark for mark in syntax.reserved if not mark.endswith("arg_value>")]
    said = [("python", {"code": f"print('{mark}')"}) for mark in marks]
    assert read(syntax, text_of(syntax.together(said))) == said


def test_calls_in_a_syntax_without_marks_for_turns_stand_on_lines() -> None:
    assert text_of(turn_of(LLAMA, [written("So.")], TWO)).splitlines()[:2] == ["So.", text_of(LLAMA.render(*TWO[0]))]
    assert text_of(turn_of(HERMES, (), TWO[:1])) == text_of(HERMES.render(*TWO[0]))


@given(st.sampled_from(NAMES), st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text()))
def test_any_arguments_are_read_back(name: str, arguments: dict[str, str]) -> None:
    text = text_of(SYNTAXES[name].render("python", arguments))
    if name != "glm" or not any("<" in value for value in arguments.values()):
        assert read(SYNTAXES[name], text) == [("python", arguments)]


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("mistral", "[TOOL_CALLS]python", "no [ARGS] after the name"),
        ("mistral", '[TOOL_CALLS]python[ARGS]{"code": 1', "Expecting"),
        ("mistral", "[TOOL_CALLS]python[ARGS]" + "[" * 100_000, "nested too deeply"),
        ("mistral", "[TOOL_CALLS]python[ARGS]null", "'arguments' must be an object"),
        ("list", '[TOOL_CALLS] [{"name": "python", "arguments": {}', "Expecting"),
        ("list", '[TOOL_CALLS] {"name": "python"}', "'arguments' is missing"),
        ("list", "[TOOL_CALLS] [1]", "expected an object"),
        ("list", "[TOOL_CALLS]", "Expecting value"),
        ("deepseek v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function", "no <｜tool▁call▁end｜>"),
        ("deepseek v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁call▁end｜>", "no <｜tool▁sep｜>"),
        (
            "deepseek v3.1",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜>",
            "Expecting",
        ),
        ("harmony", " to=functions.python<|channel|>\n<|message|>{}<|call|>", "'name' must be a string"),
        ("harmony", "<|channel|>commentary to=functions.python<|message|>{", "Expecting"),
        ("glm", "<tool_call>python\n<arg_key>code</arg_key>", "no </tool_call>"),
        ("glm", "<tool_call>python\n<arg_key>code</arg_key></tool_call>", "a key without <arg_value>"),
        ("glm", "<tool_call>python<arg_key>a</arg_key><arg_value>1</tool_call>", "a key without <arg_value>"),
        ("glm", '<tool_call>{"name": "python"}</tool_call>', "no name after"),
    ],
)
def test_a_call_that_does_not_parse_says_why(name: str, text: str, found: str) -> None:
    (call,) = SYNTAXES[name].parse(text)
    assert call.parse_error is not None and found in call.parse_error


@pytest.mark.parametrize("name", ["mistral", "list", "deepseek v3", "deepseek v3.1"])
def test_where_a_call_is_no_json_is_told_as_a_place_in_the_call(name: str) -> None:
    whole = text_of(SYNTAXES[name].render("python", {"code": "x"}))
    text = whole[: whole.index('"x"')] + "x" + whole[whole.index('"x"') + 3 :]
    said = [SYNTAXES[name].parse(before + text)[0].parse_error for before in ("", "I think.\nSo: ")]
    assert said[0] is not None and "Expecting value: line 1 column" in said[0] and said[0] == said[1]


@pytest.mark.parametrize("name", ["mistral", "list", "deepseek v3", "deepseek v3.1", "glm", "harmony"])
def test_reading_takes_time_that_grows_with_the_text_alone(name: str) -> None:
    """20,000 of every piece that ends nothing: by the square this would take minutes."""
    syntax = SYNTAXES[name]
    for piece in (*syntax.reserved, *syntax.call, "{", "\n", "".join(syntax.reserved[:1]) * 2 + "{"):
        assert len(syntax.parse(syntax.reserved[0] + piece * 20_000)) <= 40_001


@pytest.mark.parametrize("name", ["mistral", "deepseek v3", "deepseek v3.1", "harmony"])
def test_a_call_that_is_no_json_costs_its_own_length_and_not_that_of_the_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, sizes = json.JSONDecoder(), list[int]()

    def raw_decode(text: str, start: int = 0) -> tuple[Any, int]:
        sizes.append(len(text))
        return decoder.raw_decode(text, start)

    monkeypatch.setattr(calls, "_DECODER", SimpleNamespace(raw_decode=raw_decode))
    broken = text_of(SYNTAXES[name].render("python", {"code": "x"})).replace('"x"', "x")
    assert len(SYNTAXES[name].parse(f"{broken}<|call|>" * 1000)) == 1000 and max(sizes) <= 4096 < len(broken) * 1000


def test_a_fraction_that_begins_with_more_digits_than_an_integer_may_have_is_read() -> None:
    text = "1" * 20_000 + "e-20000"
    assert calls.value_at(text, 0) == (1 / 9, len(text), None)


def name_of(syntax: Syntax) -> str:
    return next(name for name, one in SYNTAXES.items() if one is syntax)


def has_headers(text: str) -> bool:
    """Whether each message of this text in harmony's form has a header."""
    *headers, rest = re.split(r"<\|message\|>.*?(?:<\|(?:end|call|return)\|>|\Z)", text, flags=re.DOTALL)
    name, kind = r" to=functions\.\w+", "(?: [a-z]+)?"
    sound = re.compile(rf"(?:{name})<\|channel\|>[a-z]+{kind}|<\|channel\|>[a-z]+(?:{name}{kind})?")
    begun = ["", *["<|start|>assistant"] * len(headers[1:])]
    each = zip(headers, begun, strict=True)
    return not rest and all(one.startswith(own) and sound.fullmatch(one.removeprefix(own)) for one, own in each)


def garbled(rng: random.Random, syntax: Syntax) -> str:
    """A turn of two calls with some pieces left out and others put in."""
    text = text_of(turn_of(syntax, [written("So.")] * rng.randrange(2), TWO[: rng.randrange(1, 3)]))
    ends = ["<|end|>", "<|call|>", "<|return|>"] if name_of(syntax) == "harmony" else []
    marks = [*syntax.reserved, *ends, "{", "}", ", ", '"', *([] if "｜" in syntax.reserved[0] else ["\n"])]
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text)
    for _ in range(rng.randrange(3)):
        place = rng.randrange(len(parts) + 1)
        parts[place : place + rng.randrange(2)] = [rng.choice([*marks, "python"])] * rng.randrange(2)
    return "".join(parts)


@pytest.mark.parametrize("name", ["mistral", "list", "deepseek v3", "deepseek v3.1", "glm", "harmony"])
def test_calls_are_read_as_vllm_reads_them(name: str) -> None:
    """What we call malformed, and tell the model so, vLLM may take with what is there: those are left out here, and so
    is what vLLM reads worse: line ends amid DeepSeek's JSON, Mistral's mark amid a list, and marks in a string. Of
    harmony's, texts are left out in which a message lacks its header: vLLM finds functions named "," there."""
    rng, syntax = random.Random(0), SYNTAXES[name]
    texts = [garbled(rng, syntax) for _ in range(3_000)]
    theirs = dict(zip(texts, read_by_vllm(name, texts), strict=True))
    clean = [text for text in texts if name != "list" or text.rfind("[TOOL_CALLS]") < text.find("{")]
    clean = [text for text in clean if name != "harmony" or has_headers(text)]
    ours = {text: [list(one) for one in read(syntax, text)] for text in clean}
    sound = {text: calls for text, calls in ours.items() if all(isinstance(each[1], dict) for each in calls)}
    marks = [mark for mark in syntax.reserved if "arg_" not in mark and name != "harmony"]
    whole = {text: calls for text, calls in sound.items() if not any(mark in str(calls) for mark in marks)}
    assert len(whole) > 150 and sum(map(len, whole.values())) > 200
    assert whole == {text: theirs[text] for text in whole}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_of_the_published_shape_is_taken_with_its_calls(name: str, tmp_path: Path) -> None:
    template = loaded(name, tmp_path)
    assert template.calls is SYNTAXES[name] and not template.taught
    assert set(template.calls.reserved) <= set(template.reserved)


def played(
    codec: Codec, template: ModelTemplate, tools: Sequence[ScriptedTool], said: Sequence[str]
) -> tuple[Conversation, Trajectory]:
    """An attempt of a model that says this, turn by turn, and the conversation that it was laid out by."""
    words = partial(feedback_text, max_chars=100, truncate="middle", errors="short")
    talk = Conversation(codec=codec, template=template, tools=tools, feedback=words)
    limits = AttemptLimits(max_response_tokens=2_000, max_turns=5, max_parallel_calls=4)
    sampling = Sampling(max_new_tokens=1, seed=3, stop_token_ids=codec.stop_ids(template))
    environment, engine = ToolEnvironment(PROBLEM, talk, limits, seed=1), ScriptedEngine(codec, said)
    made = run_episode(engine, environment, PROBLEM, index=0, sampling=sampling, session_id="s")
    return talk, asyncio.run(made)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "harmony"])
def test_an_attempt_with_such_calls_learns_from_what_was_sampled_alone(name: str, tmp_path: Path) -> None:
    """Two rounds, the first with two calls: what is learned from is the completions with what ended them, and what
    stands between is the template's."""
    template = loaded(name, tmp_path)
    codec = byte_level(*template.reserved)
    two = [("python", {"code": "print(6*7)"}), ("other", {"code": "1 < 2"})]
    told = [text_of(turn_of(template.calls, (), two)), text_of(template.calls.render(*two[0])), "\\boxed{42}"]
    said = [f"\n<think></think>{text}" if name == "glm" else text for text in told]
    tools = [ScriptedTool(["42", "42"]), ScriptedTool([f"a {template.stop} b"], "other")]
    talk, made = played(codec, template, tools, said)
    completions = [turn.completion.token_ids for turn in made.turns]
    assert [codec.decode(ids) for ids in completions] == [f"{text}{template.stop}" for text in said]
    specs, answers = [tool.spec for tool in tools], [["42", f"a {template.stop} b"], ["42"]]
    around = [talk.ids(part) for part in (template.opening(QUESTION, specs), *map(template.reply, answers))]
    parts = list(zip(around, completions, strict=True))
    assert made.token_ids == tuple(token for pair in parts for ids in pair for token in ids)
    assert made.loss_mask == tuple(bool(n) for pair in parts for n, ids in enumerate(pair) for _ in ids)
    assert made.token_ids.count(codec.token_id(template.stop)) == 3  # that in a tool's output is text


def test_one_call_a_turn_is_made_in_harmony_s_channels(tmp_path: Path) -> None:
    """GPT-OSS's: the template writes calls in one form, and models write both."""
    template = loaded("harmony", tmp_path)
    codec = byte_level(*template.reserved, "<|constrain|>")
    thought = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
    call = f"<|channel|>commentary to=functions.python <|constrain|>json<|message|>{json.dumps(TWO[0][1])}<|call|>"
    written_so = text_of(turn_of(template.calls, [written("So.")], TWO[:1]))
    said = [thought + call, f"{written_so}<|call|>", f"{thought}<|channel|>final<|message|>\\boxed{{42}}<|return|>"]
    _, made = played(codec, template, [ScriptedTool(["42", '"4"<|end|>'])], said)
    assert [[call.tool for call in turn.calls] for turn in made.turns] == [["python"], ["python"], []]
    assert [codec.decode(turn.completion.token_ids) for turn in made.turns] == said
    replied = codec.decode(made.turns[1].reply_ids)
    assert replied == (
        '<|start|>functions.python to=assistant<|channel|>commentary<|message|>"\\"4\\"<|end|>"'
        "<|end|><|start|>assistant"
    )
    assert made.turns[1].reply_ids.count(codec.token_id("<|end|>")) == 1
    assert [template.calls.strip(text) for text in said] == ["So.", "So.", "\\boxed{42}"]
    row = {"messages": [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "42 <|end|>"}]}
    answer = [part for part in pieces(conversation_of(row), template, [PYTHON]) if part.learned]
    assert "".join(part.text for part in answer) == "<|channel|>final<|message|>42 <|end|><|return|>"
    other = ToolSpec(name="other", description="", parameters={"type": "object", "properties": {}})
    with pytest.raises(ConfigError, match="names each result's tool, so give only one"):
        load_model_template(tmp_path, [PYTHON, other])
    with pytest.raises(ConfigError, match=r"does not end what the assistant wrote with <\|return\|>"):
        template.next_question("And 7*8?")


def test_a_second_question_follows_what_ends_an_answer(tmp_path: Path) -> None:
    """GLM's template ends turns with what begins the next one."""
    template = loaded("glm", tmp_path)
    assert (template.stop, end_of_answer(template)) == ("<|observation|>", "<|user|>")
    asked = "\n" + template.preamble + "And 7*8?<|assistant|>"
    assert text_of(template.next_question("And 7*8?")) == asked
    codec = byte_level(*template.reserved)
    talk = Conversation(codec=codec, template=template, tools=[], feedback=str)
    for text in ("\n<think></think>\n42<|user|>", "\n<think></think>\n42"):
        follows = talk.after_tokens(codec.encode(text), "<|user|>", template.next_question("And 7*8?"))
        assert codec.decode(follows) == "<|user|>" * (not text.endswith("|>")) + asked


def test_rows_end_calls_and_answers_as_the_template_does(tmp_path: Path) -> None:
    function = {"name": "python", "arguments": {"code": "6*7"}}
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    results, question = {"role": "tool", "content": "42"}, {"role": "user", "content": "6*7?"}
    row = {"messages": [question, said, results, {"role": "assistant", "content": "42"}]}
    for name in TEMPLATES:
        template = loaded(name, tmp_path / name)
        ends = [part.text for part in pieces(conversation_of(row), template, [PYTHON]) if part.learned][1::2]
        other = {"glm": ["<|observation|>", "<|user|>"], "harmony": ["<|call|>", "<|return|>"]}
        assert ends == other.get(name, [template.stop] * 2)


def test_values_in_tags_get_the_types_of_the_tool_s_schema(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {
        "n": {"type": "integer"},
        "l": {"type": "array"},
        "t": {"type": "string"},
        "o": {},
        "b": {"type": "null"},
    }
    either = {"either": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}
    kinds |= either | {"open": True, "some": {"type": ["integer", "null"]}}
    spec = ToolSpec(name="f", description="", parameters={"type": "object", "properties": kinds})
    given = {
        "n": "3",
        "l": '[1, {"a": 2}]',
        "t": "3",
        "o": "3",
        "b": "so",
        "either": "3",
        "unknown": "3",
        "open": "3",
        "some": "null",
    }
    for syntax in (XML, SYNTAXES["glm"]):
        text = text_of(syntax.render("f", given)) + text_of(syntax.render("g", given))
        first, second = typed(syntax, text, 4, [spec])
        assert first.arguments == given | {"n": 3, "l": [1, {"a": 2}], "some": None} and second.arguments == given
        assert (first.id, second.id) == ("call_4", "call_5")
    assert typed(HERMES, text_of(HERMES.render("f", given)), 0, [spec])[0].arguments == given


@pytest.mark.parametrize("name", [*NAMES, "llama"])
def test_a_malformed_call_in_a_row_s_content_may_have_its_answer(name: str) -> None:
    bad = '{"name": ' if name == "llama" else SYNTAXES[name].turn[0] + SYNTAXES[name].call[0] + "{"
    said = {"role": "assistant", "content": bad}
    row = [{"role": "user", "content": "Q"}, said, {"role": "tool", "content": "bad"}, said | {"content": "42"}]
    check_roles([message_of(message) for message in row])


def test_a_template_that_writes_more_than_the_model_said_is_refused(tmp_path: Path) -> None:
    """Qwen3.8's puts an empty thought before what a model said after its own."""
    source = published.DEEPSEEK_31.replace("{{- m.content or '' }}", "{{- 'Well. ' + (m.content or '') }}")
    with pytest.raises(ConfigError, match=r"rewrites earlier turns .* `rocstar model add-tokens`"):
        load_model_template(folder_of(tmp_path, source), [PYTHON])
