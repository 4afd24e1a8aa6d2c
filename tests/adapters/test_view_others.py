"""The page opens files that verl and inspect_ai themselves wrote (of TRL: test_trl.py)."""

from __future__ import annotations

import ast
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inspect_ai", reason="inspect_ai has an environment of its own: scripts/adapters_env")

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log, write_eval_log
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Target, match, mean, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import Tool, ToolError, tool

from rocstar.support.child import uncollected
from tests.view.test_others import opened

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SUMS = [Sample(id="2+3", input="2 + 3?", target="5"), Sample(id="hostile", input="<b>4 + 4?</b>", target="8")]
LONG = "<script>alert(1)</script>\u202e" + "x" * 5000  # inspect_ai keeps long texts apart from the messages


def dumper_of_verl() -> Any:
    """The methods of verl's trainer that write a dump, out of a module whose other imports are not all installed."""
    import verl

    place = Path(verl.__file__).parent / "trainer" / "ppo" / "ray_trainer.py"
    with uncollected():  # Python 3.11 gives up where a finalizer of garbage has Python parsed meanwhile
        parsed = ast.parse(place.read_text())
    (trainer,) = (one for one in parsed.body if getattr(one, "name", "") == "RayPPOTrainer")
    assert isinstance(trainer, ast.ClassDef)
    trainer.body = [
        one for one in trainer.body if re.search("dump|_write_gener|_log_rollout", getattr(one, "name", ""))
    ]
    names: dict[str, Any] = {
        "json": json, "os": os, "ThreadPoolExecutor": ThreadPoolExecutor, "DataProto": verl.DataProto,
        "marked_timer": lambda *given, **more: nullcontext(),
    }  # fmt: skip
    trainer.decorator_list = []
    exec(compile(ast.Module([trainer], []), place, "exec"), names)
    return names["RayPPOTrainer"]


@tool
def calculator() -> Tool:
    async def execute(expression: str) -> str:
        """Evaluate.

        Args:
            expression: What.
        """
        if "/" in expression:
            raise ToolError("no division here")
        return expression + " is some number"

    return execute


@scorer(metrics=[mean()])
def partly() -> Any:
    async def score(state: TaskState, target: Target) -> Score:
        await get_model(role="grader").generate("Is it right?")
        return Score(value=0.5 if "8" in state.output.completion else 1.0)

    return score


def said(text: str) -> ModelOutput:
    return spent(ModelOutput.from_content("mockllm/model", text))


def called(expression: str) -> ModelOutput:
    return spent(ModelOutput.for_tool_call("mockllm/model", "calculator", {"expression": expression}))


def spent(output: ModelOutput) -> ModelOutput:
    output.usage = ModelUsage(output_tokens=7)
    return output


def log_of(folder: Path, outputs: list[ModelOutput], *scorers: Any, epochs: int = 2) -> Path:
    (log,) = eval(
        Task(dataset=SUMS, solver=[use_tools(calculator()), generate()], scorer=list(scorers) or match()),
        model=get_model("mockllm/model", custom_outputs=outputs),
        model_roles={"grader": get_model("mockllm/grader", custom_outputs=[said("yes")] * 2)},
        epochs=epochs,
        max_samples=1,
        display="none",
        log_dir=str(folder / "logs"),
        fail_on_error=False,
    )
    return Path(log.location.removeprefix("file://"))


def test_a_dump_that_verl_wrote(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="verl has an environment of its own: scripts/adapters_env")
    dump = ["user\n1+1", "user\n1+1"], ["2", "3"], ["2", "2"], [1.0, 0.0], {"acc": [True, False], "uid": ["a", "a"]}
    for step in (2, 10):
        dumper_of_verl()._write_generations(*dump, str(tmp_path / "dump"), step)
    with opened(tmp_path / "dump", tmp_path) as page:
        assert [(row["step"], row["sibling"], row["reward"]) for row in page.rows()] == [
            (2, 0, 1.0), (2, 1, 0.0), (10, 0, 1.0), (10, 1, 0.0),
        ]  # fmt: skip
        assert page.attempt(page.rows()[0])["fields"] == {"acc": True, "uid": "a"}


def test_a_log_of_inspect_in_either_form(tmp_path: Path) -> None:
    outputs = [called("2 + 3"), said("5"), called("4 / 4"), said(LONG), said("5"), said("8")]
    log = read_eval_log(str(log_of(tmp_path, outputs)))
    for ending in ("eval", "json"):
        write_eval_log(log, str(file := tmp_path / f"log.{ending}"))
        shows_the_log(file, tmp_path / ending)


def shows_the_log(file: Path, folder: Path) -> None:
    with opened(file, folder) as page:
        assert page.left_out == [] and page.sources[page.name]["about"]["eval"]["model"] == "mockllm/model"
        rows = page.rows()
        assert sorted((row["problem_id"], row["sibling"], row["reward"], row["calls"]) for row in rows) == [
            ("2+3", 0, 1.0, 1), ("2+3", 1, 1.0, 0), ("hostile", 0, 0.0, 1), ("hostile", 1, 1.0, 0),
        ]  # fmt: skip
        (failed,) = [row for row in rows if row["failed_calls"]]
        shown = page.attempt(failed)
        assert shown["turns"][-1]["text"] == LONG and shown["question"] == "<b>4 + 4?</b>" and shown["gold"] == "8"
        assert shown["turns"][0]["calls"][0]["result"]["stderr"] == "no division here"
        assert json.dumps(shown["fields"]["scores"]) and shown["response_tokens"] == 14


def test_partial_marks_and_broken_samples_of_inspect(tmp_path: Path) -> None:
    with opened(log_of(tmp_path, [said("5"), said("8")], partly(), epochs=1), tmp_path) as page:
        assert sorted(row["reward"] for row in page.rows()) == [0.5, 1.0]
        assert page.attempt(page.rows()[0])["response_tokens"] == 7  # without the grader's
    with opened(log_of(tmp_path / "b", [said("5")], epochs=1), tmp_path / "b") as page:
        (broken,) = page.rows(fault="yes")
        assert "ran out of values" in broken["fault"] and broken["reward"] is None
