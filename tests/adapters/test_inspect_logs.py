"""A log that inspect_ai wrote becomes an evaluation that our page, export and compare read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inspect_ai", reason="inspect_ai has an environment of its own: scripts/adapters_env")

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, read_eval_log, recompute_metrics, write_eval_log
from inspect_ai.model import ChatMessageTool, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Target, accuracy, match, mean, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import Tool, ToolCallError, ToolError, tool

from rocstar.adapters.inspect_logs import import_log
from rocstar.cli import main as cli
from rocstar.errors import DataError
from rocstar.evaluation.compare import compared, read_kept
from rocstar.record.rollouts import read_table
from tests.view.recorded import page, settled

SUMS = [Sample(id="2+3", input="2 + 3?", target="5"), Sample(id="hostile", input="<b>4 + 4?</b>", target="8")]
LONG = "<script>alert(1)</script>\u202e" + "x" * 5000  # inspect_ai keeps long texts apart from the messages


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
        return Score(value=0.5 if "8" in state.output.completion else 1.0)

    return score


@scorer(metrics=[accuracy()])
def listed() -> Any:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value={"a": CORRECT, "b": INCORRECT})

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
        epochs=epochs,
        max_samples=1,
        display="none",
        log_dir=str(folder / "logs"),
        fail_on_error=False,
    )
    return Path(log.location.removeprefix("file://"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An imported log: two problems, two epochs each, three of four right."""
    base = tmp_path_factory.mktemp("inspect")
    # inspect_ai asks for all problems of an epoch before the next epoch.
    outputs = [called("2 + 3"), said("5"), called("4 / 4"), said(LONG), said("5"), said("8")]
    return import_log(log_of(base, outputs), base / "runs")


def rows(folder: Path) -> list[dict[str, Any]]:
    found = read_table(folder / "samples.parquet").to_pylist()
    return [{**row, "turns": json.loads(row["turns"])} for row in found]


def test_figures_are_those_of_inspect(folder: Path) -> None:
    (log,) = (folder.parents[3] / "logs").glob("*.eval")
    theirs = read_eval_log(str(log)).results
    assert theirs is not None
    ours = json.loads((folder / "result.json").read_text())
    assert ours["accuracy"]["value"] == theirs.scores[0].metrics["accuracy"].value == 0.75
    assert (ours["problems"], ours["attempts"], ours["environment_failed"]) == (2, 4, 0)
    assert (ours["setup"]["model"], ours["setup"]["data"]["task"]) == ("mockllm/model", "task")


def test_attempts_have_their_turns_calls_and_errors(folder: Path) -> None:
    sums = [row for row in rows(folder) if row["problem_id"] == "2+3"]
    (with_tool,) = [row for row in sums if row["calls"]]
    call, result = with_tool["turns"][0]["calls"][0], with_tool["turns"][0]["results"][0]
    assert (call["tool"], call["arguments"]) == ("calculator", {"expression": "2 + 3"})
    assert result["stdout"] == "2 + 3 is some number" and result["call_id"] == call["id"]
    assert (with_tool["verdict"], with_tool["stop"], with_tool["response_tokens"]) == ("right", "answered", 14)
    assert with_tool["text"][-1] == "5"
    (failed,) = [row for row in rows(folder) if row["failed_calls"]]
    assert failed["turns"][0]["results"][0]["stderr"] == "no division here"
    assert failed["text"][-1] == LONG and failed["verdict"] == "wrong"


def test_our_page_opens_it(folder: Path, tmp_path: Path) -> None:
    with page(folder.parents[2], tmp_path) as http:
        (source,) = http.get("/api/sources").json()["sources"]
        assert source["kind"] == "evaluation" and source["evals"][0]["accuracy"]["value"] == 0.75
        there = f"/api/run/{source['name']}"
        (wrong,) = settled(http, f"{there}/attempts", verdict="wrong")["rows"]
        shown = http.get(f"{there}/attempt", params={"part": wrong["part"], "step": 0, "row": wrong["row"]}).json()
        assert shown["question"] == "<b>4 + 4?</b>" and shown["turns"][-1]["text"] == LONG
        assert shown["turns"][0]["calls"][0]["result"]["stderr"] == "no division here"
        name = source["evals"][0]["name"]
        told = http.get(f"{there}/evaluation", params={"eval": name, "step": 0}).json()
        assert told["result"]["setup"]["model"] == "mockllm/model"


def test_two_imported_logs_are_paired_and_exported(folder: Path, tmp_path: Path) -> None:
    other = import_log(log_of(tmp_path, [said("5"), said("8"), said("5"), said("8")]), tmp_path / "runs")
    found = compared(read_kept(folder), read_kept(other))
    assert (found["problems"], found["difference"]["value"]) == (2, 0.25)
    written = tmp_path / "out.jsonl"
    assert cli.run(["runs", "export", str(folder), "--format", "messages", "--out", str(written)]) == 0
    messages = [json.loads(line)["messages"] for line in written.read_text().splitlines()]
    assert {"role": "tool", "content": "2 + 3 is some number"}.items() <= messages[0][2].items()


def test_the_command_imports_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = log_of(tmp_path, [said("5"), said("8")], epochs=1)
    asked = ["runs", "import", str(log), "--runs", str(tmp_path / "runs")]
    assert cli.run(asked) == 0
    assert (Path(capsys.readouterr().out.strip()) / "samples.parquet").is_file()
    assert cli.run(asked) == 2 and "is there already" in capsys.readouterr().err


def test_partial_marks_are_wrong_and_keep_their_reward(tmp_path: Path) -> None:
    folder = import_log(log_of(tmp_path, [said("5"), said("8")], partly(), epochs=1), tmp_path)
    assert [(row["verdict"], row["reward"]) for row in rows(folder)] == [("right", 1.0), ("wrong", 0.5)]


