"""Calls between Hermes' tags, and Llama's, which are told by the shape of their JSON: read, written and stripped."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rocstar.answers.extract import boxed_answer
from rocstar.dialogue.calls import HERMES, LLAMA, TAG, CallSyntax, render_call
from rocstar.dialogue.segments import text_of

NAMES: dict[str, CallSyntax] = {"hermes": HERMES, "llama": LLAMA}
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
ODD = {"n": [1, {"a b<|im_end|>": None}], "text": "\ufdd00\ufdd0"}
ONE = '{"name": "python", "parameters": {"code": "print(6*7)"}}'


@settings(deadline=None, max_examples=80)
@given(st.sampled_from([*NAMES]), st.text(), st.dictionaries(st.text(), ANY_JSON))
@example("hermes", "python", ODD)
@example("llama", "python", ODD)
def test_a_written_call_is_read_back(syntax: str, tool: str, arguments: dict[str, object]) -> None:
    (call,) = NAMES[syntax].parse(text_of(NAMES[syntax].render(tool, arguments)))
    assert (call.tool, call.arguments, call.parse_error) == (tool, arguments, None)


@pytest.mark.parametrize("syntax", NAMES.values(), ids=NAMES)
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", TAG, ONE, '"', "\\", "{", "}", "\n", "x"])).map("".join)
)
def test_a_call_is_read_and_stripped_whatever_its_code_holds(syntax: CallSyntax, code: str) -> None:
    written = text_of(syntax.render("python", {"code": f"{code}\\boxed{{5}}"}))
    (call,) = syntax.parse(f"a{written}b")
    assert call.arguments == {"code": f"{code}\\boxed{{5}}"} and syntax.strip(f"a{written}b") == "ab"


@pytest.mark.parametrize(
    ("syntax", "text", "complaint"),
    [
        ("hermes", "<tool_call>[1]</tool_call>", "expected an object with 'name' and 'arguments'"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "'name' is missing"),
        ("hermes", '<tool_call>{"name": "python"}</tool_call>', "'arguments' is missing"),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>', "'name' must be a string"),
        ("hermes", '<tool_call>{"name": "python", "arguments": "{}"}</tool_call>', "'arguments' must be an object"),
        (
            "hermes",
            '<tool_call>{"name": "python", "arguments": {"code": "a\nb"}}</tool_call>',
            "Invalid control character",
        ),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "nested too deeply"),
        ("hermes", f"<tool_call>{'9' * 10_000}</tool_call>", "Exceeds the limit"),
        ("hermes", "<tool_call></tool_call>", "Expecting value"),
        ("llama", '{"name": "python", "parameters": {"code": 1', "Expecting"),
        ("llama", '{"name": "python", "params": {}}', "'parameters' is missing"),
        ("llama", 'So {"type": "function", "function": {}}', "'name' is missing"),
        ("llama", 'I call {"name": "python", "parameters": {"code": "\\sqrt"', "Invalid \\escape"),
        ("llama", '{"name": 1, "parameters": {}}', "'name' must be a string"),
        ("llama", TAG + "print(1)", "Expecting value"),
        ("llama", '{"name": "python", "parameters": ' + "[" * 100_000, "nested too deeply"),
        ("llama", '{"name": "python", "parameters": ' + "9" * 10_000, "Exceeds the limit"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_call_that_does_not_parse_says_why(syntax: str, text: str, complaint: str) -> None:
    (call,) = NAMES[syntax].parse(text)
    assert call.parse_error is not None
    assert call.parse_error.startswith("Failed to decode tool call: ")
    assert complaint in call.parse_error


@pytest.mark.parametrize(
    ("syntax", "hostile", "calls"),
    [
        ("hermes", "<tool_call>", 1),
        ("hermes", "<tool_call></tool_call>", 20_000),
        ("hermes", "</tool_call><tool_call", 0),
        ("hermes", '<tool_call>"</tool_call>', 10_000),
        ("hermes", '<tool_call>"\\</tool_call>', 20_000),
        ("hermes", '<tool_call>{"a":"', 1),
        ("llama", f"{ONE}\n", 20_000),
        *(("llama", piece, None) for piece in ('\n{"name":', '{"a":', '{"a": x ', '{"', '{"a":"', '{"a":[1,', TAG)),
        ("llama", "\n" + " " * 50, 0),
    ],
)
def test_hostile_text_costs_no_more_than_its_length(syntax: str, hostile: str, calls: int | None) -> None:
    """Work that grows with the square of this text would not end within the hour. None: however many there are."""
    found = len(NAMES[syntax].parse(hostile * 20_000))
    assert calls is None or found == calls


# -- between tags ------------------------------------------------------------------------------------------------------


def test_calls_keep_their_order_malformed_ones_included() -> None:
    text = (
        'a<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>b<tool_call>\nnot json\n</tool_call>'
        '<tool_call>\n{\n"name": "python",\n"arguments": {"code": "2\\n3"}\n}\n</tool_call><|im_end|>'
    )
    first, second, third = HERMES.parse(text, first_id=4)
    assert [call.id for call in (first, second, third)] == ["call_4", "call_5", "call_6"]
    assert first.arguments == {"code": "1"} and third.arguments == {"code": "2\n3"}
    assert second.raw == "\nnot json\n" and second.tool == "" and second.arguments == {}
    assert second.parse_error == "Failed to decode tool call: Expecting value: line 2 column 1 (char 1)"


def test_a_tag_that_is_never_closed_is_a_malformed_call_and_one_that_is_never_opened_none() -> None:
    (call,) = HERMES.parse('<tool_call>\n{"name": "python", "arguments": {}}')
    assert call.parse_error == "Failed to decode tool call: no </tool_call> after <tool_call>"
    assert call.raw == '\n{"name": "python", "arguments": {}}'
    assert HERMES.parse("no call</tool_call> here") == []


def test_stripping_hermes_calls_leaves_what_stands_around_them() -> None:
    call = render_call("python", {"code": "\\boxed{7}"})
    assert HERMES.strip(f"a{call}b{call}c") == "abc"
    for text, kept in (("a<tool_call>\\boxed{7}", "a"), ("a</tool_call>b", "a</tool_call>b")):
        assert HERMES.strip(text) == kept


def test_a_closing_tag_in_the_code_of_a_call_closes_nothing() -> None:
    call = '{"name":"python","arguments":{"code":"print(\'</tool_call> \\\\boxed{5}\')"}}'
    for body, complaint in ((call, False), (call[:-1], True)):
        text = f"So <tool_call>\n{body}\n</tool_call> then"
        (found,) = HERMES.parse(text)
        assert (found.parse_error is not None) is complaint
        assert HERMES.strip(text) == "So  then"


# -- by their shape ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", ["\n", "; ", ";\n"])
def test_several_calls_keep_their_order(between: str) -> None:
    other = ONE.replace("print(6*7)", "2")
    assert [call.arguments["code"] for call in LLAMA.parse(f"{ONE}{between}{other}<|eot_id|>")] == ["print(6*7)", "2"]


def test_what_is_no_call_is_left_alone() -> None:
    for text in ("The answer is 42.", '{"answer": 42}', "f = {x: {1, 2}}", '{"a": b} and {"c": 1}', ""):
        assert LLAMA.parse(text) == [] and LLAMA.strip(text) == text


BOXED = {"code": "print('\\boxed{5}')"}
ORDERS = [
    {"name": "python", "parameters": BOXED},
    {"name": "python", "arguments": BOXED},
    {"type": "function", "name": "python", "parameters": BOXED},
    {"parameters": BOXED, "name": "python"},
    {"id": 1, "parameters": BOXED, "name": "python"},
]


@pytest.mark.parametrize(
    "before", ["", "\n  ", "Let me call: ", "```json\n", TAG, TAG + "\n", "[", TAG + "[", 'It is {"a": b} or {1 ']
)
def test_a_call_is_one_wherever_its_keys_stand_and_whatever_stands_before(before: str) -> None:
    for written in (json.dumps(body, indent=indent) for body in ORDERS for indent in (None, 2)):
        text = f"{before}{written} then"
        (call,) = LLAMA.parse(text, 3)
        assert (call.id, call.raw) == ("call_3", written)
        assert (call.tool, call.arguments, call.parse_error) == ("python", BOXED, None)
        assert LLAMA.strip(text) == f"{before.split(TAG)[0]} then" and boxed_answer(LLAMA.strip(text)) is None


def test_a_list_of_calls_is_its_calls() -> None:
    text = json.dumps(ORDERS)
    assert [call.arguments for call in LLAMA.parse(text)] == [BOXED] * len(ORDERS)
    assert LLAMA.strip(text) == "[" + ", " * (len(ORDERS) - 1) + "]"


@pytest.mark.parametrize("missing", [1, 2, 3])
@pytest.mark.parametrize("body", ORDERS[:4], ids=lambda body: ",".join(body))
def test_no_answer_is_read_from_a_broken_call(body: dict[str, object], missing: int) -> None:
    text = "I call " + json.dumps(body)[:-missing]
    (call,) = LLAMA.parse(text)
    assert call.parse_error is not None and LLAMA.strip(text) == "I call "
