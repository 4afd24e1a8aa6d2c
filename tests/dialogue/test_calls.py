import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocstar.dialogue.calls import HERMES, render_call

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(deadline=None, max_examples=50)
@given(st.text(), st.dictionaries(st.text(), ANY_JSON))
def test_a_written_call_is_read_back(tool: str, arguments: dict[str, object]) -> None:
    text = render_call(tool, arguments)
    (call,) = HERMES.parse(text)
    assert (call.tool, call.arguments, call.parse_error) == (tool, arguments, None)


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


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("[1]", "expected an object with 'name' and 'arguments'"),
        ('{"arguments": {}}', "'name' is missing"),
        ('{"name": "python"}', "'arguments' is missing"),
        ('{"name": 1, "arguments": {}}', "'name' must be a string"),
        ('{"name": "python", "arguments": "{}"}', "'arguments' must be an object"),
        ('{"name": "python", "arguments": {"code": "a\nb"}}', "Invalid control character"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 10_000, "Exceeds the limit"),
        ("", "Expecting value"),
    ],
)
def test_a_call_that_does_not_parse_says_why(body: str, complaint: str) -> None:
    (call,) = HERMES.parse(f"<tool_call>{body}</tool_call>")
    assert call.parse_error is not None
    assert call.parse_error.startswith("Failed to decode tool call: ")
    assert complaint in call.parse_error


@pytest.mark.parametrize(
    ("hostile", "calls"),
    [
        ("<tool_call>", 1),
        ("<tool_call></tool_call>", 20_000),
        ("</tool_call><tool_call", 0),
        ('<tool_call>"</tool_call>', 10_000),
        ('<tool_call>"\\</tool_call>', 20_000),
        ('<tool_call>{"a":"', 1),
    ],
)
def test_hostile_text_costs_no_more_than_its_length(hostile: str, calls: int) -> None:
    # Work that grows with the square of this text would take many minutes.
    assert len(HERMES.parse(hostile * 20_000)) == calls
