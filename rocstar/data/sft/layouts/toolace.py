"""ToolACE: `system` with the tools as a JSON list in running text, `conversations` whose calls are Python-like.

    assistant  [Market Trends API(trend_type="MARKET_INDEXES", country="us"), newAddress(city="Paris")]
    tool       [{"name": "Market Trends API", "results": {...}}, {"name": "newAddress", "results": {...}}]

Tool names may hold blanks and dots, so a call list is no Python: names are cut off first, arguments read as Python."""

from __future__ import annotations

import ast
import json
from typing import Any

from rocstar.data.sft.format import Conversation, FunctionCall, Role, decoded, tools_of
from rocstar.data.sft.layouts.base import Layout, Row, Surroundings, Turns, each, list_of, mapping_of, text_of
from rocstar.data.sft.refusal import Reason, Refused
from rocstar.protocols import ToolSpec

SPEAKERS = {"user": Role.USER, "human": Role.USER, "assistant": Role.ASSISTANT, "gpt": Role.ASSISTANT}
WORDS = {"true": True, "false": False, "null": None}


def toolace(_: Surroundings) -> Layout:
    return each(_conversation)


def _conversation(row: Row) -> Conversation:
    tools = _tools(text_of(row, "system"))
    names = {tool.name for tool in tools}
    turns = Turns()
    for turn in list_of(row, "conversations"):
        fields = mapping_of(turn, "conversations")
        speaker, value = fields.get("from"), text_of(fields, "value").strip()
        if speaker == "tool":
            for result in _results(value, turns.open_calls):
                turns.add(Role.TOOL, result)
        elif speaker not in SPEAKERS:
            raise Refused(Reason.ROLES, "conversations", f"nobody we know speaks as {speaker!r}")
        elif SPEAKERS[speaker] is Role.ASSISTANT and _is_call_list(value, names):
            turns.calls(_calls(value))
        else:
            turns.add(SPEAKERS[speaker], value)
    return turns.conversation(tools)


def _tools(system: str) -> tuple[ToolSpec, ...]:
    """The first JSON list of objects in the text. What stands around it tells the model to write Python-like calls,
    which would be wrong here, so it is left out."""
    place = system.find("[{")
    if place < 0:
        raise Refused(Reason.TOOLS, "system", "holds no list of tools")
    try:
        return tools_of(json.JSONDecoder().raw_decode(system, place)[0], "system")
    except (ValueError, RecursionError) as error:
        raise Refused(Reason.TOOLS, "system", f"is not JSON: {error}") from None


def _is_call_list(value: str, names: set[str]) -> bool:
    return value.startswith("[") and value.endswith("]") and any(f"{name}(" in value for name in names)


def _calls(value: str) -> list[FunctionCall]:
    calls = []
    rest = value[1:-1].strip()
    while rest:
        name, opened, _ = rest.partition("(")
        end = _closing(rest, len(name)) if opened else -1
        if end < 0:
            raise Refused(Reason.CALL, "conversations", f"cannot read a call in {rest[:60]!r}")
        calls.append(FunctionCall(name=name.strip(), arguments=_arguments(rest[len(name) : end + 1])))
        rest = rest[end + 1 :].lstrip(" \n,")
    return calls


def _closing(text: str, place: int) -> int:
    """Where the bracket opened at `place` closes, brackets inside strings aside; -1 when it never does."""
    depth, quote, skip = 0, "", False
    for n in range(place, len(text)):
        letter = text[n]
        if skip:
            skip = False
        elif quote:
            skip, quote = letter == "\\", "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if not depth:
                return n
    return -1


def _arguments(written: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f{written}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise ValueError("arguments without a name")
        return {str(word.arg): _value(word.value) for word in call.keywords}
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise Refused(Reason.CALL, "conversations", f"cannot read arguments {written[:60]!r} ({error})") from None


def _value(node: ast.expr) -> Any:
    """A literal; JSON's true, false and null count, and what JSON cannot write (sets, bytes) does not."""
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(inner) for inner in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(key.value): _value(value) for key, value in pairs if isinstance(key, ast.Constant)}
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError(f"{type(value).__name__} is not JSON")
    return value


def _results(value: str, calls: int) -> list[str]:
    """One text a call, in the order of the calls."""
    listed = decoded(value, "conversations", Reason.NO_RESULT) if value.startswith("[") else [value]
    if len(listed) != calls:
        raise Refused(Reason.NO_RESULT, "conversations", f"{calls} calls are answered by {len(listed)} results")
    inner = [one.get("results", one) if isinstance(one, dict) else one for one in listed]
    return [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in inner]
