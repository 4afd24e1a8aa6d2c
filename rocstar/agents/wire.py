"""Requests and answers in three protocols: OpenAI's chat completions and responses, Anthropic's messages. Each request
is converted to messages and tools of chat completions, each answer is built from an `Answer`, and a stream from the
finished answer: its text comes in one piece.

The run decides how tokens are sampled: `temperature`, `top_p`, `top_k`, `seed`, penalties and `logit_bias` of a request
are ignored. A request for something unsupported is refused; returned thoughts of a model are ignored."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rocstar.data.sft.format import Chat, Message, Role, chat_message, tools_of
from rocstar.errors import DataError
from rocstar.support.listen import completion_of
from rocstar.types import ToolCall

MODEL = "policy"  # the model's name for agents; requests may name any
RESPONSE = {"object": "response", "model": MODEL, "error": None, "parallel_tool_calls": True, "tool_choice": "auto"}
MESSAGE = {"type": "message", "model": MODEL, "role": "assistant", "stop_sequence": None}
"""What all responses have, and all of Anthropic's messages."""
UNCOUNTED = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
TEXT = {"type": "text"}
Body = Mapping[str, Any]
Object = dict[str, Any]
Asked = tuple[Chat, int | None, tuple[str, ...]]  # a request, as `AgentAttempt.complete` takes it


class Answer(NamedTuple):
    message: Message
    calls: tuple[ToolCall, ...]
    cut: bool  # whether a token limit cut it
    read: int
    written: int  # tokens, as `read`


class Wire(NamedTuple):
    read: Callable[[Body], Asked]  # raises DataError for a request that can't be obeyed
    write: Callable[[Answer], Object]
    stream: Callable[[Object, Body], Iterator[Object]]
    """(the result of `write`, the request) -> the values of server-sent events, whose names are their `type`."""
    end: str = ""  # sent after the last event


def _refuse(body: Body, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """allowed: by field, or by FIELD.FIELD of one that is an object."""
    for field, values in allowed.items():
        outer, _, inner = field.partition(".")
        asked = (body.get(outer) or {}).get(inner) if inner else body.get(outer)
        if asked not in (None, *values):
            raise DataError(f"{field} {asked!r:.60} is not obeyed here; leave it out")


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{field} must be a list, got {value!r:.60}")
    return value


JOINED: Mapping[tuple[Role, Role], str] = {(Role.ASSISTANT, Role.ASSISTANT): "", (Role.TOOL, Role.USER): "\n"}
"""Separators of adjacent messages that are merged: parts of an answer, text after the last result."""


def _asked(body: Body, system: Any, rows: Sequence[Any], tools: Any, most: str, stop: str) -> Asked:
    """rows, tools: in the form of chat completions; most, stop: names of fields. Raises DataError."""
    stops, limit = body.get(stop) or [], body.get(most)
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise DataError(f"{stop} must be a text or a list of texts, got {stops!r:.60}")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise DataError(f"{most} must be a whole number of at least 1, got {limit!r:.60}")
    for tool in tools or ():
        if isinstance(tool, Mapping) and tool.get("type") not in (None, "function") and "input_schema" not in tool:
            raise DataError(f"tools holds {tool!r:.60}, which is not obeyed here; send functions")
    messages: list[Message] = []
    for message in map(chat_message, [*([{"role": "system", "content": system}] if system else ()), *rows]):
        between = JOINED.get((messages[-1].role, message.role)) if messages else None
        if between is not None:
            last = messages.pop()
            content, calls = f"{last.content}{between}{message.content}", last.calls + message.calls
            message = Message(role=last.role, content=content, calls=calls)
        messages.append(message)
    chat = Chat(messages=tuple(messages), tools=tools_of(tools) if tools else None)
    return chat, limit, tuple(stops)


def _rows(part: Any, role: str = "") -> list[Any]:
    """Convert an item of a responses input, or a block of Anthropic's under a role, to rows of chat completions."""
    match role, part:
        case "" | Role.ASSISTANT, {"type": "function_call" | "tool_use", "name": name}:
            called = {"name": name, "arguments": part.get("arguments", part.get("input"))}
            return [{"role": "assistant", "content": "", "tool_calls": [{"function": called}]}]
        case "" | Role.USER, {"type": "function_call_output" | "tool_result"}:
            return [{"role": "tool", "content": part.get("output", part.get("content")) or ""}]
        case "" | Role.ASSISTANT, {"type": "reasoning" | "thinking" | "redacted_thinking"}:
            return []
        case Role.USER | Role.ASSISTANT, {"type": "text"}:
            return []  # of a message, all its texts together
        case "", {"role": _, "content": _} if part.get("type", "message") == "message":
            return [part]
    raise DataError(f"{role or 'input'} holds {part!r:.60}, which is not obeyed here")


def _usage(answer: Answer, read: str, written: str) -> dict[str, int]:
    return {read: answer.read, written: answer.written, "total_tokens": answer.read + answer.written}


def read_chat(body: Body) -> Asked:
    plain = {"n": (1,), "logprobs": (False,), "response_format": (TEXT,), "tool_choice": ("auto", "none")}
    _refuse(body, {**plain, "functions": (), "modalities": (["text"],), "structured_outputs": ()})
    if not isinstance(body.get("stream_options") or {}, dict):
        raise DataError(f"stream_options must be an object, got {body['stream_options']!r:.60}")
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    most = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return _asked(body, None, _list(body.get("messages"), "messages"), tools, most, "stop")


def write_chat(answer: Answer) -> Object:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.tool, "arguments": json.dumps(call.arguments)}}
        for call in answer.calls
    ]
    message = {"role": "assistant", "content": answer.message.content, "tool_calls": calls or None}
    finish = "length" if answer.cut else "tool_calls" if calls else "stop"
    return {
        **completion_of(MODEL, "chat.completion"),
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": _usage(answer, "prompt_tokens", "completion_tokens"),
    }


