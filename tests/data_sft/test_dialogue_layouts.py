"""Layouts that hold whole conversations, on small rows in their published form, sound and broken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rocstar.data.sft.format import Refusal
from tests.data_sft.support import PYTHON, WEATHER, read, reason, shown

PARIS = [("get_weather", {"city": "Paris"})]
ROME = [("get_weather", {"city": "Rome"})]
BOTH = [*PARIS, *ROME]


# ShareGPT


def turns(*said: tuple[str, str], **fields: Any) -> dict[str, Any]:
    spoken = [{"from": speaker, "value": value} for speaker, value in said]
    return {"conversations": spoken, "tools": json.dumps([WEATHER]), **fields}


CALL_PARIS = json.dumps({"name": "get_weather", "arguments": {"city": "Paris"}})
PLAIN_ROME = json.dumps({"name": "get_weather", "arguments": {"city": "Rome"}})
CALL_ROME = json.dumps({"name": "get_weather", "arguments": json.dumps({"city": "Rome"})})


def test_sharegpt_turns_become_messages() -> None:
    row = turns(
        ("human", "Paris?"), ("gpt", "Let me look."), ("function_call", CALL_PARIS), ("observation", "rain"),
        ("function_call", PLAIN_ROME), ("observation", ""),
        ("gpt", "It rains."), ("human", "Thanks."), ("gpt", "Welcome."), system="Be kind.",
    )  # fmt: skip
    conversation = read("sharegpt", row)
    assert conversation.messages[2].content == "Let me look."
    assert shown(conversation) == [
        ("system", "Be kind."), ("user", "Paris?"), ("assistant", PARIS), ("tool", "rain"), ("assistant", ROME),
        ("tool", ""), ("assistant", "It rains."), ("user", "Thanks."), ("assistant", "Welcome."),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "middle",
    [
        [("function_call", CALL_PARIS), ("function_call", CALL_ROME), ("observation", "a"), ("observation", "b")],
        [("function_call", f"[{CALL_PARIS}, {CALL_ROME}]"), ("observation", "a"), ("observation", "b")],
        [("function_call", f"[{CALL_PARIS}, {CALL_ROME}]"), ("observation", '["a", "b"]')],
        [
            ("gpt", f"<tool_call>\n{CALL_PARIS}\n</tool_call>\n<tool_call>{PLAIN_ROME}</tool_call>"),
            ("tool", "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"),
        ],
    ],
    ids=["turns", "list", "listed results", "hermes"],
)  # fmt: skip
def test_several_calls_of_one_turn_are_paired_with_their_results(middle: list[tuple[str, str]]) -> None:
    conversation = read("sharegpt", turns(("human", "Both?"), *middle, ("gpt", "a and b")))
    assert shown(conversation) == [
        ("user", "Both?"), ("assistant", BOTH), ("tool", "a"), ("tool", "b"), ("assistant", "a and b"),
    ]  # fmt: skip


# Glaive


GLAIVE = {
    "system": "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
    + json.dumps(WEATHER, indent=4)
    + "\n"
    + json.dumps({"name": "now", "description": "", "parameters": {}}),
    "chat": 'USER: Paris?\n\n\nASSISTANT: <functioncall> {"name": "get_weather", "arguments": \'{"city": '
    '"Paris"}\'} <|endoftext|>\n\n\nFUNCTION RESPONSE: {"sky": "rain"}\n\n\nASSISTANT: It rains. <|endoftext|>\n\n\n'
    "USER: Ah: well.\n\n\nASSISTANT: Yes. <|endoftext|>",
}


def test_glaive_texts_become_messages_and_tools() -> None:
    conversation = read("glaive", GLAIVE)
    assert shown(conversation) == [
        ("user", "Paris?"), ("assistant", PARIS), ("tool", '{"sky": "rain"}'), ("assistant", "It rains."),
        ("user", "Ah: well."), ("assistant", "Yes."),
    ]  # fmt: skip
    assert [tool.name for tool in conversation.tools or ()] == ["get_weather", "now"]


def test_a_quote_inside_glaives_quoted_arguments_is_kept() -> None:
    chat = 'USER: x\nASSISTANT: <functioncall> {"name": "get_weather", "arguments": \'{"city": "L\\\'Isle"}\'}'
    assert shown(read("glaive", GLAIVE | {"chat": chat}))[1] == ("assistant", [("get_weather", {"city": "L'Isle"})])


# ToolACE


TREND = {"kind": {"type": "string"}, "opts": {"type": "dict"}}
FIND = {"at": {"type": "array"}, "on": {"type": "boolean"}}
ACE_TOOLS = [
    {
        "name": "Market Trends API",
        "description": "",
        "required": None,
        "parameters": {"type": "dict", "properties": TREND, "required": ["kind"]},
    },
    {"name": "geo.find", "parameters": {"type": "dict", "properties": FIND}},
]


def ace(*said: tuple[str, str]) -> dict[str, Any]:
    system = f"You compose functions. Here is a list:\n{json.dumps(ACE_TOOLS)}. \nPut it as [f(x=1)]."
    return {"system": system, "conversations": [{"from": who, "value": value} for who, value in said]}


def test_toolace_calls_are_read_as_python_with_names_that_are_none() -> None:
    calls = "[Market Trends API(kind=\"a (b), 'c'\", opts={'x': [1, -2.5], 'y': null}), geo.find(at=(1, 2), on=true)]"
    results = '[{"name": "Market Trends API", "results": {"up": 1}}, {"name": "geo.find", "results": "here"}]'
    conversation = read(
        "toolace", ace(("user", "Go."), ("assistant", calls), ("tool", results), ("assistant", "Done."))
    )
    assert shown(conversation) == [
        ("user", "Go."),
        ("assistant", [
            ("Market Trends API", {"kind": "a (b), 'c'", "opts": {"x": [1, -2.5], "y": None}}),
            ("geo.find", {"at": [1, 2], "on": True}),
        ]),
        ("tool", '{"up": 1}'), ("tool", "here"), ("assistant", "Done."),
    ]  # fmt: skip


def test_brackets_that_are_no_calls_are_words() -> None:
    assert shown(read("toolace", ace(("user", "Go."), ("assistant", "[I need a city]"))))[1][1] == "[I need a city]"


# Magicoder


def test_magicoders_one_program_becomes_a_call() -> None:
    solution = "Sort it.\n\n```python\nprint(sorted([2, 1]))\n```\nThis prints [1, 2]."
    conversation = read("magicoder", {"lang": "python", "problem": "Sort.", "solution": solution})
    assert shown(conversation)[1] == ("assistant", [("python", {"code": "print(sorted([2, 1]))"})])
    assert conversation.messages[1].content == "Sort it." and conversation.tools == (PYTHON,)
    evol = read("magicoder", {"instruction": "Sort.", "response": "```py\nprint(1)\n```"})
    assert shown(evol)[1] == ("assistant", [("python", {"code": "print(1)"})])


# Chat


def test_chat_layouts_read_their_columns() -> None:
    asks = {"role": "user", "content": "Hi"}
    told = [("user", "Hi"), ("assistant", "Ho")]
    assert shown(read("messages", {"messages": [asks, {"role": "assistant", "content": "Ho"}], "id": 5})) == told
    assert shown(read("pairs", {"prompt": "Hi", "response": "Ho"})) == told
    assert shown(read("pairs", {"instruction": "Add.", "input": "1 2", "output": "3"})) == [
        ("user", "Add.\n\n1 2"), ("assistant", "3"),
    ]  # fmt: skip
    assert shown(read("nemotron", {"input": [asks], "output": "Ho", "system_prompt": "detailed thinking off"})) == told
    assert shown(read("nemotron", {"input": "Hi", "output": "Ho", "system_prompt": "Be."}))[0] == ("system", "Be.")
    assert read("messages", {"messages": [asks, {"role": "assistant", "content": "Ho"}]}).tools == ()


# Rows that cannot be learnt from

BROKEN: dict[str, list[tuple[dict[str, Any], Refusal]]] = {
    "sharegpt": [
        ({"conversations": "no"}, Refusal.LAYOUT),
        ({}, Refusal.LAYOUT),
        ({"conversations": [5]}, Refusal.LAYOUT),
        (turns(("human", "x"), ("gpt", "y"), tools="{oops"), Refusal.TOOLS),
        (turns(("human", "x"), ("narrator", "y")), Refusal.ROLES),
        (turns(("gpt", "y"), ("human", "x")), Refusal.ROLES),
        (turns(("human", "x"), ("function_call", "get_weather(Paris)")), Refusal.CALL),
        (turns(("human", "x"), ("function_call", '{"name": "get_weather"}')), Refusal.CALL),
        (turns(("human", "x"), ("gpt", "<tool_call>{</tool_call>")), Refusal.CALL),
        (turns(("human", "x"), ("function_call", f"[{CALL_PARIS}, {CALL_ROME}]"), ("observation", "5")),
         Refusal.NO_RESULT),
        (turns(("human", "x"), ("function_call", CALL_PARIS), ("gpt", "y")), Refusal.ROLES),
        (turns(("human", "x"), ("function_call", CALL_PARIS.replace("get_", "got_"))), Refusal.UNKNOWN_TOOL),
    ],
    "glaive": [
        ({"chat": "Hello there"}, Refusal.ROLES),
        ({"chat": ""}, Refusal.LAYOUT),
        (GLAIVE | {"chat": "USER: x\nASSISTANT: <functioncall> {oops"}, Refusal.CALL),
        (GLAIVE | {"system": "SYSTEM: functions -\n{oops"}, Refusal.TOOLS),
        (GLAIVE | {"system": "SYSTEM: no functions"}, Refusal.UNKNOWN_TOOL),
    ],
    "toolace": [
        (ace(("user", "x"), ("assistant", "[geo.find(at=[1)]")), Refusal.CALL),
        (ace(("user", "x"), ("assistant", "[geo.find(1)]")), Refusal.CALL),
        (ace(("user", "x"), ("assistant", "[geo.find(at=open('f'))]")), Refusal.CALL),
        (ace(("user", "x"), ("assistant", "[geo.find(at={1, 2})]")), Refusal.CALL),
        (ace(("user", "x"), ("assistant", "[geo.find(**{})]")), Refusal.CALL),
        (ace(("user", "x"), ("assistant", "[geo.find()]"), ("tool", "[1, 2]"), ("assistant", "y")), Refusal.NO_RESULT),
        (ace(("user", "x"), ("assistant", "[Market Trends API()]")), Refusal.MISSING_ARGUMENT),
        (ace(("judge", "x"), ("assistant", "y")), Refusal.ROLES),
        ({"system": "no tools here", "conversations": []}, Refusal.TOOLS),
    ],
    "magicoder": [
        *(({"problem": "Sort.", "solution": solution}, Refusal.CODE) for solution in (
            "no code",
            "```python\n1\n```\n```python\n2\n```",
            "```java\nint x;\n```",
            "```\n1\n```",
            "```python\nprint 1\n```",
        )),
    ],
    "pairs": [({"prompt": "Hi"}, Refusal.ROLES), ({"text": "Hi"}, Refusal.LAYOUT)],
    "nemotron": [
        ({"input": "Hi", "output": "Ho", "reasoning": "on"}, Refusal.REASONING),
        ({"input": "Hi", "output": "<think>x</think>Ho"}, Refusal.REASONING),
        ({"input": 5, "output": "Ho"}, Refusal.LAYOUT),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "row", "expected"), [(layout, *broken) for layout, rows in BROKEN.items() for broken in rows]
)
def test_a_broken_row_is_refused(layout: str, row: dict[str, Any], expected: Refusal) -> None:
    assert reason(layout, row) is expected
