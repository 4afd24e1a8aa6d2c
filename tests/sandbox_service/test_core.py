"""How calls are run for their callers, over a scripted client."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from rocstar.sandbox.call import Call, ProgramOutcome, Response, SandboxDown, ServiceOutcome
from rocstar.sandbox.service.core import Service, Settings, failed
from tests.sandbox_service.support import ScriptedClient, settle


def service_over(client: Any, seen: list[Response] | None = None) -> Service:
    return Service(Settings(), cast(Any, client), (seen if seen is not None else []).append)


def call(number: int, patience_seconds: float = 60.0) -> Call:
    return Call(id=str(number), code="", patience_seconds=patience_seconds)


def id_of(item: object, response: Response) -> str:
    return response.id


async def test_of_a_batch_four_calls_for_each_slot_are_under_way_and_leaving_it_ends_them() -> None:
    client = ScriptedClient(slots=1)
    task = asyncio.ensure_future(service_over(client).run_all(range(20), call, id_of))
    await settle()
    assert sorted(client.calls) == ["0", "1", "2", "3"]
    client.answer("2")
    await settle()
    assert sorted(client.calls) == ["0", "1", "3", "4"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(client.cancelled) == ["0", "1", "3", "4"]


async def test_patience_of_a_batch_counts_from_its_arrival_and_what_has_a_response_is_not_run() -> None:
    client = ScriptedClient(slots=1)
    items: list[Call | Response] = [call(number, 0.0 if number == 4 else 60.0) for number in range(5)]
    items.append(failed("5", ProgramOutcome.REJECTED, "no"))
    task = asyncio.ensure_future(service_over(client).run_all(items, lambda item: item, id_of))
    for number in (0, 3, 2, 1, 4):
        await settle()
        client.answer(str(number))
    assert await task == ["0", "1", "2", "3", "4", "5"]
    assert client.patience["4"] == 0.0 and 59.0 < client.patience["0"] <= 60.0 and "5" not in client.patience


@pytest.mark.parametrize("error", [SandboxDown("gone"), RuntimeError("a bug")])
async def test_whatever_fails_there_is_exactly_one_response(error: Exception) -> None:
    class Broken(ScriptedClient):
        async def run(self, call: Call) -> Response:
            raise error

    seen: list[Response] = []
    response = await service_over(Broken(), seen).run(call(1))
    assert (response.id, response.outcome, seen) == ("1", ServiceOutcome.INTERNAL, [response])
