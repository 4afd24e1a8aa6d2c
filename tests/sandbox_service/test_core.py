"""How calls are run for their callers, over a scripted client."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, cast

import pytest

from rocstar.sandbox.call import Call, ProgramOutcome, Response, SandboxDown, ServiceOutcome
from rocstar.sandbox.service.core import Service, Settings, failed
from tests.sandbox_service.support import ScriptedClient, settle


def service_over(client: Any, seen: list[Response] | None = None) -> Service:
    return Service(Settings(), cast(Any, client), (seen if seen is not None else []).append)


def call(number: int, patience_seconds: float = 60.0) -> Call:
    return Call(id=str(number), code="", patience_seconds=patience_seconds)


async def test_of_a_batch_four_calls_for_each_slot_are_under_way_and_a_slow_reader_holds_it() -> None:
    client = ScriptedClient(slots=1)
    async with aclosing(service_over(client).run_all(range(20), call)) as finished:
        first = anext(finished)
        task = asyncio.ensure_future(first)
        await settle()
        assert sorted(client.calls) == ["0", "1", "2", "3"]
        client.answer("2")
        assert (await task)[0] == 2
        for _ in range(10):
            await settle()
            for name in list(client.calls):
                client.answer(name)
        assert len(client.patience) <= 1 + 4 + 4 + 4, "what is read, what is under way, what waits to be read"
    assert client.calls == {} or set(client.cancelled) == set(client.calls)


async def test_patience_of_a_batch_counts_from_its_arrival() -> None:
    client = ScriptedClient(slots=1)
    items = [call(number, patience_seconds=0.0 if number == 4 else 60.0) for number in range(5)]
    async with aclosing(service_over(client).run_all(items, lambda item: item)) as finished:
        task = asyncio.ensure_future(anext(finished))
        await settle()
        client.answer("0")
        await task
        await settle()
        assert client.patience["4"] == 0.0
        assert 59.0 < client.patience["0"] <= 60.0


async def test_what_has_a_response_already_is_not_run() -> None:
    client = ScriptedClient()
    rejected = failed("x", ProgramOutcome.REJECTED, "no")
    async with aclosing(service_over(client).run_all([rejected], lambda item: item)) as finished:
        assert [each async for each in finished] == [(0, rejected)]
    assert client.patience == {}


@pytest.mark.parametrize("error", [SandboxDown("gone"), RuntimeError("a bug")])
async def test_whatever_fails_there_is_exactly_one_response(error: Exception) -> None:
    class Broken(ScriptedClient):
        async def run(self, call: Call) -> Response:
            raise error

    seen: list[Response] = []
    response = await service_over(Broken(), seen).run(call(1))
    assert (response.id, response.outcome, seen) == ("1", ServiceOutcome.INTERNAL, [response])
