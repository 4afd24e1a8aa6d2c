"""Programs and cells for MCP tools, run by a worker's sandbox or passed on to the worker that holds the session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rocstar.sandbox.service.admission import Admission
from rocstar.sandbox.service.hop import Hop
from rocstar.sandbox.service.mcp_tool import Refused, Runner
from rocstar.sandbox.service.session_api import ROOT
from rocstar.sandbox.service.sessions import SessionTable
from rocstar.sandbox.service.settings import Settings
from rocstar.sandbox.service.shapes import BadRequest, Call, CallLimits, Cell, OpenSession, encode, request_of


def runner_of(settings: Settings, admission: Admission, table: SessionTable, hop: Hop) -> Runner:
    """All of it raises Refused for what is not served."""

    async def run(code: str, stdin: str, wall_seconds: float | None) -> Mapping[str, Any]:
        call = Call(code=code, stdin=stdin, limits=CallLimits(wall_seconds=wall_seconds))
        try:
            ticket = admission.submit(request_of(call, settings), settings.patience_seconds)
        except BadRequest as error:
            raise Refused(str(error)) from None
        return as_answer(await admission.outcome_for(ticket))

    async def open_session() -> str:
        try:
            return table.open(OpenSession()).name
        except BadRequest as error:
            raise Refused(str(error)) from None

    async def run_cell(name: str, code: str) -> Mapping[str, Any]:
        cell = Cell(code=code)
        try:
            if (worker := hop.other(name)) is not None:
                return answered(await hop.ask(worker, "POST", f"{ROOT}/{name}/cells", encode(cell)))
            return as_answer(await table.run(table.find(name), cell))
        except BadRequest as error:
            raise Refused(str(error)) from None

    async def close_session(name: str) -> None:
        try:
            if (worker := hop.other(name)) is not None:
                answered(await hop.ask(worker, "DELETE", f"{ROOT}/{name}", b""))
            else:
                await table.close(table.find(name))
        except BadRequest as error:
            raise Refused(str(error)) from None

    return Runner(run=run, open_session=open_session, run_cell=run_cell, close_session=close_session)


def as_answer(response: object) -> Mapping[str, Any]:
    """As another worker would give it."""
    answer: Mapping[str, Any] = msgspec.json.decode(encode(response))
    return answer


def answered(answer: Any) -> Mapping[str, Any]:
    """What another worker said. Raises Refused."""
    told: Mapping[str, Any] = msgspec.json.decode(answer.body or b"{}")
    if "error" in told:
        raise Refused(told["error"])
    return told
