"""`sandbox.tools`: which tools attempts share, which they have of their own, and names that clash."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocstar.errors import ConfigError
from rocstar.sandbox.call import Limits
from rocstar.sandbox.client import SandboxClient
from rocstar.tools.choose import BUILT_IN, Tools, make_tools
from rocstar.tools.notebook import NotebookTool
from rocstar.tools.python import PythonTool
from rocstar.types import Status, ToolCall

OWN = '''
import time
from rocstar.protocols import ToolSpec
from rocstar.types import Status, ToolResult

def lookup(city: str) -> str:
    """Says where a city is."""
    time.sleep(60 if city == "nowhere" else 0)
    return f"{city} is in France"

def python(code: str) -> str:
    """Has a name that is taken."""
    return code

def jupyter_code(code: str) -> str:
    """Has a name that python answers to as well."""
    return code

class Echo:
    spec = ToolSpec(name="echo", description="Says it again.", parameters={"type": "object", "properties": {}})
    async def run(self, call, *, seed=0):
        return ToolResult(call_id=call.id, status=Status.OK, stdout=call.raw)

class Counter(Echo):
    spec = ToolSpec(name="count", description="Counts its calls.", parameters={"type": "object", "properties": {}})
    def __init__(self):
        self.calls = 0
    async def run(self, call, *, seed=0):
        self.calls += 1
        return ToolResult(call_id=call.id, status=Status.OK, stdout=str(self.calls))
    async def close(self):
        pass

class Runs:
    spec = None

class Wants(Echo):
    def __init__(self, key): pass
'''


def chosen(names: list[str], folder: Path | None = None, limits: Limits | None = None) -> Tools:
    sandbox = SandboxClient(daemons=0)  # nothing is run in it
    return make_tools(names, sandbox, limits or Limits(), tool_name="python", folders=[folder] if folder else [])


@pytest.fixture
def own(modules: Path) -> Path:
    (modules / "own_tools_module.py").write_text(OWN)
    return modules


def test_programs_are_shared_and_each_attempt_has_its_own_notebook() -> None:
    assert [type(tool) for tool in chosen(["python"]).shared] == [PythonTool]
    notebooks = chosen(["notebook"])
    (first,), (second,) = notebooks.own(), notebooks.own()
    assert isinstance(first, NotebookTool) and first is not second
    assert notebooks.shared == () and [spec.name for spec in notebooks.specs] == ["python"]
    assert chosen([]) == Tools(shared=(), makers=(), specs=())


async def test_tools_of_the_users_own_stand_in_the_order_of_the_recipe(own: Path) -> None:
    names = ["own_tools_module:Counter", "own_tools_module:lookup", "python", "own_tools_module:Echo"]
    tools = chosen(names, own)
    assert [spec.name for spec in tools.specs] == ["count", "lookup", "python", "echo"]
    assert [tool.spec.name for tool in tools.shared] == ["lookup", "python", "echo"]
    call = ToolCall(id="c", tool="", arguments={"city": "Paris"}, raw="again")
    assert (await tools.shared[0].run(call)).stdout == "Paris is in France"
    assert (await tools.shared[2].run(call)).stdout == "again"
    for _ in range(2):  # each attempt counts from one
        (counter,) = tools.own()
        assert (await counter.run(call)).stdout == "1"


async def test_a_function_has_the_time_and_the_output_of_a_program(own: Path) -> None:
    (tool,) = chosen(["own_tools_module:lookup"], own, Limits(wall_seconds=0.05, output_bytes=4)).shared
    result = await tool.run(ToolCall(id="c", tool="lookup", arguments={"city": "nowhere"}, raw=""))
    assert result.status is Status.TIMEOUT
    result = await tool.run(ToolCall(id="d", tool="lookup", arguments={"city": "Paris"}, raw=""))
    assert (result.status, result.stdout, result.truncated_bytes) == (Status.OUTPUT_LIMIT, "Pari", 14)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["pyton"], f"'pyton', which is none of {', '.join(BUILT_IN)}; did you mean 'python'"),
        (["weekday"], r"python, notebook\. A tool of your own is written package\.module:name or file\.py:name"),
        (["python", "notebook"], "'python' and 'notebook' both answer to the name 'python'"),
        (["python", "own_tools_module:python"], "'python' and 'own_tools_module:python' both answer to the name"),
        (["own_tools_module:jupyter_code", "python"], "both answer to the name"),
        (["own_tools_module:lookup", "own_tools_module:lookup"], "both answer to the name 'lookup'"),
        (["own_tools_module:Runs"], "own_tools_module:Runs' has no run; give it `spec` and `run`"),
        (["own_tools_module:Wants"], r"Wants' should take \(\), but it takes \(key\)"),
        (["own_tools_module:lokup"], "the nearest is 'lookup'"),
    ],
)
def test_what_does_not_fit_is_one_sentence(own: Path, names: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        chosen(names, own)
    assert "\n" not in str(refused.value)
