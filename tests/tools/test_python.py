"""How the sandbox's words become the project's: statuses, streams, and whose fault it was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rocstar.errors import SandboxUnavailable
from rocstar.sandbox.call import Call, Limits, ProgramOutcome, Response, ServiceOutcome
from rocstar.sandbox.client import SandboxClient
from rocstar.tools.notebook import NotebookTool
from rocstar.tools.python import STATUS, PythonTool
from rocstar.types import Status, ToolCall
from tests.sandbox_service.support import running


@pytest.fixture(scope="module")
def client() -> Iterator[SandboxClient]:
    with SandboxClient.start(slots=2, preload=()) as sandbox:
        yield sandbox


class Answering:
    """A runner that answers every call the same way."""

    def __init__(self, outcome: ProgramOutcome | ServiceOutcome) -> None:
        self.outcome = outcome

    async def run(self, call: Call) -> Response:
        return Response(id=call.id, outcome=self.outcome, message="because")


def call(code: str, stdin: str | None = None) -> ToolCall:
    arguments = {"code": code} | ({} if stdin is None else {"input": stdin})
    return ToolCall(id="0", tool="python", arguments=arguments, raw="")


@pytest.mark.parametrize("outcome", list(ServiceOutcome))
async def test_service_outcomes_are_raised_and_say_what_happened(outcome: ServiceOutcome) -> None:
    with pytest.raises(SandboxUnavailable, match="because"):
        await PythonTool(Answering(outcome), Limits()).run(call("1"))


@pytest.mark.parametrize("outcome", list(ProgramOutcome))
async def test_program_outcomes_are_results(outcome: ProgramOutcome) -> None:
    result = await PythonTool(Answering(outcome), Limits()).run(call("1"))
    assert result.status is STATUS[outcome]
    assert result.is_error is (outcome is not ProgramOutcome.OK)


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("def f(:", Status.CODE_ERROR, "SyntaxError"),
        ("import sys; sys.exit(3)", Status.CODE_ERROR, "status 3"),
        ("import ctypes; ctypes.string_at(0)", Status.CODE_ERROR, "SIGSEGV"),
        ("x = bytearray(10**10)", Status.MEMORY_LIMIT, "MemoryError"),
        ("print('x' * 10**6)", Status.OUTPUT_LIMIT, ""),
        ("print('error')", Status.OK, ""),
    ],
)
async def test_failures_of_programs_get_their_status_and_a_reason(
    client: SandboxClient, code: str, status: Status, said: str
) -> None:
    result = await PythonTool(client, Limits()).run(call(code))
    assert result.status is status
    assert said in result.stderr
    assert result.isolation == client.info().isolation


async def test_input_value_and_seed_reach_and_leave_the_program(client: SandboxClient) -> None:
    tool = PythonTool(client, Limits())
    code = "import random\nprint(input())\nrandom.random()"
    first, again = await asyncio.gather(*(tool.run(call(code, "hello\n"), seed=5) for _ in range(2)))
    assert first.stdout == "hello\n"
    assert first.value == again.value


@pytest.mark.parametrize("name", ["python", "jupyter_code", "my_tool"])
def test_tool_answers_to_all_known_names_whatever_it_is_called(name: str) -> None:
    spec = PythonTool(Answering(ProgramOutcome.OK), Limits(), name=name).spec
    assert spec.name == name
    assert {*spec.aliases, spec.name} >= {
        "python",
        "execute_python_code_with_standard_io",
        "execute_python_code",
        "python_code_with_standard_io",
        "jupyter_code",
    }


@pytest.mark.parametrize("tool", [PythonTool, NotebookTool])
@pytest.mark.parametrize("limits", [Limits(wall_seconds=1e9), Limits(memory_bytes=2**60), Limits(processes=9999)])
async def test_limits_that_a_sandbox_refuses_are_no_mistake_of_the_model(
    client: SandboxClient, limits: Limits, tool: type[PythonTool | NotebookTool]
) -> None:
    with pytest.raises(SandboxUnavailable, match=r"does not take what \[sandbox\] sets: limit \w+ must be from"):
        await tool(client, limits).run(call("1"))


async def test_limits_above_an_operators_are_no_mistake_of_the_model() -> None:
    with running(max_wall_seconds=3.0, wall_seconds=2.0) as url, SandboxClient.connect([url]) as service:
        with pytest.raises(SandboxUnavailable, match="limit wall_seconds is at most 3 here, got 5; the operator's"):
            await PythonTool(service, Limits()).run(call("1"))
        assert (await PythonTool(service, Limits(wall_seconds=3.0, cpu_seconds=3.0)).run(call("1"))).value == "1"
