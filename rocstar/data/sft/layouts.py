"""Layouts whose rows are requests with the calls that answer them (xlam, bfcl, seal_tools, toolalpaca, magicoder), and
the table of all published layouts of SFT data. A layout turns one row into conversations; `LAYOUTS` names them."""

from __future__ import annotations

import ast
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rocstar.data.sft.check import readable
from rocstar.data.sft.dialogues import (
    LayoutContext,
    Row,
    RowReader,
    Turns,
    api_bank,
    companion_rows,
    glaive,
    list_of,
    mapping_of,
    messages,
    nemotron,
    pairs,
    sharegpt,
    text_of,
    toolace,
)
from rocstar.data.sft.format import (
    TYPES,
    Chat,
    FunctionCall,
    Refusal,
    Refused,
    Role,
    call_of,
    decoded,
    dumped,
    from_columns,
    message_of,
    tool_spec,
    tools_of,
)
from rocstar.errors import ConfigError
from rocstar.protocols import ToolSpec
from rocstar.types import seed_for

# APIGen / xLAM: `query`, `answers` and `tools`, the last two as JSON text.
#
#     tools    [{"name": "f", "description": "...", "parameters": {"x": {"type": "int, optional", "description": "...",
#                                                                        "default": 3}}}]
#     answers  [{"name": "f", "arguments": {"x": 1}}]
#
# A parameter is required unless its type says `optional` or it has a default.


def xlam(row: Row) -> Chat:
    turns = Turns(text_of(row, "query"))
    answers = list_of(row, "answers")
    if not answers:
        raise Refused(Refusal.NO_ANSWER, "answers", "holds no call")
    turns.calls(call_of(answer, "answers") for answer in answers)
    return turns.chat([_xlam_tool(tool) for tool in list_of(row, "tools")])


def _xlam_tool(raw: Any) -> ToolSpec:
    tool = mapping_of(raw, "tools")
    columns = tool.get("parameters")
    if not isinstance(columns, Mapping) or "properties" in columns or not isinstance(tool.get("name"), str):
        return tool_spec(raw)
    required = [
        name
        for name, column in columns.items()
        if isinstance(column, Mapping) and "optional" not in str(column.get("type", "")) and "default" not in column
    ]
    plain = {name: _xlam_column(column) for name, column in columns.items()}
    return from_columns(tool["name"], tool.get("description"), plain, required)


def _xlam_column(column: Any) -> Any:
    """`int, optional` is `int`; an empty default, which xLAM writes for "none", is left out."""
    if not isinstance(column, Mapping):
        return {}
    kept = {key: value for key, value in column.items() if key != "default" or value not in ("", None)}
    return kept | ({"type": column["type"].split(",")[0]} if isinstance(column.get("type"), str) else {})


# BFCL: questions with their functions, and answers in files of their own, joined by `id`.
#
#     question      [[{"role": "user", "content": "..."}]]          turns of messages
#     function      [{"name": "f", "parameters": {"type": "dict", ...}}]
#     ground_truth  [{"f": {"x": [1, 1.0], "unit": ["m", ""]}}]     values that are accepted; "" means left out
#
# The first accepted value is taken. BFCL is a benchmark: build it to measure with, not to train on.

LEFT_OUT = ""


def bfcl(context: LayoutContext) -> RowReader:
    answers = {text_of(row, "id"): list_of(row, "ground_truth") for row in companion_rows(context.answer_files)}

    def read(row: Row) -> Chat:
        asked = list_of(row, "question")
        if len(asked) != 1 or not isinstance(asked[0], list):
            raise Refused(Refusal.NO_RESULT, "question", f"{len(asked)} turns of calls, and no results of any")
        tools = tools_of(list_of(row, "function"), "function")
        truth = answers.get(text_of(row, "id"))
        if not truth:
            raise Refused(Refusal.NO_ANSWER, "id", f"no answer file answers {row['id']!r}")
        turns = Turns()
        for message in map(message_of, asked[0]):
            turns.add(message.role, message.content)
        turns.calls(
            FunctionCall(name=name, arguments=_accepted(mapping_of(options, "ground_truth")))
            for answer in truth
            for name, options in mapping_of(answer, "ground_truth").items()
        )
        return turns.chat(tools)

    return read


def _accepted(options: Mapping[str, Any]) -> dict[str, Any]:
    """The first accepted value of each argument, without those that are best left out."""
    chosen = {}
    for name, accepted in options.items():
        if not isinstance(accepted, list) or not accepted:
            told = f"expected a list of accepted values, got {str(accepted)[:40]}"
            raise Refused(Refusal.LAYOUT, "ground_truth", told)
        if accepted[0] != LEFT_OUT:
            chosen[name] = _plain(accepted[0])
    return chosen


