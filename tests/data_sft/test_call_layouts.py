"""Layouts that hold requests and the calls that answer them, and dialogues without schemas; sound and broken rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rocstar.data.sft.format import Chat, Refusal, Refused
from rocstar.data.sft.layouts import LAYOUTS, LayoutContext, conversation
from rocstar.errors import ConfigError, DataError
from tests.data_sft.support import PYTHON, WEATHER, read, reason, shown, written

PARIS = [("get_weather", {"city": "Paris"})]
ROME = [("get_weather", {"city": "Rome"})]
BOTH = [*PARIS, *ROME]


# xLAM


FLAT = {
    "city": {"type": "str", "description": "Where."},
    "days": {"type": "int, optional", "description": "How long.", "default": 3},
    "unit": {"type": "str", "default": ""},
}


def xlam_row(*answers: Any, parameters: Any = FLAT) -> dict[str, Any]:
    tools = [{"name": "get_weather", "description": "Weather.", "parameters": parameters}]
    return {"id": 0, "query": "Both?", "answers": json.dumps(answers), "tools": json.dumps(tools)}


def test_xlam_rows_become_calls_with_a_schema() -> None:
    conversation = read("xlam", xlam_row(*({"name": n, "arguments": a} for n, a in BOTH)))
    assert shown(conversation) == [("user", "Both?"), ("assistant", BOTH)]
    (tool,) = conversation.tools or ()
    assert tool.parameters["required"] == ["city"]
    assert tool.parameters["properties"]["days"] == {"type": "integer", "description": "How long.", "default": 3}
    assert tool.parameters["properties"]["unit"] == {"type": "string"}


def test_xlam_takes_json_schema_as_well() -> None:
    row = xlam_row({"name": "get_weather", "arguments": {"city": "Paris"}}, parameters=WEATHER["parameters"])
    assert (read("xlam", row).tools or ())[0].parameters["required"] == ["city"]


@pytest.mark.parametrize(
    ("written_as", "value", "kind"),
    [
        ("List[int]", [1, 2], "array"),
        ("Tuple[float, float], optional", [1.5, 2], "array"),
        ("Dict[str, Any], optional", {"a": 1}, "object"),
        ("Union[int, float]", "anything", None),
        ("Callable[[float], float]", "lambda x: x", None),
        ("bool", True, "boolean"),
    ],
)
def test_xlams_python_types_become_kinds_or_stay_open(written_as: str, value: Any, kind: str | None) -> None:
    row = xlam_row({"name": "get_weather", "arguments": {"x": value}}, parameters={"x": {"type": written_as}})
    (tool,) = read("xlam", row).tools or ()
    assert tool.parameters["properties"]["x"].get("type") == kind
    assert ("x" in tool.parameters["required"]) is ("optional" not in written_as)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (xlam_row(), Refusal.NO_ANSWER),
        (xlam_row({"name": "get_weather", "arguments": {}}), Refusal.MISSING_ARGUMENT),
        (xlam_row({"name": "get_weather", "arguments": {"city": "x", "days": "3"}}), Refusal.ARGUMENT_TYPE),
        (xlam_row({"name": "get_weather", "arguments": ["x"]}), Refusal.CALL),
        (xlam_row({"name": "news", "arguments": {}}), Refusal.UNKNOWN_TOOL),
        (xlam_row() | {"answers": "oops"}, Refusal.LAYOUT),
    ],
)
def test_a_broken_xlam_row_is_refused(row: dict[str, Any], expected: Refusal) -> None:
    assert reason("xlam", row) is expected


# Seal-Tools


def seal_files(tmp_path: Path) -> tuple[Path]:
    text = {"type": "str", "description": ""}
    tools = [
        {"api_name": f"get{n}", "api_description": "", "field": "Sports" if n < 6 else "Law",
         "parameters": {"team": text, "year": {"type": "int"}}, "required": ["team"]}
        for n in range(9)
    ]  # fmt: skip
    return (written(tmp_path / "tool.jsonl.gz", *tools),)


def seal_row(*calling: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    called = [{"api": api, "parameters": p, "responses": [f"API_call_{n}"]} for n, (api, p) in enumerate(calling)]
    return {"id": "dev-0", "query": "Go.", "calling": called}


def test_seal_tools_offers_other_tools_of_the_same_field(tmp_path: Path) -> None:
    files, row = seal_files(tmp_path), seal_row(("get0", {"team": "A"}), ("get1", {"team": "B", "year": 1999}))
    conversation = read("seal_tools", row, tool_files=files, other_tools=2, seed=1)
    calls = [("get0", {"team": "A"}), ("get1", {"team": "B", "year": 1999})]
    assert shown(conversation) == [("user", "Go."), ("assistant", calls)]
    offered = {tool.name for tool in conversation.tools or ()}
    assert len(offered) == 4 and {"get0", "get1"} < offered <= {f"get{n}" for n in range(6)}
    assert conversation == read("seal_tools", row, tool_files=files, other_tools=2, seed=1)
    drawn = {
        tuple(t.name for t in read("seal_tools", row, tool_files=files, other_tools=2, seed=n).tools or ())
        for n in range(9)
    }
    assert len(drawn) > 1


def test_a_file_of_tools_with_a_bad_line_ends_everything(tmp_path: Path) -> None:
    tools = written(tmp_path / "a.jsonl", {"api_name": "get", "parameters": {}, "required": []}, "[oops")
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        read("seal_tools", seal_row(), tool_files=(tools,))


def test_seal_tools_rows_that_lack_something_are_refused(tmp_path: Path) -> None:
    files = seal_files(tmp_path)
    chained = seal_row(("get0", {"team": "A"}), ("get1", {"team": "API_call_0"}))
    assert reason("seal_tools", chained, tool_files=files) is Refusal.PLACEHOLDER
    assert reason("seal_tools", seal_row(("gone", {})), tool_files=files) is Refusal.UNKNOWN_TOOL
    assert reason("seal_tools", seal_row(("get0", {})), tool_files=files) is Refusal.MISSING_ARGUMENT
    with pytest.raises(ConfigError, match="needs tool_files"):
        read("seal_tools", chained)


# API-Bank


def api(name: str, taken: Any, output: Any, **written_as: Any) -> dict[str, Any]:
    recorded = {"api_name": name, "input": taken, "output": output, "exception": None}
    return {"role": "API", "api_name": name, "param_dict": written_as or taken, "result": recorded}


def dialogue(*turns: dict[str, Any], file: str = "lv/AddAlarm-Search-level-1-1.jsonl") -> dict[str, Any]:
    return {"file": file, "turns": list(turns)}


ASKS, WAITS, ANSWERS = (
    {"role": "User", "text": "Wake me."},
    {"role": "AI", "text": "Wait."},
    {"role": "AI", "text": "Done."},
)


def bank(tmp_path: Path, *rows: dict[str, Any]) -> list[Chat | Refused]:
    file = written(tmp_path / "bank.jsonl", *rows)
    layout = LAYOUTS["api_bank"](LayoutContext(files=(file,), code_tool=PYTHON))
    return [conversation(layout, row) for row in rows]


def test_api_bank_takes_arguments_as_the_api_took_them_and_schemas_from_the_data(tmp_path: Path) -> None:
    found = {"name": "AddAlarm", "description": "Sets one.", "input_parameters": {"time": {"type": "str"}}}
    rows = (
        dialogue(ASKS, WAITS, api("AddAlarm", {"time": "8", "n": 2}, "ok", time="8", n="2"), ANSWERS),
        dialogue(ASKS, api("AddAlarm", {"time": "9"}, {"id": 1}), api("Search", {"keywords": "x"}, [found]), ANSWERS),
    )  # fmt: skip
    first, second = bank(tmp_path, *rows)
    assert isinstance(first, Chat) and isinstance(second, Chat)
    assert shown(first) == [
        ("user", "Wake me."),
        ("assistant", [("AddAlarm", {"time": "8", "n": 2})]),
        ("tool", "ok"),
        ("assistant", "Done."),
    ]
    assert first.messages[1].content == "Wait."
    assert [role for role, _ in shown(second)] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert shown(second)[2] == ("tool", '{"id": 1}')
    assert [tool.name for tool in first.tools or ()] == ["AddAlarm", "Search"]
    alarm = (first.tools or ())[0]
    assert alarm.description == "Sets one." and alarm.parameters["required"] == ["time"]
    assert alarm.parameters["properties"] == {"time": {"type": "string"}, "n": {"type": "integer"}}


def test_a_result_of_another_call_is_refused(tmp_path: Path) -> None:
    (made,) = bank(tmp_path, dialogue(ASKS, api("AddAlarm", {"time": "8"}, "ok", time="9"), ANSWERS))
    assert isinstance(made, Refused) and made.reason is Refusal.NO_RESULT