def stream_chat(found: Object, body: Body) -> Iterator[Object]:
    (choice,), usage = found["choices"], found["usage"]
    calls = [{"index": number, **call} for number, call in enumerate(choice["message"]["tool_calls"] or ())]
    head = {**found, "object": "chat.completion.chunk", "choices": []}
    del head["usage"]
    for delta, finish in ({**choice["message"], "tool_calls": calls or None}, None), ({}, choice["finish_reason"]):
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**head, "usage": usage}


def read_response(body: Body) -> Asked:
    """The request must repeat everything: earlier ones are not stored."""
    _refuse(body, dict.fromkeys(("previous_response_id", "conversation", "prompt"), ()))
    _refuse(body, {"background": (False,), "tool_choice": ("auto",), "text.format": (TEXT,), "top_logprobs": (0,)})
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _list(given, "input")
    rows = [row for item in items for row in _rows(item)]
    return _asked(body, body.get("instructions"), rows, body.get("tools"), "max_output_tokens", "stop")


def write_response(answer: Answer) -> Object:
    output: list[Object] = []
    if answer.message.content or not answer.calls:
        text = {"type": "output_text", "text": answer.message.content, "annotations": []}
        output.append({"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant", "content": [text]})
    for call in answer.calls:
        call_fields = {"call_id": call.id, "name": call.tool, "arguments": json.dumps(call.arguments)}
        output.append({"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", **call_fields})
    return {
        **RESPONSE,
        "tools": [],
        "id": f"resp_{secrets.token_hex(12)}",
        "created_at": int(time.time()),
        "status": "incomplete" if answer.cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if answer.cut else None,
        "output": [{**item, "status": "completed"} for item in output],
        "usage": _usage(answer, "input_tokens", "output_tokens") | UNCOUNTED,
    }


def stream_response(found: Object, body: Body) -> Iterator[Object]:
    for number, (kind, event) in enumerate(_events(found)):
        yield {"type": f"response.{kind}", "sequence_number": number, **event}