def _plain(value: Any) -> Any:
    """Inside an object each field lists accepted values again; a list of objects holds such objects."""
    if isinstance(value, dict):
        listed = _accepted({key: inner for key, inner in value.items() if isinstance(inner, list)})
        return {
            key: listed.get(key, inner) for key, inner in value.items() if key in listed or not isinstance(inner, list)
        }
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


# Seal-Tools: `query` and `calling`; tools are described in a file of their own (`tool.jsonl`).
#
#     calling  [{"api": "getNews", "parameters": {"country": "us"}, "responses": ["API_call_0"]}]
#
# A row is one request answered by calls made at once. Where an argument is another call's `API_call_n`, the calls
# depend on results that nobody has, and the row is refused. Each conversation is offered the tools it calls and some
# others of the same fields, because choosing is part of the task.

SEAL_RESULT = re.compile(r"\bAPI_call_\d+\b")


def seal_tools(context: LayoutContext) -> RowReader:
    if not context.tool_files:
        raise ConfigError("a source of layout seal_tools needs tool_files: the tool.jsonl of Seal-Tools")
    tools: dict[str, ToolSpec] = {}
    fields: dict[str, str] = {}  # of each tool, such as `Sports/Volleyball`
    by_field: dict[str, list[str]] = defaultdict(list)
    for row in companion_rows(context.tool_files):
        name, field = text_of(row, "api_name"), str(row.get("field", ""))
        tools[name] = from_columns(name, row.get("api_description"), row.get("parameters"), list_of(row, "required"))
        fields[name] = field
        by_field[field].append(name)

    def read(row: Row) -> Chat:
        calls = _seal_calls(row, tools)
        turns = Turns(text_of(row, "query"))
        turns.calls(calls)
        called = list(dict.fromkeys(call.name for call in calls))
        near = [name for field in dict.fromkeys(fields[c] for c in called) for name in by_field[field]]
        free = [name for name in near if name not in called]
        rng = random.Random(seed_for(context.seed, "other tools", dumped(row)))
        offered = called + rng.sample(free, min(context.other_tools, len(free)))
        rng.shuffle(offered)
        return turns.chat([tools[name] for name in offered])

    return read


def _seal_calls(row: Row, tools: Mapping[str, ToolSpec]) -> list[FunctionCall]:
    calling = [mapping_of(call, "calling") for call in list_of(row, "calling")]
    calls = [
        FunctionCall(name=text_of(c, "api"), arguments=mapping_of(c.get("parameters"), "calling")) for c in calling
    ]
    for call in calls:
        if unknown := SEAL_RESULT.search(str(call.arguments)):
            raise Refused(Refusal.PLACEHOLDER, "calling", f"{call.name} is given {unknown[0]}, a result nobody has")
        if call.name not in tools:
            raise Refused(Refusal.UNKNOWN_TOOL, "calling", f"tool_files describe no {call.name!r}")
    return calls


# ToolAlpaca: one API a row, with many requests. `Function_Description` describes the tools in text:
#
#     {"getFacts": "Get facts.\nParameters: {\"limit\": \"Required. Integer. How many.\"}\nOutput: ..."}
#
# Training rows hold `Instances` (request, steps with observations, answer); evaluation rows hold `Instructions` and
# `Golden_Answers` without observations, of which only requests answered by one call can be used.


def toolalpaca(row: Row) -> Iterator[Chat | Refused]:
    described = mapping_of(row.get("Function_Description"), "Function_Description")
    tools = [_alpaca_tool(name, str(text)) for name, text in described.items() if name != "components"]
    read: Callable[[Row], Turns]
    requests: Iterable[Row]
    if "Instances" in row:
        read, requests = _alpaca_instance, (mapping_of(one, "Instances") for one in list_of(row, "Instances"))
    else:
        asked, golden = list_of(row, "Instructions"), list_of(row, "Golden_Answers")
        if len(asked) != len(golden):
            raise Refused(Refusal.LAYOUT, "Golden_Answers", f"{len(asked)} requests but {len(golden)} answers")
        requests = [{"input": request, "answers": found} for request, found in zip(asked, golden, strict=True)]
        read = _alpaca_golden
    for request in requests:
        try:
            yield read(request).chat(tools)
        except Refused as refused:  # what is wrong with one request of many must not take the others along
            yield refused


def _alpaca_golden(request: Row) -> Turns:
    answers = list_of(request, "answers")
    if len(answers) != 1:
        raise Refused(Refusal.NO_RESULT, "Golden_Answers", f"{len(answers)} calls in a row, and no results of any")
    turns = Turns(text_of(request, "input"))
    step = mapping_of(answers[0], "Golden_Answers")
    turns.calls([_alpaca_call(step.get("Action"), step.get("Action_Input"), "Golden_Answers")])
    return turns


