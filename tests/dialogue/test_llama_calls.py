import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocstar.answers.extract import boxed_answer
from rocstar.dialogue.calls import HERMES, LLAMA, TAG, CallSyntax, render_call
from rocstar.dialogue.segments import text_of

ONE = '{"name": "python", "parameters": {"code": "print(6*7)"}}'


@pytest.mark.parametrize("text", [ONE, TAG + ONE + "<|eot_id|>", f"So:\n{ONE}<|eot_id|>", f"\n  {ONE}"])
def test_a_call_is_read_at_the_start_of_a_line_or_behind_the_tag(text: str) -> None:
    (call,) = LLAMA.parse(text, 3)
    assert (call.id, call.tool, call.arguments) == ("call_3", "python", {"code": "print(6*7)"})
    assert call.raw == ONE and call.parse_error is None


@pytest.mark.parametrize("between", ["\n", "; ", ";\n"])
def test_several_calls_keep_their_order(between: str) -> None:
    other = ONE.replace("print(6*7)", "2")
    assert [call.arguments["code"] for call in LLAMA.parse(f"{ONE}{between}{other}<|eot_id|>")] == ["print(6*7)", "2"]


def test_what_is_no_call_is_left_alone() -> None:
    for text in ("The answer is 42.", '{"answer": 42}', "f = {x: {1, 2}}", '{"a": b} and {"c": 1}', ""):
        assert LLAMA.parse(text) == [] and LLAMA.strip(text) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"name": "python", "parameters": {"code": 1', "Expecting"),
        ('{"name": "python", "params": {}}', "'parameters' is missing"),
        ('So {"type": "function", "function": {}}', "'name' is missing"),
        ('I call {"name": "python", "parameters": {"code": "\\sqrt"', "Invalid \\escape"),
        ('{"name": 1, "parameters": {}}', "'name' must be a string"),
        (TAG + "print(1)", "Expecting value"),
        ('{"name": "python", "parameters": ' + "[" * 100_000, "nested too deeply"),
        ('{"name": "python", "parameters": ' + "9" * 10_000, "Exceeds the limit"),
    ],
)
def test_a_call_that_does_not_parse_says_why(text: str, complaint: str) -> None:
    (call,) = LLAMA.parse(text)
    assert call.parse_error is not None and complaint in call.parse_error


@pytest.mark.parametrize("syntax", [HERMES, LLAMA], ids=["hermes", "llama"])
def test_a_written_call_is_read_back_and_stripped(syntax: CallSyntax) -> None:
    arguments = {"code": 'print("é\\n")', "n": [1, {"a b<|im_end|>": None}], "text": "\ufdd00\ufdd0"}
    text = f"So:\n{text_of(syntax.render('python', arguments))}"
    (call,) = syntax.parse(text)
    assert (call.tool, call.arguments, call.parse_error) == ("python", arguments, None)
    assert syntax.strip(f"{text}\nthen") == "So:\n\nthen"


def test_stripping_hermes_calls_leaves_what_stands_around_them() -> None:
    call = render_call("python", {"code": "\\boxed{7}"})
    assert HERMES.strip(f"a{call}b{call}c") == "abc"
    for text, kept in (("a<tool_call>\\boxed{7}", "a"), ("a</tool_call>b", "a</tool_call>b")):
        assert HERMES.strip(text) == kept


BOXED = {"code": "print('\\boxed{5}')"}
ORDERS = [
    {"name": "python", "parameters": BOXED},
    {"name": "python", "arguments": BOXED},
    {"type": "function", "name": "python", "parameters": BOXED},
    {"parameters": BOXED, "name": "python"},
    {"id": 1, "parameters": BOXED, "name": "python"},
]


@pytest.mark.parametrize(
    "before", ["", "Let me call: ", "```json\n", TAG + "\n", "[", TAG + "[", 'It is {"a": b} or {1 ']
)
def test_a_call_is_one_wherever_its_keys_stand_and_whatever_stands_before(before: str) -> None:
    for written in (json.dumps(body, indent=indent) for body in ORDERS for indent in (None, 2)):
        text = f"{before}{written} then"
        (call,) = LLAMA.parse(text)
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


@pytest.mark.parametrize("syntax", [HERMES, LLAMA], ids=["hermes", "llama"])
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", TAG, ONE, '"', "\\", "{", "}", "\n", "x"])).map("".join)
)
def test_a_call_is_read_and_stripped_whatever_its_code_holds(syntax: CallSyntax, code: str) -> None:
    written = text_of(syntax.render("python", {"code": f"{code}\\boxed{{5}}"}))
    (call,) = syntax.parse(f"a{written}b")
    assert call.arguments == {"code": f"{code}\\boxed{{5}}"} and syntax.strip(f"a{written}b") == "ab"


def test_a_closing_tag_in_the_code_of_a_call_closes_nothing() -> None:
    call = '{"name":"python","arguments":{"code":"print(\'</tool_call> \\\\boxed{5}\')"}}'
    for body, complaint in ((call, False), (call[:-1], True)):
        text = f"So <tool_call>\n{body}\n</tool_call> then"
        (found,) = HERMES.parse(text)
        assert (found.parse_error is not None) is complaint
        assert HERMES.strip(text) == "So  then"


@pytest.mark.parametrize(
    "hostile", ['\n{"name":', '{"a":', '{"a": x ', '{"', '{"a":"', '{"a":[1,', TAG, f"{ONE}\n", "\n" + " " * 50]
)
def test_hostile_text_costs_no_more_than_its_length(hostile: str) -> None:
    # Work that grows with the square of this text would not end within the hour.
    LLAMA.parse(hostile * 20_000)
