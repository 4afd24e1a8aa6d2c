"""How much a worker holds of its callers' sessions, with a real sandbox and no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.service import sessions
from rocstar.sandbox.service.admission import Admission, Policy
from rocstar.sandbox.service.hop import Hop
from rocstar.sandbox.service.ledger import Ledger
from rocstar.sandbox.service.sessions import SessionTable
from rocstar.sandbox.service.settings import Settings
from rocstar.sandbox.service.shapes import BadRequest, Base64, Cell, OpenSession


@pytest.fixture(scope="module")
def client() -> Iterator[SandboxClient]:
    with SandboxClient.start(slots=2, preload=()) as sandbox:
        yield sandbox


@pytest.fixture
def table(client: SandboxClient) -> SessionTable:
    row = Ledger(1).row(0)
    policy = Policy(slots=2, runnable=2, young_seconds=1.0, max_queue=100)
    return SessionTable(client, Admission(client, policy, row), Settings(max_sessions=3), row)


async def test_a_history_grows_by_what_is_committed_and_only_so_far(
    table: SessionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_HISTORY_BYTES", 8000)
    held = table.open(OpenSession())
    large = Base64("A" * 4000)
    await table.run(held, Cell(code="x = 1", files={"a": large}, commit=False))
    assert (held.size, table.size) == (0, 0)
    await table.run(held, Cell(code="x = 1", files={"a": large}))
    assert 4000 < held.size == table.size < 8000
    with pytest.raises(BadRequest, match="open another session") as refused:
        await table.run(held, Cell(code="x = 2", files={"a": large}))
    assert refused.value.status == 413
    assert (await table.run(held, Cell(code="x"))).value == "1"
    await table.close(held)
    assert table.size == 0


async def test_what_all_sessions_remember_together_is_bounded_and_branches_count(
    table: SessionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = table.open(OpenSession())
    await table.run(held, Cell(code=f"x = {'1' * 4000}"))
    monkeypatch.setattr(sessions, "MAX_HELD_BYTES", 2 * held.size + 2000)
    twin = await table.branch(held)
    assert table.size == 2 * held.size
    for refused in (lambda: table.branch(held), lambda: table.run(twin, Cell(code=f"x = {'1' * 4000}"))):
        with pytest.raises(BadRequest, match="close one") as told:
            await refused()
        assert told.value.status == 503 and told.value.retry_after is not None
    await table.close(held)
    assert (await table.run(twin, Cell(code=f"x = {'1' * 4000}"))).committed
    await table.close(twin)
    assert table.size == 0 and not table.held


async def test_so_many_cells_of_one_session_wait_and_no_more(
    table: SessionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_WAITING", 3)
    held = table.open(OpenSession())
    cells = [asyncio.create_task(table.run(held, Cell(code="import time; time.sleep(0.3)"))) for _ in range(6)]
    ends = await asyncio.gather(*cells, return_exceptions=True)
    refused = [end for end in ends if isinstance(end, BadRequest)]
    assert len(refused) == 2 and {end.retry_after for end in refused} == {1}
    assert (await table.run(held, Cell(code="1"))).value == "1"
    await table.close(held)


async def test_a_session_closed_while_cells_wait_ends_them_all_and_runs_none(table: SessionTable) -> None:
    held = table.open(OpenSession())
    cells = [asyncio.create_task(table.run(held, Cell(code="import time; time.sleep(60)"))) for _ in range(4)]
    await asyncio.sleep(0.3)
    await table.close(held)
    ends = await asyncio.gather(*cells, return_exceptions=True)
    assert [end.status for end in ends if isinstance(end, BadRequest)] == [404] * 4
    assert (table.admission.running, table.admission.waiting) == (0, 0)


@pytest.mark.parametrize(
    "session",
    [
        "1-" + "a" * 31,
        "1-" + "a" * 33,
        "1-" + "A" * 32,
        "-1-" + "a" * 32,
        "1-" + "a" * 30 + "\r\n",
        "1" * 6 + "-" + "a" * 32,
    ],
)
def test_nothing_but_an_id_reaches_another_worker(session: str) -> None:
    hop = Hop(number=0, workers=9)
    assert hop.other(session) is None
    assert hop.other("1-" + "a" * 32) == 1
    assert hop.other("0-" + "a" * 32) is None and hop.other("9-" + "a" * 32) is None
