"""Parses a chat completion request: supported fields are obeyed, all others refused in one sentence."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation, ValidationError

from rocstar.data.sft.check import check_roles
from rocstar.data.sft.format import Chat, Message, Role, chat_message
from rocstar.errors import DataError
from rocstar.support.listen import object_in
from rocstar.types import Sampling, utf8

LEAST_TEMPERATURE = 1e-4
NOT_OBEYED = ("extra_forbidden", "literal_error")
"""What pydantic calls a field that is not there, or a value that is not the one without effect."""


def _conversation(listed: Any) -> Chat:
    """Raises DataError."""
    if not isinstance(listed, list) or not listed:
        raise DataError("messages must be a list with at least one message")
    messages = tuple(chat_message(message) for message in listed)
    if (last := messages[-1].role) not in (Role.USER, Role.TOOL):
        raise DataError(f"the last of messages is of role {last}; end them with the user's or a tool's")
    check_roles([*messages, Message(role=Role.ASSISTANT, content="-")])
    return Chat(messages=messages, tools=None)


class ChatRequest(BaseModel):
    """The fields that are obeyed; of others the values that have no effect, which clients send without need."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    messages: Annotated[SkipValidation[Chat], BeforeValidator(_conversation)]
    """The messages; the last one is the user's or a tool's."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Limit of the whole answer, tool replies included; None: all the room."""
    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, ge=1e-6, le=1)
    top_k: int = Field(default=0, ge=0, le=1 << 20)
    seed: int = Field(ge=0, lt=1 << 63)
    stream: bool = False
    stream_options: Any = None

    n: Literal[1] = 1
    stop: Literal[""] | Annotated[list[Any], Field(max_length=0)] = ""
    logprobs: Literal[False] = False
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    response_format: dict[Literal["type"], Literal["text"]] = {}
    tools: Annotated[list[Any], Field(max_length=0)] = []
    tool_choice: Literal["auto"] = "auto"
    parallel_tool_calls: Literal[True] = True
    store: Literal[False] = False
    model: Any = None
    user: Any = None  # like metadata, a note of the client's that changes no answer of OpenAI's either
    metadata: Any = None

    @property
    def question(self) -> str:
        """The user's last."""
        return next(message.content for message in reversed(self.messages.messages) if message.role is Role.USER)

    @property
    def sampling(self) -> Sampling:
        """Its `max_new_tokens` is a placeholder: the turn loop sets it."""
        return Sampling(
            max_new_tokens=1, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed
        )

    @property
    def include_usage(self) -> bool:
        """Whether the last piece of a stream reports the number of tokens."""
        return isinstance(self.stream_options, dict) and self.stream_options.get("include_usage") is True


def read_request(body: bytes, seed: int) -> ChatRequest:
    """`seed`: the default. Raises DataError, which explains the change needed."""
    try:
        whole = utf8(json.dumps(object_in(body), ensure_ascii=False)).encode()
        given = {field: value for field, value in object_in(whole).items() if value is not None}
        if "max_completion_tokens" in given:  # the newer name
            given["max_tokens"] = given.pop("max_completion_tokens")
        asked = ChatRequest.model_validate({"seed": seed, **given})
    except ValidationError as error:
        raise DataError(_complaint(error)) from None
    except (AttributeError, LookupError, RecursionError, TypeError, UnicodeError, ValueError):
        raise DataError("the request has another form than chat completions have; see OpenAI's reference") from None
    refuse_temperature("temperature", asked.temperature)
    return asked


def _complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    field = str(first["loc"][0])
    if first["type"] not in NOT_OBEYED and not field.startswith("tool"):
        return f"{field}: {first['msg']}"
    why = ", because this server runs the agent's own tools itself (rocstar eval: --tools none)"
    return f"{field} is not obeyed here; leave it out{why if field.startswith('tool') else ''}"


def refuse_temperature(name: str, value: float) -> None:
    """Raises DataError for a temperature that is too small for fp32 to divide by."""
    if 0.0 < value < LEAST_TEMPERATURE:
        raise DataError(f"{name} {value:g} is too small to draw by; 0 takes the likeliest token")
