"""Small conversations, a small tokenizer, and where the real data are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rocstar.data.sft.build import build
from rocstar.data.sft.check import check
from rocstar.data.sft.format import Chat, Refusal, Refused, conversation_of
from rocstar.data.sft.layouts import LAYOUTS, conversation
from rocstar.data.sft.recipe import MixRecipe
from rocstar.dialogue.template import CHAT
from rocstar.protocols import ToolSpec
from tests.published import DATA

PYTHON = ToolSpec(
    name="python",
    description="Runs a program.",
    parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
    },
}


def user(text: str = "What is the weather in Paris?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str = "It is sunny.") -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def result(text: str = "sunny") -> dict[str, Any]:
    return {"role": "tool", "content": text}


def calls(*arguments: Any, name: str = "get_weather", content: str | None = None) -> dict[str, Any]:
    listed = [{"function": {"name": name, "arguments": one}} for one in arguments or [{"city": "Paris"}]]
    return {"role": "assistant", "content": content, "tool_calls": listed}


def talk(*messages: dict[str, Any], tools: Any = (WEATHER,)) -> Chat:
    return conversation_of({"messages": list(messages), "tools": list(tools)})


def read(layout: str, row: dict[str, Any]) -> Chat:
    """The conversation of a row. Raises Refused."""
    made = conversation(LAYOUTS[layout](PYTHON), row)
    if isinstance(made, Refused):
        raise made
    return made


def built(
    out: Path, *sources: dict[str, Any], environment: Any = None, note: Any = print, **parts: Any
) -> dict[str, Any]:
    """Build a mix; the datasheet."""
    recipe = MixRecipe.model_validate({"source": list(sources), **parts})
    return build(recipe, out, code_tool=PYTHON, environment=environment or {}, note=note)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def real(*parts: str) -> Path:
    """A file of the shared data; skips the test where it is absent."""
    path = DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is absent; set ROCSTAR_DATA to the folder that holds it")
    return path


def shown(conversation: Chat) -> list[tuple[str, Any]]:
    """(role, content or calls) of each message; the conversation must be sound."""
    check(conversation, CHAT.markers)
    return [(str(m.role), list(m.calls) if m.calls else m.content) for m in conversation.messages]


def reason(layout: str, row: dict[str, Any]) -> Refusal:
    """Why a row is refused, by the layout or by the checks after it."""
    with pytest.raises(Refused) as caught:
        check(read(layout, row), CHAT.markers)
    return caught.value.reason
