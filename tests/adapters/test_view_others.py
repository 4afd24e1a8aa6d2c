"""The page opens files that TRL, verl and inspect_ai themselves wrote."""

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

pytest.importorskip("trl", reason="TRL has an environment of its own: scripts/adapters_env")

import torch
from datasets import Dataset
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log, write_eval_log
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Target, match, mean, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import Tool, ToolError, tool
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rocstar.record.rollouts import read_table
from tests.view.test_others import opened

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SUMS = [Sample(id="2+3", input="2 + 3?", target="5"), Sample(id="hostile", input="<b>4 + 4?</b>", target="8")]
LONG = "<script>alert(1)</script>\u202e" + "x" * 5000  # inspect_ai keeps long texts apart from the messages


LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789?*:ĠĊ"  # the last two stand for a space and a new line in byte-level BPE
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = 64
"""Of the embedding; more than there are tokens, as in many models."""
LIMIT = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a tokenizer of single letters, so that every text is one row of tokens."""
    vocabulary = {letter: number for number, letter in enumerate([*MARKS, *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=MARKS[2], pad_token=MARKS[0], additional_special_tokens=[MARKS[1]],
        chat_template=TEMPLATE,
    )  # fmt: skip
    torch.manual_seed(0)
    made = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=ROWS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=False,
        )
    )  # fmt: skip
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = 2, 0
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def trained(model: Path, target: Path, prompts: list[Any], rewards: Any, **settings: Any) -> None:
    unwanted = [0, 1, *range(len(MARKS) + len(LETTERS), ROWS)]
    usual = {
        "use_cpu": True, "bf16": False, "report_to": [], "seed": 0, "learning_rate": 1e-2, "max_steps": 3,
        "logging_steps": 1, "save_steps": 1, "log_completions": True, "num_completions_to_print": 1,
        "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": LIMIT, "disable_tqdm": True,
        "generation_kwargs": {"suppress_tokens": unwanted},
    }  # fmt: skip
    config = GRPOConfig(output_dir=str(target), **{**usual, **settings})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(model), reward_funcs=rewards, args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer,
    ).train()  # fmt: skip


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def dumper_of_verl() -> Any:
    """The methods of verl's trainer that write a dump, out of a module whose other imports are not all installed."""
    import verl

    place = Path(verl.__file__).parent / "trainer" / "ppo" / "ray_trainer.py"
    (trainer,) = (one for one in ast.parse(place.read_text()).body if getattr(one, "name", "") == "RayPPOTrainer")
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
        epochs=epochs,
        max_samples=1,
        display="none",
        log_dir=str(folder / "logs"),
        fail_on_error=False,
    )
    return Path(log.location.removeprefix("file://"))


def short(completions: list[Any], **columns: Any) -> list[float]:
    return [len(one[0]["content"]) / 10 for one in completions]


def even(completions: list[Any], log_extra: Any, **columns: Any) -> list[float]:
    log_extra("length", [len(one[0]["content"]) for one in completions])
    return [float(len(one[0]["content"]) % 2 == 0) for one in completions]


def test_completions_that_trl_logged(model: Path, tmp_path: Path) -> None:
    trained(model, tmp_path / "run", [asked("1?"), asked("2?"), asked("3?")], [short, even], max_steps=2)
    theirs = [read_table(file).to_pylist() for file in sorted((tmp_path / "run" / "completions").glob("*.parquet"))]
    with opened(tmp_path / "run", tmp_path) as page:
        assert (page.name, page.left_out) == ("file:completions", [])
        rows = page.rows()
        assert [row["step"] for row in rows] == [1] * len(theirs[0]) + [2] * len(theirs[1])
        wanted = sorted((row["step"], row["short"] + row["even"], row["advantage"]) for some in theirs for row in some)
        found = sorted((row["step"], row["reward"], row["advantage"]) for row in rows)
        assert found == [pytest.approx(one) for one in wanted]
        assert (
            {row["method"] for row in rows} == {"short + even"} and rows[0]["sibling"] == 0 and rows[3]["sibling"] == 3
        )
        shown = page.attempt(rows[0])
        text = next(
            row["completion"][0]["content"] for row in theirs[0] if row["prompt"][0]["content"] == shown["question"]
        )
        assert shown["turns"][0]["text"] == text and shown["fields"]["length"] == len(text)


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


@pytest.mark.parametrize("ending", ["eval", "json"])
def test_a_log_of_inspect(tmp_path: Path, ending: str) -> None:
    outputs = [called("2 + 3"), said("5"), called("4 / 4"), said(LONG), said("5"), said("8")]
    log = read_eval_log(str(log_of(tmp_path, outputs)))
    file = tmp_path / f"log.{ending}"
    write_eval_log(log, str(file))
    with opened(file, tmp_path) as page:
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
    with opened(log_of(tmp_path / "b", [said("5")], epochs=1), tmp_path / "b") as page:
        (broken,) = page.rows(fault="yes")
        assert "ran out of values" in broken["fault"] and broken["reward"] is None
