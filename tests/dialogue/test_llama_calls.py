import pytest

from rocstar.dialogue.calls import HERMES, CallSyntax, render_call
from rocstar.dialogue.llama_calls import LLAMA, TAG
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
    for text in ("The answer is 42.", f"I would write {ONE}", '{"answer": 42}', '{"parameters": {}}', ""):
        assert LLAMA.parse(text) == [] and LLAMA.strip(text) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"name": "python", "parameters": {"code": 1', "Expecting"),
        ('{"name": "python", "arguments": {}}', "'parameters' is missing"),
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


@pytest.mark.parametrize("hostile", ['\n{"name":', TAG, f"{ONE}\n", "\n" + " " * 50])
def test_hostile_text_costs_no_more_than_its_length(hostile: str) -> None:
    # Work that grows with the square of this text would not end within the hour.
    LLAMA.parse(hostile * 20_000)
