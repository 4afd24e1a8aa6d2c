"""Parses a chat completion request: supported fields are obeyed, all others refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rocstar.data.sft.check import check_roles
from rocstar.data.sft.format import Chat, Message, Role, chat_message
from rocstar.errors import DataError
from rocstar.support.listen import object_in
from rocstar.types import Sampling

OBEYED = (
    *("model", "messages", "stream", "stream_options", "temperature", "top_p", "top_k", "seed"),
    *("max_tokens", "max_completion_tokens"),
)
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([], ""),
    "logprobs": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "user": (),
    "metadata": (),
}
"""Ignored fields with the values that have no effect; an empty tuple: any value."""

LEAST_TEMPERATURE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    messages: Chat
    """The messages; the last one is the user's or a tool's."""
    sampling: Sampling
    """Its `max_new_tokens` is a placeholder: the turn loop sets it."""
    max_tokens: int | None
    """Limit of the whole answer, tool replies included; None: all the room."""
    stream: bool
    include_usage: bool
    """Whether the last piece of a stream reports the number of tokens."""

    @property
    def question(self) -> str:
        """The user's last."""
        return next(message.content for message in reversed(self.messages.messages) if message.role is Role.USER)


def read_request(body: bytes, seed: int) -> ChatRequest:
    """`seed`: the default. Raises DataError, which explains the change needed."""
    try:
        whole = json.dumps(object_in(body), ensure_ascii=False).encode("utf-8", "replace")  # no lone surrogates
        return _read(object_in(whole), seed)
    except (AttributeError, LookupError, RecursionError, TypeError, UnicodeError, ValueError):
        raise DataError("the request has another form than chat completions have; see OpenAI's reference") from None


def _read(asked: Mapping[str, Any], seed: int) -> ChatRequest:
    for field, value in asked.items():
        harmless = field in WITHOUT_EFFECT and (WITHOUT_EFFECT[field] == () or value in WITHOUT_EFFECT[field])
        if field not in OBEYED and value is not None and not harmless:
            why = ", because this server runs the agent's own tools itself (rocstar eval: --tools none)"
            raise DataError(f"{field} is not obeyed here; leave it out{why if field.startswith('tool') else ''}")
    temperature = _number(asked, "temperature", 1.0, 0.0, 10.0)
    refuse_temperature("temperature", temperature)
    stream, options = asked.get("stream"), asked.get("stream_options")
    if stream not in (None, True, False):
        raise DataError(f"stream must be true or false, got {stream!r}")
    return ChatRequest(
        messages=_conversation(asked.get("messages")),
        sampling=Sampling(
            max_new_tokens=1,
            temperature=temperature,
            top_p=_number(asked, "top_p", 1.0, 1e-6, 1.0),
            top_k=_whole(asked, "top_k", 0, 0, 1 << 20),
            seed=_whole(asked, "seed", seed, 0, (1 << 63) - 1),
        ),
        max_tokens=_max_tokens(asked),
        stream=stream is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def refuse_temperature(name: str, value: float) -> None:
    """Raises DataError for a temperature that is too small for fp32 to divide by."""
    if 0.0 < value < LEAST_TEMPERATURE:
        raise DataError(f"{name} {value:g} is too small to draw by; 0 takes the likeliest token")


def _whole(asked: Mapping[str, Any], field: str, default: int, low: int, high: int) -> int:
    value = _number(asked, field, default, low, high)
    if not isinstance(value, int):
        raise DataError(f"{field} must be a whole number, got {value!r}")
    return value


def _conversation(listed: Any) -> Chat:
    if not isinstance(listed, list) or not listed:
        raise DataError("messages must be a list with at least one message")
    messages = tuple(chat_message(message) for message in listed)
    check_roles([*messages, Message(role=Role.ASSISTANT, content="-")])
    return Chat(messages=messages, tools=None)


def _number(asked: Mapping[str, Any], field: str, default: float, low: float, high: float) -> float:
    value = asked.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise DataError(f"{field} must be a number from {low:g} to {high:g}, got {value!r}")
    return value


def _max_tokens(asked: Mapping[str, Any]) -> int | None:
    value = asked.get("max_completion_tokens", asked.get("max_tokens"))
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise DataError(f"max_tokens must be a whole number of at least 1, got {value!r}")
    return value