def _events(found: Object) -> Iterator[tuple[str, Object]]:
    yield "created", {"response": {**found, "status": "in_progress", "output": [], "usage": None}}
    for number, item in enumerate(found["output"]):
        at = {"output_index": number, "item_id": item["id"]}
        opened_item = {**item, "status": "in_progress"}
        if item["type"] == "message":
            (part,) = item["content"]
            at_part = {**at, "content_index": 0}
            yield "output_item.added", {**at, "item": {**opened_item, "content": []}}
            yield "content_part.added", {**at_part, "part": {**part, "text": ""}}
            yield "output_text.delta", {**at_part, "delta": part["text"], "logprobs": []}
            yield "output_text.done", {**at_part, "text": part["text"], "logprobs": []}
            yield "content_part.done", {**at_part, "part": part}
        else:
            yield "output_item.added", {**at, "item": {**opened_item, "arguments": ""}}
            yield "function_call_arguments.delta", {**at, "delta": item["arguments"]}
            yield "function_call_arguments.done", {**at, "arguments": item["arguments"], "name": item["name"]}
        yield "output_item.done", {**at, "item": item}
    yield found["status"], {"response": found}


def read_messages(body: Body) -> Asked:
    auto = {"type": "auto"}
    ignored = ({**auto, "disable_parallel_tool_use": one} for one in (False, True))
    _refuse(body, {"tool_choice": (auto, *ignored, {"type": "none"}), "mcp_servers": ([],)})
    _refuse(body, {"output_format": (), "output_config.format": ()})
    rows = [row for message in _list(body.get("messages"), "messages") for row in _of_blocks(message)]
    offered = [] if body.get("tool_choice") == {"type": "none"} else _list(body.get("tools") or [], "tools")
    tools = [{**tool, "parameters": tool.get("input_schema")} for tool in offered]
    return _asked(body, body.get("system"), rows, tools, "max_tokens", "stop_sequences")


def _of_blocks(message: Any) -> list[Any]:
    """A message as rows of chat completions: calls and results first, then all texts in one."""
    given: Body = message if isinstance(message, Mapping) else {}
    role, content = given.get("role"), given.get("content")
    if role not in (Role.USER, Role.ASSISTANT):
        raise DataError(f"messages holds one of role {role!r}; send user and assistant")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _list(content, "content")
    texts = [block for block in blocks if isinstance(block, Mapping) and block.get("type") == "text"]
    rows = [row for block in blocks for row in _rows(block, role)]
    return [*rows, *([{"role": role, "content": texts}] if texts or not rows else [])]


def write_messages(answer: Answer) -> Object:
    words = answer.message.content
    texts = [{"type": "text", "text": words}] if words or not answer.calls else []
    calls = [{"type": "tool_use", "id": one.id, "name": one.tool, "input": dict(one.arguments)} for one in answer.calls]
    reason = "max_tokens" if answer.cut else "tool_use" if calls else "end_turn"
    usage = {"input_tokens": answer.read, "output_tokens": answer.written}
    answered = {"content": [*texts, *calls], "stop_reason": reason, "usage": usage}
    return {**MESSAGE, "id": f"msg_{secrets.token_hex(12)}", **answered}


def stream_messages(found: Object, body: Body) -> Iterator[Object]:
    yield {"type": "message_start", "message": {**found, "content": [], "stop_reason": None}}
    for number, block in enumerate(found["content"]):
        if block["type"] == "text":
            opened_block, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            opened_block = {**block, "input": {}}
        yield {"type": "content_block_start", "index": number, "content_block": opened_block}
        yield {"type": "content_block_delta", "index": number, "delta": delta}
        yield {"type": "content_block_stop", "index": number}
    ended = {"stop_reason": found["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": found["usage"]}
    yield {"type": "message_stop"}


WIRES: Mapping[str, Wire] = {
    "/v1/chat/completions": Wire(read_chat, write_chat, stream_chat, end="data: [DONE]\n\n"),
    "/v1/responses": Wire(read_response, write_response, stream_response),
    "/v1/messages": Wire(read_messages, write_messages, stream_messages),
}
"""Protocols by path."""
