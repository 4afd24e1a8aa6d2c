"""The notebook tool over real sessions: what stays within an attempt, what is never shared, and that it is closed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rocstar.errors import SandboxUnavailable
from rocstar.sandbox.call import ForkRefused, Limits
from rocstar.sandbox.client import SandboxClient, Session
from rocstar.tools.notebook import ENDED, NotebookTool
from rocstar.types import Status, ToolCall

LIMITS = Limits(wall_seconds=20.0, cpu_seconds=20.0)


@pytest.fixture(scope="module")
def client() -> Iterator[SandboxClient]:
    with SandboxClient.start(slots=2, preload=()) as sandbox:
        yield sandbox


def call(code: str, number: int = 0) -> ToolCall:
    return ToolCall(id=f"call-{number}", tool="jupyter_code", arguments={"code": code}, raw="")


async def test_names_stay_within_an_attempt_and_are_never_shared_with_another(client: SandboxClient) -> None:
    async with NotebookTool(client, LIMITS) as one, NotebookTool(client, LIMITS) as other:
        await one.run(call("x = 20"))
        result = await one.run(call("print('seen'); x + 1", 7))
        assert (result.status, result.stdout, result.value, result.call_id) == (Status.OK, "seen\n", "21", "call-7")
        assert (await other.run(call("x"))).status is Status.CODE_ERROR


async def test_other_attempts_may_begin_with_what_one_has(client: SandboxClient) -> None:
    async with NotebookTool(client, LIMITS, name="python") as tool:
        (fresh,) = await tool.fork(1)
        assert (await fresh.run(call("x = 0"))).status is Status.OK
        await tool.run(call("x = [1]"))
        for branch in (fresh, *await tool.fork(2)):
            async with branch:
                result = await branch.run(call("x and x.append(2); x"))
                assert result.value == ("0" if branch is fresh else "[1, 2]") and branch.spec == tool.spec
        await tool.run(call("import os\npipe = os.pipe()"))
        with pytest.raises(ForkRefused, match="descriptor"):  # the program's doing
            await tool.fork(1)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import os; os._exit(3)", Status.CODE_ERROR),
        ("import signal, time; signal.signal(2, signal.SIG_IGN)\nwhile True: time.sleep(0.1)", Status.TIMEOUT),
    ],
    ids=["exit", "will not stop"],
)
async def test_a_cell_that_ends_its_notebook_is_told_so_and_one_that_is_late_keeps_it(
    client: SandboxClient, code: str, status: Status
) -> None:
    async with NotebookTool(client, Limits(wall_seconds=0.5)) as tool:
        late = await tool.run(call("x = 1\nimport time\ntime.sleep(60)"))
        assert late.status is Status.TIMEOUT and ENDED not in late.stderr
        assert (await tool.run(call("x"))).value == "1"
        ended = await tool.run(call(code))
        assert ended.status is status and ended.stderr.endswith(ENDED)
        assert (await tool.run(call("x"))).status is Status.CODE_ERROR, "nothing is run again behind its back"


async def test_a_notebook_that_the_service_lost_goes_on() -> None:
    with SandboxClient.start(slots=1, preload=()) as client:
        async with NotebookTool(client, LIMITS) as tool:
            await tool.run(call("x = 41"))
            client.nodes[0].close("it was killed")
            result = await tool.run(call("x + 1"))
            assert (result.value, result.stderr) == ("42", "")


async def test_the_first_calls_seed_is_the_notebooks(client: SandboxClient) -> None:
    drawn = []
    for first, second in ((5, 1), (5, 2), (6, 1)):
        async with NotebookTool(client, LIMITS) as tool:
            await tool.run(call("import random"), seed=first)
            drawn.append((await tool.run(call("random.random()"), seed=second)).value)
    assert drawn[0] == drawn[1] != drawn[2]


async def test_its_session_is_closed_where_what_uses_it_fails(client: SandboxClient) -> None:
    opened: list[Session] = []

    class Opener:
        def open_session(self, **named: Any) -> Session:
            opened.append(client.open_session(**named))
            return opened[-1]

    with pytest.raises(ZeroDivisionError):
        async with NotebookTool(Opener(), LIMITS) as tool:
            await tool.run(call("x = 1"))
            raise ZeroDivisionError
    assert [session.closed for session in opened] == [True]


async def test_a_closed_notebook_runs_nothing(client: SandboxClient) -> None:
    tool = NotebookTool(client, LIMITS)
    await tool.close()
    with pytest.raises(SandboxUnavailable, match="closed"):
        await tool.run(call("1"))
    await tool.run(ToolCall(id="0", tool="", arguments={}, raw="", parse_error="no JSON"))
    await tool.close()