def _alpaca_instance(instance: Row) -> Turns:
    turns = Turns(text_of(instance, "input"))
    for step in list_of(instance, "intermediate_steps"):
        if not isinstance(step, list) or len(step) != 2 or not isinstance(step[0], list) or len(step[0]) < 2:
            raise Refused(Refusal.LAYOUT, "intermediate_steps", "expected [[action, input, log], observation]")
        turns.calls([_alpaca_call(step[0][0], step[0][1], "intermediate_steps")])
        turns.add(Role.TOOL, str(step[1]))
    turns.add(Role.ASSISTANT, text_of(instance, "output"))
    return turns


def _alpaca_call(name: Any, written: Any, field: str) -> FunctionCall:
    arguments = decoded(written, field, Refusal.CALL) if isinstance(written, str) else written
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise Refused(Refusal.CALL, field, f"expected a name and an object of arguments, got {str(written)[:40]!r}")
    return FunctionCall(name=name, arguments=arguments)


def _alpaca_tool(name: str, text: str) -> ToolSpec:
    description, _, rest = text.partition("Parameters:")
    columns: Any = {}
    if rest.strip():
        try:
            columns, _ = json.JSONDecoder().raw_decode(rest.strip())
        except ValueError as error:
            told = f"{name}: parameters are not JSON: {error}"
            raise Refused(Refusal.TOOLS, "Function_Description", told) from None
    written = {key: str(value) for key, value in mapping_of(columns, "Function_Description").items()}
    required = [key for key, value in written.items() if value.startswith("Required.")]
    return from_columns(name, description.strip(), {k: _alpaca_column(v) for k, v in written.items()}, required)


def _alpaca_column(text: str) -> dict[str, str]:
    """`Required. Integer. How many.` is an integer, described by the rest."""
    words = text.removeprefix("Required.").removeprefix("Optional.").strip()
    kind, _, rest = words.partition(".")
    named = kind.strip().lower().split("[")[0].split("(")[0]
    return {"type": named, "description": rest.strip()} if named in TYPES else {"description": words}


# Magicoder's OSS-Instruct (`problem`, `solution`, `lang`) and Evol-Instruct (`instruction`, `response`): the one Python
# program of a solution becomes a call of the code tool. It is not run: the row ends with the call. Words before the
# program stay, words after it go, because they speak of a result the assistant has not seen.

FENCED = re.compile(r"^```[ \t]*([\w+#.-]*)[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py")


def magicoder(context: LayoutContext) -> RowReader:
    tool = context.code_tool

    def read(row: Row) -> Chat:
        asked, answered = ("problem", "solution") if "problem" in row else ("instruction", "response")
        response = text_of(row, answered)
        blocks = list(FENCED.finditer(response))
        if len(blocks) != 1:
            raise Refused(Refusal.CODE, answered, f"holds {len(blocks)} blocks of code; one is wanted")
        language = blocks[0][1].lower() or str(row.get("lang", "")).lower()
        if language not in PYTHON:
            raise Refused(Refusal.CODE, answered, f"is written in {language or 'no named language'}")
        code = blocks[0][2].rstrip()
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Refused(Refusal.CODE, answered, f"is not Python: {error}") from None
        turns = Turns(text_of(row, asked))
        if before := response[: blocks[0].start()].strip():
            turns.add(Role.ASSISTANT, before)
        turns.calls([FunctionCall(name=tool.name, arguments={next(iter(tool.parameters["properties"])): code})])
        return turns.chat([tool])

    return read


def _by_row(read: RowReader) -> Callable[[LayoutContext], RowReader]:
    """A layout that needs nothing but the row."""
    return lambda _: read


LAYOUTS: Mapping[str, Callable[[LayoutContext], RowReader]] = {
    "messages": _by_row(messages),
    "pairs": _by_row(pairs),
    "nemotron": _by_row(nemotron),
    "sharegpt": _by_row(sharegpt),
    "glaive": _by_row(glaive),
    "toolace": _by_row(toolace),
    "xlam": _by_row(xlam),
    "bfcl": bfcl,
    "seal_tools": seal_tools,
    "api_bank": api_bank,
    "toolalpaca": _by_row(toolalpaca),
    "magicoder": magicoder,
}


def conversations(reader: RowReader, row: Any) -> Iterator[Chat | Refused]:
    """What a layout's reader makes of a row: at least one conversation or refusal."""
    try:
        if not isinstance(readable(row), dict):
            raise Refused(Refusal.LAYOUT, "line", f"expected an object with fields, got {type(row).__name__}")
        made = reader(row)
        yield from [made] if isinstance(made, Chat) else made
    except Refused as refused:
        yield refused
