"""The native API: what a caller sends, checked while it is decoded, and what it gets.

A call is answered with a `wire.Response`, all its fields, as one JSON object; its fields are documented there.
"""

from __future__ import annotations

import random
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from rocstar.sandbox.service.settings import Settings
from rocstar.sandbox.wire import Limits, Request

MAX_PROCESSES = 256
Positive = Annotated[float, Meta(gt=0)]
Shape = TypeVar("Shape")
PositiveInt = Annotated[int, Meta(gt=0, lt=2**40)]


class BadRequest(Exception):
    """What a caller sent cannot be served; one sentence for a person, and the HTTP status that goes with it."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


class CallLimits(Struct, forbid_unknown_fields=True, frozen=True, gc=False):
    """Fields left out take the service's defaults."""

    wall_seconds: Positive | None = None
    """Time from start to end of the program, seconds; waiting excluded."""
    cpu_seconds: Positive | None = None
    """CPU of any one process of the program, seconds."""
    memory_bytes: PositiveInt | None = None
    """Address space each process may add to what is preloaded, bytes."""
    output_bytes: PositiveInt | None = None
    """stdout and stderr together, bytes."""
    processes: Annotated[int, Meta(ge=1, le=MAX_PROCESSES)] | None = None
    """Processes and threads alive at once."""


NO_LIMITS = CallLimits()


class Call(Struct, forbid_unknown_fields=True, frozen=True):
    code: str
    """Python source, run as `__main__`."""
    id: str = ""
    """Comes back in the response."""
    stdin: str = ""
    """Standard input."""
    files: dict[str, str] = {}
    """Text files put into the working directory: relative path to content."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """Seeds the program's random numbers; null draws a fresh seed for each call."""
    limits: CallLimits = NO_LIMITS
    """What the program may use."""
    patience_seconds: Positive | None = None
    """How long it may wait for its turn before it is `overloaded`, seconds."""


class Batch(Struct, forbid_unknown_fields=True, frozen=True):
    calls: list[Call]
    """Answered in this order, or by index where results are streamed."""


class _Item(Struct, frozen=True, gc=False):
    """A call of which nothing is kept: for counting."""


class _CountedBatch(Struct, frozen=True):
    calls: list[_Item]


def decode(body: bytes, shape: type[Shape], wrong_field: int = 400) -> Shape:
    """Raises BadRequest; `wrong_field` is the status for JSON that is not of this shape."""
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request has a wrong field: {error}", wrong_field) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the request is not valid JSON: {error}") from error
    except RecursionError:
        raise BadRequest("the request is nested too deeply") from None


def decode_batch(body: bytes, max_calls: int) -> list[Call]:
    """Raises BadRequest. A batch that is far too long is counted before anything of it is built."""
    if body.count(b"{") > max_calls:
        refuse_over(len(decode(body, _CountedBatch).calls), max_calls)
    calls = decode(body, Batch).calls
    refuse_over(len(calls), max_calls)
    return calls


def refuse_over(calls: int, max_calls: int) -> None:
    if calls > max_calls:
        raise BadRequest(f"the batch has {calls} calls and at most {max_calls} are taken; send several batches", 413)
    if calls == 0:
        raise BadRequest("the batch has no calls")


def request_of(call: Call, settings: Settings) -> Request:
    """Raises BadRequest for a limit over the operator's."""
    seed = random.getrandbits(63) if call.seed is None else call.seed
    limits = limits_of(call.limits, settings)
    return Request(id=call.id, code=call.code, stdin=call.stdin, files=call.files, seed=seed, limits=limits)


def limits_of(asked: CallLimits, settings: Settings) -> Limits:
    if asked is NO_LIMITS:
        return settings.limits
    given = {name: value for name in CallLimits.__struct_fields__ if (value := getattr(asked, name)) is not None}
    if "wall_seconds" in given and "cpu_seconds" not in given:
        given["cpu_seconds"] = given["wall_seconds"]  # more CPU than time is of use to threads only
    for name, most in (("wall_seconds", settings.max_wall_seconds), ("cpu_seconds", settings.max_wall_seconds)):
        refuse_above(given, name, most, "--max-wall-seconds")
    refuse_above(given, "memory_bytes", settings.max_memory_bytes, "--max-memory-mb")
    base = {name: getattr(settings.limits, name) for name in Limits.__slots__}
    return Limits(**base | given)


def refuse_above(given: dict[str, Any], name: str, most: float, option: str) -> None:
    if given.get(name, 0) > most:
        raise BadRequest(f"limit {name} is at most {most:g} here, got {given[name]:g}; the operator's {option} says so")


def encode(value: object) -> bytes:
    """JSON. Lone surrogates, which a program's output may hold and JSON may not, become U+FFFD."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(without_surrogates(msgspec.to_builtins(value)))


def without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    return value
