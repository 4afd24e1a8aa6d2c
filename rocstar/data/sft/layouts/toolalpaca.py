"""ToolAlpaca: one API a row, with many requests. `Function_Description` describes the tools in text:

    {"getFacts": "Get facts.\\nParameters: {\\"limit\\": \\"Required. Integer. How many.\\"}\\nOutput: ..."}

Training rows hold `Instances` (request, steps with observations, answer); evaluation rows hold `Instructions` and
`Golden_Answers` without observations, of which only requests answered by one call can be used."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rocstar.data.sft.format import Conversation, FunctionCall, Role, decoded
from rocstar.data.sft.layouts.base import Layout, Row, Surroundings, Turns, list_of, mapping_of, text_of
from rocstar.data.sft.refusal import Reason, Refused
from rocstar.data.sft.schema import TYPES, from_columns
from rocstar.protocols import ToolSpec

PARAMETERS = "Parameters:"


def toolalpaca(_: Surroundings) -> Layout:
    return _conversations


def _conversations(row: Row) -> Iterator[Conversation | Refused]:
    described = mapping_of(row.get("Function_Description"), "Function_Description")
    tools = [_tool(name, str(text)) for name, text in described.items() if name != "components"]
    if "Instances" in row:
        requests = ((_trained, mapping_of(one, "Instances")) for one in list_of(row, "Instances"))
        yield from (_tried(read, one, tools) for read, one in requests)
        return
    asked, golden = list_of(row, "Instructions"), list_of(row, "Golden_Answers")
    if len(asked) != len(golden):
        raise Refused(Reason.LAYOUT, "Golden_Answers", f"{len(asked)} requests but {len(golden)} answers")
    pairs = ({"input": request, "answers": answers} for request, answers in zip(asked, golden, strict=True))
    yield from (_tried(_golden, pair, tools) for pair in pairs)


def _tried(read: Any, request: Mapping[str, Any], tools: list[ToolSpec]) -> Conversation | Refused:
    """One request of many: what is wrong with it must not take the others along."""
    try:
        conversation: Conversation = read(request).conversation(tools)
        return conversation
    except Refused as refused:
        return refused


def _golden(request: Mapping[str, Any]) -> Turns:
    answers = list_of(request, "answers")
    if len(answers) != 1:
        raise Refused(Reason.NO_RESULT, "Golden_Answers", f"{len(answers)} calls in a row, and no results of any")
    turns = Turns()
    turns.add(Role.USER, text_of(request, "input"))
    step = mapping_of(answers[0], "Golden_Answers")
    turns.calls([_call(step.get("Action"), step.get("Action_Input"), "Golden_Answers")])
    return turns


def _trained(instance: Mapping[str, Any]) -> Turns:
    turns = Turns()
    turns.add(Role.USER, text_of(instance, "input"))
    for step in list_of(instance, "intermediate_steps"):
        if not isinstance(step, list) or len(step) != 2 or not isinstance(step[0], list) or len(step[0]) < 2:
            raise Refused(Reason.LAYOUT, "intermediate_steps", "expected [[action, input, log], observation]")
        turns.calls([_call(step[0][0], step[0][1], "intermediate_steps")])
        turns.add(Role.TOOL, str(step[1]))
    turns.add(Role.ASSISTANT, text_of(instance, "output"))
    return turns


def _call(name: Any, written: Any, field: str) -> FunctionCall:
    arguments = decoded(written, field, Reason.CALL) if isinstance(written, str) else written
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise Refused(Reason.CALL, field, f"expected a name and an object of arguments, got {str(written)[:40]!r}")
    return FunctionCall(name=name, arguments=arguments)


def _tool(name: str, text: str) -> ToolSpec:
    description, _, rest = text.partition(PARAMETERS)
    columns: Any = {}
    if rest.strip():
        try:
            columns, _ = json.JSONDecoder().raw_decode(rest.strip())
        except ValueError as error:
            raise Refused(Reason.TOOLS, "Function_Description", f"{name}: parameters are not JSON: {error}") from None
    written = {key: str(value) for key, value in mapping_of(columns, "Function_Description").items()}
    required = [key for key, value in written.items() if value.startswith("Required.")]
    return from_columns(name, description.strip(), {key: _column(value) for key, value in written.items()}, required)


def _column(text: str) -> dict[str, str]:
    """`Required. Integer. How many.` is an integer, described by the rest."""
    words = text.removeprefix("Required.").removeprefix("Optional.").strip()
    kind, _, rest = words.partition(".")
    named = kind.strip().lower().split("[")[0].split("(")[0]
    return {"type": named, "description": rest.strip()} if named in TYPES else {"description": words}
