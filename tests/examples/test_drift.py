"""examples/drift: what its demonstrations show is what its tools say, and a shortened run goes through."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocstar.config.sections import DataSection
from rocstar.dialogue.calls import HERMES
from rocstar.errors import ConfigError
from rocstar.support.plugins import load
from rocstar.tools.function import FunctionTool
from rocstar.types import Demonstration, Status, ToolCall
from tests.tiny_run import Command

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "drift"
SHORT = (
    *("stage.teach.steps=3", "stage.dilute.steps=1", "stage.learn.steps=1"),
    *("sft.batch_rows=8", "rollout.problems_per_step=2", "rollout.attempts_per_problem=4", "resample.keep=2"),
    *("evaluate.problems=3", "rollout.max_response_tokens=40"),
)


def task(**options: Any) -> Any:
    made = load("drift.py:DriftTask", folders=[EXAMPLE])
    return made(DataSection(options=options, pool=50), tool_name="read", seed=1, heldout=20)


def tool(name: str) -> FunctionTool:
    return FunctionTool(load(f"{name}.py:read", folders=[EXAMPLE]), timeout_seconds=5)


def calls_of(demonstration: Demonstration) -> Iterator[tuple[ToolCall, Any]]:
    for turn in demonstration.turns:
        yield from zip(HERMES.parse(turn.text), turn.results, strict=True)


def test_no_problem_to_learn_from_is_held_out_and_all_are_as_before() -> None:
    held, problems = task().heldout(), task().problems()
    assert len(held) == 20 and len(problems) == 50
    assert not {problem.id for problem in held} & {problem.id for problem in problems}
    assert [problem.id for problem in task().problems()] == [problem.id for problem in problems]
    gauges = {demo.problem.id for demo in task(reading=0.5).demonstrations(200)}
    assert not {problem.id for problem in held} & gauges


@pytest.mark.parametrize("options", [{}, {"reading": 0.3, "asking": 0.5, "giving_up": 0.4}, {"chain": 3}])
async def test_demonstrations_show_what_the_tool_says(options: dict[str, Any]) -> None:
    read = tool("gauges")
    for demonstration in task(**options).demonstrations(25):
        for call, shown in calls_of(demonstration):
            said = await read.run(call)
            assert (said.status, said.stdout, said.stderr) == (shown.status, shown.stdout, shown.stderr)


async def test_asking_fails_where_it_cannot_be_done_and_names_the_unit_all_the_same() -> None:
    call = ToolCall(id="c", tool="read", arguments={"gauge": "1234", "unit": "?"}, raw="")
    asked, refused = await tool("gauges").run(call), await tool("closed_gauges").run(call)
    assert (asked.status, refused.status) == (Status.OK, Status.CODE_ERROR)
    assert refused.stderr == f"ValueError: {asked.stdout}\n"
    assert tool("gauges").spec.name == tool("closed_gauges").spec.name == "read"


def test_reading_demonstrations_are_right_and_end_after_the_unit_they_were_told() -> None:
    for demonstration in task(reading=1.0, asking=0.5).demonstrations(50):
        calls = [call for call, _ in calls_of(demonstration)]
        assert 1 <= len(calls) <= 2
        assert f"{{{demonstration.problem.answer}}}" in demonstration.turns[-1].text
    blind = task(reading=0.0, giving_up=1.0, asking=0.0).demonstrations(200)
    right = sum(f"{{{demo.problem.answer}}}" in demo.turns[-1].text for demo in blind)
    assert 3 <= right <= 40  # one unit of twelve, at the first try


def test_a_chain_ends_with_the_value_of_its_last_gauge() -> None:
    value_of = load("gauges.py:value_of", folders=[EXAMPLE])
    for problem in task(chain=3).problems():
        assert problem.answer == value_of(value_of(value_of(problem.metadata["gauge"])))


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.options of .*did you mean reading"):
        task(reeding=1.0)


@pytest.mark.slow
def test_a_shortened_run_goes_through(tmp_path: Path) -> None:
    settings = (f"run.folder={tmp_path}", 'sandbox.tools=["closed_gauges:read"]', *SHORT)
    ended = Command.start(EXAMPLE, "train", "drift.toml", *settings).wait()
    assert ended.code == 0, ended.told
    assert json.loads((tmp_path / "drift" / "summary.json").read_text())["accuracy_after"]["n"] == 3
