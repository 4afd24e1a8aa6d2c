"""The native API: what a caller sends, checked while it is decoded, and what it gets.

A call is answered with a `wire.Response`, all its fields, as one JSON object; its fields are documented there.
"""

from __future__ import annotations

import base64
import binascii
import random
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from rocstar.sandbox.service.settings import Settings
from rocstar.sandbox.wire import MAX_OUTPUT_BYTES, Limits, Request

MAX_PROCESSES = 256
MAX_CELLS = 1000  # of a notebook
Positive = Annotated[float, Meta(gt=0)]
Shape = TypeVar("Shape")
PositiveInt = Annotated[int, Meta(gt=0, lt=2**40)]


class BadRequest(Exception):
    """What a caller sent cannot be served; one sentence for a person, and the HTTP status that goes with it."""

    def __init__(self, sentence: str, status: int = 400, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.retry_after = retry_after
        """Seconds after which it is worth to come again."""


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


class Base64(Struct, forbid_unknown_fields=True, frozen=True, gc=False):
    base64: str
    """The content's bytes, in base64."""


Files = dict[str, str | Base64]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Call(Struct, forbid_unknown_fields=True, frozen=True):
    code: str
    """Python source, run as `__main__`."""
    id: str = ""
    """Comes back in the response."""
    stdin: str = ""
    """Standard input."""
    files: Files = {}
    """Put into the working directory: relative path to text, or to `{"base64": ...}`."""
    fetch: list[str] = []
    """Files to send back after it, relative to the working directory."""
    seed: Seed | None = None
    """Seeds the program's random numbers; null draws a fresh seed for each call."""
    limits: CallLimits = NO_LIMITS
    """What the program may use."""
    patience_seconds: Positive | None = None
    """How long it may wait for its turn before it is `overloaded`, seconds."""


class Batch(Struct, forbid_unknown_fields=True, frozen=True):
    calls: list[Call]
    """Answered in this order, or by index where results are streamed."""


class Notebook(Struct, forbid_unknown_fields=True, frozen=True):
    cells: Annotated[list[str], Meta(min_length=1, max_length=MAX_CELLS)]
    """Run one after another in a session that ends with the last; an error does not stop those after it."""
    id: str = ""
    """Comes back in each response."""
    files: Files = {}
    """Written before the first cell; see Call."""
    fetch: list[str] = []
    """Files to send back after the last cell, relative to the working directory."""
    seed: Seed | None = None
    """See Call; random numbers go on from cell to cell."""
    limits: CallLimits = NO_LIMITS
    """What each cell may use."""
    patience_seconds: Positive | None = None
    """See Call; the cells wait together, once."""


class OpenSession(Struct, forbid_unknown_fields=True, frozen=True):
    limits: CallLimits = NO_LIMITS
    """What each cell may use."""
    seed: Seed | None = None
    """Seeds random numbers before the first cell; null draws a fresh seed."""
    idle_seconds: Positive | None = None
    """After so long without a cell the session is forgotten; at most, and by default, what the operator allows."""


class Cell(Struct, forbid_unknown_fields=True, frozen=True):
    code: str
    """Python source; it sees what committed cells before it left."""
    id: str = ""
    """Comes back in the response."""
    commit: bool = True
    """Whether later cells see what it left."""
    files: Files = {}
    """Written before it; see Call."""
    fetch: list[str] = []
    """Files to send back after it, relative to the working directory."""
    patience_seconds: Positive | None = None
    """See Call."""


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
    """Raises BadRequest for a limit over the operator's, and for a file that is not base64."""
    limits, files = limits_of(call.limits, settings), files_of(call.files)
    return Request(
        id=call.id,
        code=call.code,
        stdin=call.stdin,
        files=files,
        fetch=call.fetch,
        seed=seed_of(call.seed),
        limits=limits,
    )


def seed_of(asked: int | None) -> int:
    """A fresh one where none is asked for."""
    return random.getrandbits(63) if asked is None else asked


def files_of(files: Files) -> Mapping[str, str | bytes]:
    """Raises BadRequest for what is not base64."""
    return {path: given if isinstance(given, str) else unpacked(path, given.base64) for path, given in files.items()}


def unpacked(path: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):  # the latter: characters beyond ASCII
        raise BadRequest(f"file {path!r} is not base64; send text as a string of its own") from None


def limits_of(asked: CallLimits, settings: Settings) -> Limits:
    if asked is NO_LIMITS:
        return settings.limits
    given = {name: value for name in CallLimits.__struct_fields__ if (value := getattr(asked, name)) is not None}
    if "wall_seconds" in given and "cpu_seconds" not in given:
        given["cpu_seconds"] = given["wall_seconds"]  # more CPU than time is of use to threads only
    for name, most in (("wall_seconds", settings.max_wall_seconds), ("cpu_seconds", settings.max_wall_seconds)):
        refuse_above(given, name, most, "--max-wall-seconds")
    refuse_above(given, "memory_bytes", settings.max_memory_bytes, "--max-memory-mb")
    if given.get("output_bytes", 0) > MAX_OUTPUT_BYTES:
        raise BadRequest(f"limit output_bytes is at most {MAX_OUTPUT_BYTES} here, got {given['output_bytes']}")
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