def test_an_attempt_that_broke_is_in_no_figure(tmp_path: Path) -> None:
    folder = import_log(log_of(tmp_path, [said("5")], epochs=1), tmp_path)  # the script ends, so the second one fails
    result = json.loads((folder / "result.json").read_text())
    assert (result["environment_failed"], result["accuracy"]["value"]) == (1, 1.0)
    (broken,) = [row for row in rows(folder) if row["stop"] == "environment_failed"]
    assert "ran out of values" in broken["fault"] and broken["verdict"] is None


def test_what_cannot_be_a_verdict_is_refused(tmp_path: Path) -> None:
    log = log_of(tmp_path, [said("5"), said("8")], listed(), match(), epochs=1)
    with pytest.raises(DataError, match=r"listed: the score .* is no number or letter; name another with --scorer"):
        import_log(log, tmp_path)
    assert rows(import_log(log, tmp_path, scorer="match"))[0]["method"] == "match"
    with pytest.raises(DataError, match="no scorer thing"):
        import_log(log, tmp_path / "again", scorer="thing")


@pytest.mark.parametrize("name", ["..", ".", "/../..", "m" * 400, "\0"])
def test_whatever_a_log_calls_its_model_the_attempts_stay_below_the_folder(tmp_path: Path, name: str) -> None:
    folder = import_log(altered(tmp_path, lambda log: setattr(log.eval, "model", name)), tmp_path / "runs")
    assert folder.resolve().parent.parent == (tmp_path / "runs" / "evals").resolve()


def test_what_no_model_wrote_and_no_scorer_marked_is_refused(tmp_path: Path) -> None:
    def unmarked(log: EvalLog) -> None:
        for sample in log.samples or ():
            sample.scores = None

    def endless(log: EvalLog) -> None:
        (log.samples or [])[0].model_usage = {"m": ModelUsage(output_tokens=10**30)}

    with pytest.raises(DataError, match="none of the 2 samples has a score"):
        import_log(altered(tmp_path, unmarked), tmp_path / "runs")
    with pytest.raises(DataError, match=r"1e\+30 output tokens; mend the log's model_usage"):
        import_log(altered(tmp_path, endless), tmp_path / "runs")


BROKEN = {
    "twice in epoch 1": lambda samples: samples.append(samples[0]),
    "epoch 0; epochs count from 1": lambda samples: setattr(samples[0], "epoch", 0),
    r"epoch 1.18059e\+21": lambda samples: setattr(samples[0], "epoch", 2**70),
    "taken -5.0 seconds": lambda samples: setattr(samples[0], "total_time", -5.0),
    "the score 'banana' is no number or letter": lambda samples: setattr(samples[0].scores["match"], "value", "banana"),
}


@pytest.mark.parametrize("told", BROKEN)
def test_a_log_that_contradicts_itself_is_refused(tmp_path: Path, told: str) -> None:
    with pytest.raises(DataError, match=told):
        import_log(altered(tmp_path, lambda log: BROKEN[told](log.samples)), tmp_path / "runs")


def test_an_outage_without_a_message_is_in_no_figure(tmp_path: Path) -> None:
    def out(log: EvalLog) -> None:
        (log.samples or [])[0].messages.append(
            ChatMessageTool(content="", error=ToolCallError(type="sandbox_unavailable", message=""))
        )

    folder = import_log(altered(tmp_path, out), tmp_path / "runs")
    assert [row["stop"] for row in rows(folder)].count("environment_failed") == 1
    assert json.loads((folder / "result.json").read_text())["environment_failed"] == 1


def test_a_log_of_a_task_that_was_cut_short_says_so(tmp_path: Path) -> None:
    folder = import_log(altered(tmp_path, lambda log: setattr(log, "status", "cancelled")), tmp_path / "runs")
    assert json.loads((folder / "result.json").read_text())["setup"]["status"] == "cancelled"


def altered(folder: Path, change: Callable[[EvalLog], None]) -> Path:
    """A log of one attempt at each problem, with something else in it."""
    path = log_of(folder, [said("5"), said("8")], epochs=1)
    log = read_eval_log(str(path))
    change(log)
    other = folder / "altered.json"
    write_eval_log(log, str(other))
    return other


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b'{"version": 2}', b"[[[["])
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, content: bytes) -> None:
    for ending in ("eval", "json"):
        (tmp_path / f"x.{ending}").write_bytes(content)
        with pytest.raises(DataError, match="no log that inspect_ai can read"):
            import_log(tmp_path / f"x.{ending}", tmp_path)


def test_what_runs_export_writes_for_inspect_comes_back(tmp_path: Path, folder: Path) -> None:
    written = tmp_path / "out.json"
    assert cli.run(["runs", "export", str(folder), "--format", "inspect", "--out", str(written)]) == 0
    log = read_eval_log(str(written))
    (given,) = log.results.scores if log.results else ()
    mine = {name: metric.value for name, metric in given.metrics.items()}
    recompute_metrics(log)  # by inspect_ai's own metrics
    (theirs,) = log.results.scores if log.results else ()
    assert mine == {name: pytest.approx(metric.value) for name, metric in theirs.metrics.items()}
    assert read_eval_log(str(written), header_only=True).eval.model == log.eval.model == "mockllm/model"
    assert log.samples and all(sample.messages[0].text == sample.input for sample in log.samples)
    again = rows(import_log(written, tmp_path))
    assert sorted(row["verdict"] for row in again) == sorted(row["verdict"] for row in rows(folder))
    assert sum(row["calls"] for row in again) == 2
