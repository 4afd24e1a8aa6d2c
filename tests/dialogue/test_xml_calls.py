"""Calls as Qwen3.5 writes them: a tag for the function, one for each argument."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.dialogue.calls import XML
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.templates import template_for
from rocstar.protocols import ToolSpec
from tests.dialogue.folders import THINKING, folder_of
from tests.dialogue.vllm_calls import read_by_vllm

ONE = "<tool_call>\n<function=python>\n<parameter=code>\nprint(6*7)\n</parameter>\n</function>\n</tool_call>"
PYTHON = ToolSpec(name="python", description="", parameters={"type": "object", "properties": {"code": {}}})


def read(text: str) -> list[tuple[str, Any]]:
    return [(call.tool, call.parse_error or dict(call.arguments)) for call in XML.parse(text)]


@pytest.mark.parametrize(
    "text", [ONE, f"So:\n\n{ONE}<|im_end|>", ONE.replace("\n</tool_call>", ""), ONE.removeprefix("<tool_call>\n")]
)
def test_a_call_is_read_with_its_outer_tags_or_without(text: str) -> None:
    (call,) = XML.parse(text, 3)
    assert (call.id, call.tool, call.arguments) == ("call_3", "python", {"code": "print(6*7)"})
    assert call.raw == ONE[len("<tool_call>\n") : -len("\n</tool_call>")] and call.parse_error is None


def test_several_calls_keep_their_order_and_what_stands_around_them_is_left() -> None:
    other = ONE.replace("print(6*7)", "a\n\n<b>")
    assert read(f"{ONE}\n{other}") == [("python", {"code": "print(6*7)"}), ("python", {"code": "a\n\n<b>"})]
    assert XML.strip(f"So:\n{ONE}\nthen {other}.") == "So:\n\nthen ."
    none = "x <b> y </function> </tool_call>"
    assert read(none) == [] and XML.strip(none) == none


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<tool_call>\n</tool_call>", "no <function=NAME>"),
        ('<tool_call>{"name": "python"}</tool_call> x', "no <function=NAME>"),
        ("<tool_call>", "no <function=NAME>"),
        ("<tool_call>\n<function=python>\n<parameter=code>\n1", "no </function> after <function="),
        ("<function=f</function>", "no name between"),
        ("<function=></function>", "no name between"),
    ],
)
def test_a_call_that_does_not_parse_says_why(text: str, found: str) -> None:
    (call,) = XML.parse(text)
    assert call.parse_error is not None and found in call.parse_error


def test_a_value_ends_where_the_next_one_begins_and_a_call_at_its_first_end() -> None:
    assert read("<function=f><parameter=a>1<parameter=b>\n\n2\n\n</parameter></function>") == [
        ("f", {"a": "1", "b": "\n2\n"})
    ]
    assert read("<function=f><parameter=a>x</function>y</parameter></function>") == [("f", {})]


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text()), st.text("ab\n <>/"))
def test_a_written_call_is_read_back(arguments: dict[str, str], around: str) -> None:
    text = around + text_of(XML.render("python", arguments))
    if not any("<" in value for value in arguments.values()) and "<" not in around:
        assert read(text) == [("python", arguments)]
    XML.parse(around * 3 + text + around)


@pytest.mark.parametrize(
    "pieces", ["<tool_call>", "<tool_call></tool_call>", "<function=f>", "<function=f></function>", "<parameter=", "< "]
)
def test_reading_takes_time_that_grows_with_the_text_alone(pieces: str) -> None:
    """50,000 tags that close nothing: by the square this would take minutes."""
    for text in (pieces * 50_000, f"<function=f>{pieces * 50_000}</function>"):
        assert len(XML.parse(text)) <= 50_000


PIECES = (
    *ONE.splitlines(),
    "<function=",
    "</function>",
    "<parameter=a>",
    "< parameter = b >",
    "</ parameter>",
    ">",
    "<",
)


def garbled(rng: random.Random) -> str:
    """Two calls with some pieces left out and others put in."""
    parts = [*ONE.splitlines(keepends=True)] * rng.randrange(1, 3)
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(parts))
        parts[place : place + rng.randrange(2)] = [rng.choice(PIECES)] * rng.randrange(2)
        parts = parts or [""]
    return "".join(parts)


def test_calls_are_read_as_vllm_reads_them() -> None:
    """What we call malformed, and tell the model so, vLLM may take with what is there: those are left out here."""
    rng = random.Random(0)
    texts = [garbled(rng) for _ in range(3_000)]
    theirs = dict(zip(texts, read_by_vllm("", texts), strict=True))
    ours = {text: [list(one) for one in read(text)] for text in texts}
    whole = {text: calls for text, calls in ours.items() if all(isinstance(each[1], dict) for each in calls)}
    assert len(whole) > 300 and sum(map(len, whole.values())) > 300
    assert whole == {text: theirs[text] for text in whole}


def test_a_model_s_own_template_with_such_calls_is_taken(tmp_path: Path) -> None:
    """Those that models come with: tests/adapters/test_trl_templates.py."""
    json_call = """            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + "}\\n</tool_call>" }}
"""
    assert json_call in THINKING
    xml = THINKING.replace(
        json_call,
        """            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<parameter=' + key + '>\\n' + value + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
""",
    )
    template = template_for("model", folder_of(tmp_path, xml), [PYTHON])
    assert template.calls is XML and template.reserved[1:3] == ("<tool_call>", "</tool_call>")
