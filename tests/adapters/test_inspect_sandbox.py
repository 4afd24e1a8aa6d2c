"""inspect_ai runs its own checks of sandbox providers, and a task with a scripted model, in our sandbox."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest.importorskip("inspect_ai", reason="inspect_ai has an environment of its own: scripts/adapters_env")
# An evaluation imports it first, from so deep that on a busy machine CPython 3.11.7 ended with a SystemError ("AST
# constructor recursion depth mismatch").
pytest.importorskip("acp", reason="inspect_ai asks for it")

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash, python
from inspect_ai.util import (
    OutputLimitExceededError,
    SandboxEnvironmentSpec,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
)
from inspect_ai.util._sandbox.self_check import *  # noqa: F403  # inspect_ai's conformance suite for providers

from rocstar.adapters.inspect_ai import RocstarSandbox, Settings, settings_of
from rocstar.errors import ConfigError
from rocstar.sandbox.call import SandboxDown
from tests.sandbox_service.support import running

SETTINGS = Settings(wall_seconds=20)
IMPOSSIBLE = {
    "test_exec_as_user": "there is one user",
    "test_exec_input_large": "50 MiB in one request are more than a sandbox takes",
}
PROMPT = "Compute 17 ** 3 with your tools."


@pytest.fixture(scope="module", autouse=True)
def client() -> Iterator[None]:
    """One sandbox for all tests: the next task finds the client of the first."""
    asyncio.run(RocstarSandbox.task_init("first", SETTINGS))
    yield
    asyncio.run(RocstarSandbox.task_cleanup("first", SETTINGS, True))
    assert not RocstarSandbox._clients


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[RocstarSandbox]:
    if why := IMPOSSIBLE.get(request.node.originalname):
        request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    async with sandbox(SETTINGS) as opened:
        yield opened


@asynccontextmanager
async def sandbox(settings: Settings) -> AsyncIterator[RocstarSandbox]:
    await RocstarSandbox.task_init("t", settings)
    environments = await RocstarSandbox.sample_init("t", settings, {})
    try:
        yield environments["default"].as_type(RocstarSandbox)
    finally:
        await RocstarSandbox.sample_cleanup("t", settings, environments, False)
        await RocstarSandbox.task_cleanup("t", settings, True)


def task(folder: Path, sandbox: object = ("rocstar", None), **tools: str) -> EvalLog:
    """A log of one sample whose scripted model makes these calls, one a turn, and then answers."""
    calls = [
        ModelOutput.for_tool_call("mockllm/model", name, {"command" if name == "bash" else "code": text})
        for name, text in tools.items()
    ]
    said = [*calls, ModelOutput.from_content("mockllm/model", "It is 4913.")]
    for output in said:
        output.usage = ModelUsage()  # else it is counted with a vocabulary from the network
    (log,) = eval(
        Task(
            dataset=[Sample(id="cube", input=PROMPT, target="4913", files={"given.txt": "seventeen"})],
            solver=[use_tools(python(), bash()), generate()],
            scorer=includes(),
            sandbox=sandbox if isinstance(sandbox, SandboxEnvironmentSpec) else "rocstar",
        ),
        model=get_model("mockllm/model", custom_outputs=said),
        display="none",
        log_dir=str(folder),
    )
    return log


def tool_texts(log: EvalLog) -> list[str]:
    assert log.samples and log.status == "success", log.error
    return [message.text for message in log.samples[0].messages if message.role == "tool"]


def test_a_task_runs_its_tools_in_our_sandbox(tmp_path: Path) -> None:
    look = "import os, sys; print(17 ** 3, open('given.txt').read(), os.listdir('/'))"
    first, second = tool_texts(
        task(tmp_path, python=look, bash="cat given.txt; python3 -c 'import sys; print(sys.prefix)'")
    )
    assert first.startswith("4913 seventeen [") and "home" not in first
    assert second == f"seventeen{sys.prefix}\n"


def test_a_task_runs_its_tools_in_a_service(tmp_path: Path) -> None:
    with running() as url:
        settings = Settings(url=url, wall_seconds=10)
        log = task(tmp_path, SandboxEnvironmentSpec("rocstar", settings), python="print('over there')")
    assert tool_texts(log) == ["over there\n"]


def test_the_sandbox_is_found_by_its_entry_point() -> None:
    (point,) = entry_points(group="inspect_ai", name="rocstar")
    assert point.load().RocstarSandbox is RocstarSandbox


def test_what_a_person_gives_is_settings_or_nothing() -> None:
    assert settings_of(None) == Settings()
    for wrong in ("compose.yaml", "http://box:8700", Settings):
        with pytest.raises(ConfigError, match="takes rocstar"):
            settings_of(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wall_second"):
        RocstarSandbox.config_deserialize({"wall_second": 3})


async def test_samples_see_nothing_of_each_other_and_files_last() -> None:
    async with sandbox(SETTINGS) as one, sandbox(SETTINGS) as other:
        await one.write_file("deep/down/note.txt", "mine")
        assert (await one.exec(["cat", "deep/down/note.txt"])).stdout == "mine"
        assert (await other.exec(["ls", "-A"])).stdout == ""
        assert (await one.exec(["ls", "-A"])).stdout == "deep\n"


async def test_another_user_and_a_missing_command_are_told() -> None:
    async with sandbox(SETTINGS) as box:
        with pytest.raises(SandboxUserUnsupportedError, match="root"):
            await box.exec(["id"], user="root")
        missing = await box.exec(["no-such-command"])
        assert (missing.returncode, missing.success) == (127, False) and "no-such-command" in missing.stderr
        with pytest.raises(NotImplementedError):
            await box.connection()


async def test_a_flood_of_output_is_an_error_and_the_files_stay() -> None:
    async with sandbox(SETTINGS) as box:
        await box.write_file("kept.txt", "here")
        with pytest.raises(OutputLimitExceededError) as told:
            await box.exec(["head", "-c", "9000000", "/dev/zero"])
        assert told.value.truncated_output
        assert await box.read_file("kept.txt") == "here"


async def test_what_a_command_leaves_running_does_not_hold_it_up() -> None:
    async with sandbox(SETTINGS) as box:
        result = await box.exec(["sh", "-c", "sleep 100 & echo started"], timeout=15)
        assert (result.returncode, result.stdout) == (0, "started\n")


async def test_a_command_without_a_timeout_ends_at_the_sandboxs_own() -> None:
    async with sandbox(SETTINGS.model_copy(update={"wall_seconds": 1.0})) as box:
        with pytest.raises(TimeoutError, match="ran longer than 1 seconds"):
            await box.exec(["sleep", "60"])
        assert (await box.exec(["echo", "on"])).stdout == "on\n"


async def test_a_command_that_takes_too_much_memory_fails_alone() -> None:
    async with sandbox(SETTINGS) as box:
        result = await box.exec(["python3", "-c", "x = bytearray(5 * 2**30); print(len(x))"])
        assert not result.success and "MemoryError" in result.stderr
        assert (await box.exec(["echo", "on"])).stdout == "on\n"


async def test_an_outage_is_an_exception_and_never_a_result() -> None:
    settings = SETTINGS.model_copy(update={"wall_seconds": 19.0})
    async with sandbox(settings) as box:
        RocstarSandbox._clients[settings].close()
        with pytest.raises(SandboxUnavailableError, match="closed"):
            await box.exec(["echo", "hi"])
        with pytest.raises(SandboxUnavailableError):
            await box.read_file("x")


async def test_a_service_that_is_not_there_ends_a_task_before_its_samples() -> None:
    with pytest.raises(SandboxDown):
        await RocstarSandbox.task_init("t", Settings(url="http://127.0.0.1:9"))
