"""Requests, responses and host descriptions as JSON objects. Fields are found by name, so new ones travel too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rocstar.sandbox import wire
from rocstar.sandbox.router.link import ENCODE
from rocstar.sandbox.wire import HostInfo, Isolation, Limits, Request, Response, ServiceOutcome

LOST = "lost"  # in place of an outcome: the call has to come again with its session's history
SERVICE_OUTCOMES = frozenset(outcome.value for outcome in ServiceOutcome)


def encoded_request(request: Request, call_id: str) -> bytes:
    message = wire.request_message(request)
    message["id"] = call_id
    return ENCODE(message).encode()


def encoded_cell(message: Mapping[str, Any], call_id: str) -> bytes:
    """A session's cell, as `Session` words it."""
    return ENCODE({**message, "id": call_id}).encode()


def encoded_lost(call_id: str) -> bytes:
    """The node holds nothing of the cell's session."""
    return ENCODE({"id": call_id, "outcome": LOST}).encode()


def parse_request(message: Mapping[str, Any]) -> Request:
    """The inverse of `wire.request_message`. Raises TypeError on anything else."""
    limits = Limits(**{name: message[name] for name in Limits.__slots__ if name in message})
    fields = {name: message[name] for name in Request.__slots__ if name in message}
    return Request(**{**fields, "limits": limits})


def encoded_response(response: Response, call_id: str) -> bytes:
    message = wire.response_message(response)
    message["id"] = call_id
    return ENCODE(message).encode()


def encoded_fault(reason: str, call_id: str) -> bytes:
    """The node's own fault, where there is no response."""
    return ENCODE({"id": call_id, "outcome": ServiceOutcome.INTERNAL, "message": reason}).encode()


def fault_of(message: Mapping[str, Any]) -> str:
    """Why a result says nothing about its program; empty when it does."""
    if message["outcome"] in SERVICE_OUTCOMES:
        return f"it was {message['outcome']} there ({message.get('message', '')})"
    return ""


def info_message(info: HostInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in HostInfo.__slots__}


def parse_info(message: Mapping[str, Any]) -> HostInfo:
    """Raises TypeError or ValueError on what is not a description."""
    fields = {name: message[name] for name in HostInfo.__slots__ if name in message}
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return HostInfo(**{**fields, "isolation": Isolation(message["isolation"])})


def combined(infos: Sequence[HostInfo]) -> HostInfo:
    """Of at least one: the weakest isolation, every failed probe, the sum of slots, what all have preloaded, the slower
    way to fork."""
    return replace(
        infos[0],
        isolation=min(info.isolation for info in infos),
        failed_probes=tuple(sorted({probe for info in infos for probe in info.failed_probes})),
        slots=sum(info.slots for info in infos),
        preload=tuple(name for name in infos[0].preload if all(name in info.preload for info in infos)),
        tiers=tuple(name for name in infos[0].tiers if all(name in info.tiers for info in infos)),
        fork_path=max(info.fork_path for info in infos),
        node=infos[0].node if len(infos) == 1 else "",
    )
