"""An evaluation past its fault budget has no result; below it every figure says what is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rocstar.config.sections import Recipe, RolloutSection
from rocstar.dialogue.templates import template_for
from rocstar.errors import RunHalted, SandboxUnavailable
from rocstar.evaluation.evaluate import Evaluation, Protocol, evaluate_policy, name_of, setup_of
from rocstar.evaluation.evaluate import _words_of as setup_words
from rocstar.record.rollouts import attempt_rows
from rocstar.rollout.collect import Roller
from rocstar.support.screen import Screen
from rocstar.types import Problem, Sampling, Stop, ToolCall, ToolResult, Trajectory, Verdict, problem_id
from tests.dialogue.folders import folder_of
from tests.rollout.examples import ANSWER, CODEC, conversation, program, roller
from tests.scripted import ScriptedEngine, ScriptedTool, ScriptedVerifier

PROBLEMS = [Problem(id=problem_id(f"{n}+1?"), question=f"{n}+1?", answer=str(n + 1)) for n in range(20)]
SETUP = {"model": "m"}


class Dead(ScriptedTool):
    """A tool whose service is gone."""

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        raise SandboxUnavailable("the sandbox host died")


def calling(uses_tool: Callable[[str], bool], tool: ScriptedTool | None = None) -> Roller:
    """Attempts at the problems for which `uses_tool` (of the session's name) call the tool before they answer."""

    def script(session: str) -> Sequence[str]:
        return [program("print(2+3)"), ANSWER] if uses_tool(session) else [ANSWER]

    return roller(ScriptedEngine(CODEC, script), conversation(tool) if tool else None)


def of_problem(number: int) -> Callable[[str], bool]:
    return lambda session: PROBLEMS[number].id in session


async def evaluated(made: Roller, budget: float = 0.05, said: Mock | None = None, **protocol: Any) -> Evaluation:
    sampling = Protocol(**{"attempts": 1, "temperature": 1.0, **protocol})
    return await evaluate_policy(made, PROBLEMS, sampling, fault_budget=budget, setup=SETUP, progress=said or Mock())


async def test_greedy_attempts_have_the_same_budget() -> None:
    seen: set[str] = set()

    def greedy_only(session: str) -> bool:
        """The second pass over the problems calls the tool."""
        again = any(session.split("/")[1] == other.split("/")[1] and session != other for other in seen)
        seen.add(session)
        return again

    with pytest.raises(RunHalted, match=r"2 of the 20 attempts.*run\.fault_budget 5%.*the sandbox host died"):
        await evaluated(calling(greedy_only, Dead({})), greedy=True)


async def test_where_every_agent_failed_before_the_model_said_anything_there_is_no_result() -> None:
    async def attempt(problem: Problem, index: int, sampling: Sampling) -> Trajectory:
        whole = await calling(of_problem(0)).attempt(problem, index, sampling)
        return replace(
            whole, turns=(whole.turns if problem in spoken else ()), stop=Stop.AGENT_FAILED, fault="no openai"
        )

    spoken = list[Problem]()
    solver = Mock(codec=CODEC, verifier=ScriptedVerifier(lambda *_: Verdict.WRONG), note=Mock(), attempt=attempt)
    with pytest.raises(RunHalted, match=r"agent failed in every attempt.*before the model said.*RUN\): no openai"):
        await evaluated(solver)
    spoken.append(PROBLEMS[0])
    assert (await evaluated(solver)).result["agent_failed_share"] == 1.0


async def test_below_the_budget_every_figure_names_what_is_missing(tmp_path: Path) -> None:
    said = Mock()
    made = await evaluated(calling(of_problem(3), Dead({})), said=said)
    result = made.result
    assert said.call_args.args == ("sampled", 20, 20, result["accuracy"]["value"])
    assert (result["attempts"], result["environment_failed"]) == (20, 1)
    for name in ("accuracy", "avg@1", "pass@1"):
        assert (result[name]["n"], result[name]["missing"]) == (19, 1)
    made.write(tmp_path / "e", 3, 7)
    rows = attempt_rows(tmp_path / "e" / "samples.parquet", ("policy_version",))
    assert {row["policy_version"] for row in rows} == {7}
    kept = json.loads((tmp_path / "e" / "result.json").read_text())
    assert kept["accuracy"]["missing"] == 1 and kept["setup"] == SETUP


async def test_undecided_attempts_are_in_every_figure_as_not_right_and_their_share_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = {1: Verdict.UNDECIDED, 2: Verdict.UNDECIDED, 3: Verdict.WRONG}
    judge = ScriptedVerifier(lambda problem, trajectory: verdicts.get(int(problem.answer), Verdict.RIGHT))
    made = await evaluated(replace(calling(of_problem(0)), verifier=judge), greedy=True)
    for name in ("accuracy", "avg@1", "pass@1", "greedy"):
        figure = made.result[name]
        assert (figure["value"], figure["n"], figure["undecided"]) == (17 / 20, 20, 2 / 20)
        assert "missing" not in figure
    assert made.result["undecided"] == 2 and made.result["longest_prompt_tokens"] > 0
    assert made.result["reward/parts/half_share"] == 17 / 40
    Screen().figures(made.result)
    shown = capsys.readouterr().out
    assert "20, 10.0% undecided" in shown and re.search(r"reward/parts/half_share +0\.425", shown)
    made.write(tmp_path / "e", 0, 0)
    assert {file.name for file in (tmp_path / "e").iterdir()} == {"samples.parquet", "greedy.parquet", "result.json"}


# What an evaluation is called


def setup(
    problems: Sequence[Problem] = PROBLEMS, recipe: Recipe | None = None, dtype: str = "float32", **protocol: Any
) -> dict[str, Any]:
    recipe = recipe or Recipe()
    sampling = Protocol(**{"attempts": 1, "temperature": 1.0, **protocol})
    facts: dict[str, Any] = {"model": "m", "step": 0, "data": {"path": "a.jsonl", "sha256": "0" * 64}}
    facts["engine"] = {"device": "cpu", "dtype": dtype}
    return setup_of(recipe, recipe.rollout, conversation(), problems, sampling, **facts)


@pytest.mark.parametrize(
    "changed",
    [
        {"problems": PROBLEMS[1:]},
        {"problems": [replace(PROBLEMS[0], answer="7"), *PROBLEMS[1:]]},
        {"attempts": 4},
        {"temperature": 0.5},
        {"seed": 1},
        {"recipe": Recipe(rollout=RolloutSection(max_turns=3))},
        {"recipe": Recipe(rollout=RolloutSection(max_response_tokens=30))},
        {"recipe": Recipe(rollout=RolloutSection(agent="own.py:solve"))},
        {"recipe": Recipe(rollout=RolloutSection(agent_seconds=1.0))},
        {"recipe": Recipe(rollout=RolloutSection(tool_name="code"))},
        {"recipe": Recipe(rollout=RolloutSection(truncated="graded"))},
        {"recipe": Recipe.model_validate({"evaluate": {"verifier": "tool_output"}})},
        {"recipe": Recipe.model_validate({"sandbox": {"timeout_seconds": 1.0}})},
        {"recipe": Recipe.model_validate({"sandbox": {"tools": ["notebook"]}})},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_evaluations_that_differ_have_different_names(changed: dict[str, Any]) -> None:
    assert name_of(setup(**changed), "test") != name_of(setup(), "test")
    assert name_of(setup(), "test") == name_of(setup(), "test")


def test_the_name_is_readable_and_the_setup_says_everything() -> None:
    made = setup(top_k=5)
    assert name_of(made, "test").startswith("test-") and len(name_of(made, "test")) == len("test-") + 8
    assert {"model", "step", "attempts", "temperature", "top_p", "top_k", "seed", "max_turns"} < set(made)
    assert {"max_response_tokens", "template", "verifier", "sandbox", "engine", "versions", "git"} < set(made)
    assert made["data"]["sha256"] == "0" * 64 and made["data"]["problems"] == 20
    assert len(made["template"]["sha256"]) == 64 and made["versions"]["rocstar"]
    assert name_of({**made, "step": 9}, "t", known=("model", "step")) == name_of(made, "t", known=("model", "step"))


PLAIN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_a_model_whose_template_knows_no_tools_is_evaluated_without_tools(tmp_path: Path) -> None:
    template = template_for("model", folder_of(tmp_path, PLAIN), preamble="")
    bare = replace(conversation(), template=template, tools=())
    assert len(setup_words(bare)) == 1
    assert len(setup_words(conversation())) == 2
