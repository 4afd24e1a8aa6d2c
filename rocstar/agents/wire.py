"""Requests and answers as three protocols write them: OpenAI's chat completions and responses, Anthropic's messages.
Each is read into an `AgentRequest` and written from an `Answer`; a stream comes in one piece.

How tokens are drawn is the run's to say: `temperature`, `top_p`, `top_k` and `seed` of a request are not looked at.
What asks for something that can't be given is refused; a model's thoughts that are sent back are passed over."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rocstar.agents.conversations import AgentRequest, Answer
from rocstar.data.sft.format import Chat, FunctionCall, Message, Role, call_of, message_of, tools_of
from rocstar.errors import DataError
from rocstar.types import ToolCall

MODEL = "policy"
"""The model's name for agents; requests may name any."""
Body = Mapping[str, Any]
Event = tuple[str | None, Any]
"""(name or None, JSON value) of a server-sent event."""


class Wire(NamedTuple):
    """A protocol."""

    read: Callable[[Body], AgentRequest]
    """Raises DataError for what can't be obeyed."""
    write: Callable[[Answer], dict[str, Any]]
    stream: Callable[[dict[str, Any], Body], Iterator[Event]]
    """(what `write` gave, the request) -> events."""


def _refuse(body: Body, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    for field, values in allowed.items():
        if body.get(field) not in (None, *values):
            raise DataError(f"{field} {body[field]!r:.60} is not obeyed here; leave it out")


def _asked(messages: Sequence[Message], tools: Any, body: Body, most: str, stop: str) -> AgentRequest:
    """tools: as chat completions list them; most, stop: names of fields."""
    stops, limit = body.get(stop) or [], body.get(most)
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise DataError(f"{stop} must be a text or a list of texts, got {stops!r:.60}")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise DataError(f"{most} must be a whole number of at least 1, got {limit!r:.60}")
    if not messages:
        raise DataError("the request has no messages")
    chat = Chat(messages=tuple(messages), tools=tools_of(tools) if tools else None)
    return AgentRequest(chat=chat, max_tokens=limit, stop=tuple(stops))


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{field} must be a list, got {value!r:.60}")
    return value


def _text(content: Any) -> str:
    """Of a content that is a text, or a list of parts with texts."""
    if isinstance(content, str):
        return content
    parts = _list(content or [], "content")
    wrong = next((part for part in parts if not isinstance(part, dict) or not isinstance(part.get("text"), str)), None)
    if wrong is not None:
        raise DataError(f"content holds {wrong!r:.60}, which is no text")
    return "".join(part["text"] for part in parts)


# -- OpenAI's chat completions ---------------------------------------------------------------------------------------


def read_chat(body: Body) -> AgentRequest:
    """A chat completion request. Raises DataError."""
    plain = {"n": (1,), "logprobs": (False,), "response_format": ({"type": "text"},), "tool_choice": ("auto", "none")}
    _refuse(body, plain)
    messages = [message_of(_plain(one)) for one in _list(body.get("messages"), "messages")]
    if not isinstance(body.get("stream_options") or {}, dict):
        raise DataError(f"stream_options must be an object, got {body['stream_options']!r:.60}")
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    most = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
    return _asked(messages, tools, body, most, "stop")


def _plain(message: Any) -> Any:
    """`developer` is what OpenAI calls a system message today."""
    if not isinstance(message, dict):
        return message
    content, role = message.get("content"), message.get("role")
    text = None if content is None and message.get("tool_calls") else _text(content)
    return {**message, "content": text, "role": "system" if role == "developer" else role}


def write_chat(answer: Answer) -> dict[str, Any]:
    """The answer as chat completions have it."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.tool, "arguments": json.dumps(call.arguments)}}
        for call in answer.calls
    ]
    message = {"role": "assistant", "content": answer.message.content, **({"tool_calls": calls} if calls else {})}
    finish = "length" if answer.cut else "tool_calls" if calls else "stop"
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": _usage(answer, "prompt_tokens", "completion_tokens"),
    }


def stream_chat(found: dict[str, Any], body: Body) -> Iterator[Event]:
    """Its chunks."""
    (choice,), usage = found["choices"], found["usage"]
    message = choice["message"]
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
    head = {**found, "object": "chat.completion.chunk", "choices": []}
    del head["usage"]
    for delta, finish in ({**message, **({"tool_calls": calls} if calls else {})}, None), ({}, choice["finish_reason"]):
        yield None, {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield None, {**head, "usage": usage}


def _usage(answer: Answer, read: str, written: str) -> dict[str, int]:
    return {read: answer.read, written: answer.written, "total_tokens": answer.read + answer.written}


# -- OpenAI's responses ----------------------------------------------------------------------------------------------


def read_response(body: Body) -> AgentRequest:
    """A responses request, which says everything again: nothing is kept of earlier ones. Raises DataError."""
    _refuse(body, {"previous_response_id": (), "conversation": (), "background": (False,), "tool_choice": ("auto",)})
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _list(given, "input")
    said = [Message(role=Role.SYSTEM, content=_text(body["instructions"]))] if body.get("instructions") else []
    for item in items:
        _add(said, item)
    return _asked(said, body.get("tools"), body, "max_output_tokens", "stop")


def _add(said: list[Message], item: Any) -> None:
    """One item of a responses input; what the assistant said and the calls it made then are one message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        said.append(message_of(_plain({"role": item.get("role"), "content": item.get("content")})))
    elif kind == "function_call":
        before = said.pop() if said and said[-1].role is Role.ASSISTANT else Message(role=Role.ASSISTANT, content="")
        said.append(_with_call(before, call_of(item)))
    elif kind == "function_call_output":
        said.append(Message(role=Role.TOOL, content=_text(item.get("output"))))
    elif kind != "reasoning":
        raise DataError(f"input holds {item!r:.60}, which is not obeyed here")


def _with_call(message: Message, call: FunctionCall) -> Message:
    return Message(role=Role.ASSISTANT, content=message.content, calls=(*message.calls, call))


def write_response(answer: Answer) -> dict[str, Any]:
    """The answer as responses have it."""
    text = {"type": "output_text", "text": answer.message.content, "annotations": []}
    said = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
    words: dict[str, Any] = {**said, "content": [text]}
    calls: list[dict[str, Any]] = [
        {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": call.id,
            "name": call.tool,
            "arguments": json.dumps(call.arguments),
        }
        for call in answer.calls
    ]
    output = [*([words] if answer.message.content or not calls else []), *calls]
    usage = {
        **_usage(answer, "input_tokens", "output_tokens"),
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": MODEL,
        "status": "incomplete" if answer.cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if answer.cut else None,
        "error": None,
        "output": [{**item, "status": "completed"} for item in output],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage,
    }


def stream_response(found: dict[str, Any], body: Body) -> Iterator[Event]:
    """Its events."""
    begun = {**found, "status": "in_progress", "output": [], "usage": None}
    told: list[tuple[str, dict[str, Any]]] = [("response.created", {"response": begun})]
    for number, item in enumerate(found["output"]):
        at = {"output_index": number, "item_id": item["id"]}
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        told.append(("response.output_item.added", {**at, "item": {**item, **empty, "status": "in_progress"}}))
        if item["type"] == "message":
            (part,) = item["content"]
            inside = {**at, "content_index": 0}
            told += [
                ("response.content_part.added", {**inside, "part": {**part, "text": ""}}),
                ("response.output_text.delta", {**inside, "delta": part["text"], "logprobs": []}),
                ("response.output_text.done", {**inside, "text": part["text"], "logprobs": []}),
                ("response.content_part.done", {**inside, "part": part}),
            ]
        else:
            told.append(("response.function_call_arguments.delta", {**at, "delta": item["arguments"]}))
            told.append(
                ("response.function_call_arguments.done", {**at, "arguments": item["arguments"], "name": item["name"]})
            )
        told.append(("response.output_item.done", {**at, "item": item}))
    told.append((f"response.{found['status']}", {"response": found}))
    for number, (name, event) in enumerate(told):
        yield name, {"type": name, "sequence_number": number, **event}


# -- Anthropic's messages --------------------------------------------------------------------------------------------


def read_messages(body: Body) -> AgentRequest:
    """A messages request. Raises DataError."""
    _refuse(body, {"tool_choice": ({"type": "auto"}, {"type": "none"})})
    said = [Message(role=Role.SYSTEM, content=_text(body["system"]))] if body.get("system") else []
    for message in _list(body.get("messages"), "messages"):
        said += _blocks(message)
    offered = [] if body.get("tool_choice") == {"type": "none"} else _list(body.get("tools") or [], "tools")
    tools = [{**tool, "parameters": tool.get("input_schema")} for tool in offered if isinstance(tool, dict)]
    if len(tools) != len(offered):
        raise DataError("tools must be a list of objects")
    return _asked(said, tools, body, "max_tokens", "stop_sequences")


def _blocks(message: Any) -> list[Message]:
    """The messages that a user's or an assistant's blocks are; a user's words after results stand with the last."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in (Role.USER, Role.ASSISTANT):
        raise DataError(f"messages holds one of role {role!r}; send user and assistant")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _list(content, "content")
    words: list[str] = []
    calls: list[FunctionCall] = []
    results: list[str] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            words.append(_text([block]))
        elif kind == "tool_use" and role == Role.ASSISTANT:
            calls.append(call_of({"name": block.get("name"), "arguments": block.get("input")}))
        elif kind == "tool_result" and role == Role.USER:
            results.append(_text(block.get("content")))
        elif kind not in ("thinking", "redacted_thinking"):
            raise DataError(f"content holds a block of type {kind!r}, which is not obeyed here")
    if not results:
        return [Message(role=Role(role), content="".join(words), calls=tuple(calls))]
    last = "\n".join([results.pop(), *words])
    return [Message(role=Role.TOOL, content=text) for text in (*results, last)]


def write_messages(answer: Answer) -> dict[str, Any]:
    """The answer as messages have it."""
    words, calls = answer.message.content, [_tool_use(call) for call in answer.calls]
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [*([{"type": "text", "text": words}] if words or not calls else []), *calls],
        "stop_reason": "max_tokens" if answer.cut else "tool_use" if calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": answer.read, "output_tokens": answer.written},
    }


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.tool, "input": dict(call.arguments)}


def stream_messages(found: dict[str, Any], body: Body) -> Iterator[Event]:
    """Its events."""
    yield "message_start", {"type": "message_start", "message": {**found, "content": [], "stop_reason": None}}
    for number, block in enumerate(found["content"]):
        is_text = block["type"] == "text"
        begun = {**block, "text": ""} if is_text else {**block, "input": {}}
        delta = (
            {"type": "text_delta", "text": block["text"]}
            if is_text
            else {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        )
        yield "content_block_start", {"type": "content_block_start", "index": number, "content_block": begun}
        yield "content_block_delta", {"type": "content_block_delta", "index": number, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": number}
    ended = {"stop_reason": found["stop_reason"], "stop_sequence": None}
    yield "message_delta", {"type": "message_delta", "delta": ended, "usage": found["usage"]}
    yield "message_stop", {"type": "message_stop"}


CHAT = Wire(read_chat, write_chat, stream_chat)
WIRES: Mapping[str, Wire] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": Wire(read_response, write_response, stream_response),
    "/v1/messages": Wire(read_messages, write_messages, stream_messages),
}
"""By their paths."""
