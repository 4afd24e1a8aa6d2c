"""Layouts that hold requests and the calls that answer them; sound and broken rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rocstar.data.sft.format import Refusal
from tests.data_sft.support import WEATHER, read, reason, shown

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
