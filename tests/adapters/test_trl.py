"""TRL trains a real (tiny) model for a few steps with our sandbox as its tool, our verifier as its reward, and RoC."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: scripts/adapters_env")

import torch
from datasets import Dataset
from trl import GRPOConfig

from rocstar.adapters.python_tool import SandboxThread
from rocstar.adapters.rewards import TrlReward
from rocstar.adapters.roc import is_kept
from rocstar.adapters.trl import PythonEnvironment, RocTrainer, attempt_penalty, python_environments, python_tool
from rocstar.errors import ConfigError, SandboxUnavailable
from rocstar.record.rollouts import read_table
from rocstar.types import Reason, Status
from tests.adapters import tiny_model
from tests.sandbox_service.support import running
from tests.view.test_others import opened

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
DRAWN, KEEP, STEPS = 8, 4, 2


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SandboxThread]:
    opened = SandboxThread()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def warm(sandbox: SandboxThread) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    return tiny_model.make([PythonEnvironment(sandbox).python, python_tool(sandbox)])


class Watched(RocTrainer):
    """Remembers each batch: completions and their rewards as TRL saw them, and the rows that went into the loss."""

    batches: list[dict[str, Any]]

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, ids)
        results = [list(one.results) for one in self.environments or ()]
        self.seen = {"completions": completions, "rewards": rewards[:, 0], "results": results, "reasons": self.reasons}
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.batches.append({**self.seen, **output, "rows": list(self._rows)})
        return output


def trainer(warm: tuple[Any, Any], folder: Path, kind: type[RocTrainer] = Watched, **settings: Any) -> Any:
    model, tokenizer = copy.deepcopy(warm[0]), warm[1]
    problems = [{"prompt": tiny_model.question(a, b), "answer": str(a * b)} for a, b in tiny_model.FACTORS * 2]
    given = {
        "keep": KEEP,
        **{key: settings.pop(key) for key in ("tools", "environment_factory", "keep") if key in settings},
    }
    batch = {"per_device_train_batch_size": 2 * DRAWN, "steps_per_generation": 1, "num_generations": DRAWN}
    limits = {"max_completion_length": 200, "max_tool_calling_iterations": 4, "max_steps": STEPS}
    quiet = {"report_to": "none", "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    quiet |= {"log_completions": True, "num_completions_to_print": 1}
    args = GRPOConfig(output_dir=str(folder), learning_rate=1e-3, **{**batch, **limits, **quiet, **settings})
    made = kind(
        model=model, processing_class=tokenizer, args=args, train_dataset=Dataset.from_list(problems),
        reward_funcs=TrlReward(), **given,
    )  # fmt: skip
    made.batches = []
    return made


@pytest.fixture(scope="module")
def trained(warm: tuple[Any, Any], sandbox: SandboxThread, tmp_path_factory: pytest.TempPathFactory) -> Any:
    before = {name: value.clone() for name, value in warm[0].named_parameters()}
    made = trainer(warm, tmp_path_factory.mktemp("trl"), environment_factory=python_environments(sandbox))
    made.train()
    made.before = before
    return made


def test_the_models_own_calls_ran_in_our_sandbox(trained: Any) -> None:
    results = [result for batch in trained.batches for attempt in batch["results"] for result in attempt]
    told = [
        m["content"] for batch in trained.batches for one in batch["completions"] for m in one if m["role"] == "tool"
    ]
    assert {Status.OK, Status.CODE_ERROR} <= {result.status for result in results}
    assert any("NameError" in text for text in told) and "156" in told
    assert any(not torch.equal(trained.before[name], value) for name, value in trained.model.named_parameters())


def test_a_batch_holds_what_was_kept_and_advantages_are_theirs(trained: Any) -> None:
    assert len(trained.batches) == STEPS
    for batch in trained.batches:
        assert len(batch["reasons"]) == 2 * DRAWN and len(batch["advantages"]) == 2 * KEEP
        for group in range(2):
            drawn = range(group * DRAWN, (group + 1) * DRAWN)
            rows = batch["rows"][group * KEEP : (group + 1) * KEEP]
            kept = [row for row in drawn if is_kept(batch["reasons"][row])]
            assert set(kept) <= set(rows) <= set(drawn) and len(set(rows)) == KEEP
            rewards = batch["rewards"][kept]
            spread = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            expected = dict(zip(kept, spread.tolist(), strict=True))
            for row, place in zip(rows, range(group * KEEP, (group + 1) * KEEP), strict=True):
                assert batch["advantages"][place].item() == pytest.approx(expected.get(row, 0.0), abs=1e-4)
                assert bool(batch["completion_mask"][place].sum()) == (row in kept)


def test_what_counts_in_the_loss_is_what_was_kept(trained: Any) -> None:
    for batch in trained.batches:
        learnt = batch["completion_mask"] * batch["tool_mask"]
        assert batch["num_items_in_batch"] == learnt.sum()


def test_both_fates_are_in_the_log_with_their_reasons(trained: Any) -> None:
    reasons = [reason for batch in trained.batches for reason in batch["reasons"]]
    assert Reason.KEPT_QUALITY in reasons and Reason.DROPPED_NEGATIVE in reasons
    logged = [row for row in trained.state.log_history if "roc/kept" in row]
    assert len(logged) == STEPS
    for row in logged:
        assert sum(row[f"roc/{reason}"] for reason in Reason) == pytest.approx(1.0)
    assert trained._logs["extra"]["roc"][-1] == str(trained.reasons[-1])


def test_the_page_shows_the_completions_that_trl_logged(trained: Any, tmp_path: Path) -> None:
    files = sorted(Path(trained.args.output_dir, "completions").glob("*.parquet"))
    theirs = [row for file in files for row in read_table(file).to_pylist()]
    assert len(theirs) == STEPS * 2 * DRAWN
    with opened(Path(trained.args.output_dir), tmp_path) as page:
        assert (page.name, page.left_out) == ("file:completions", [])
        rows = page.rows(limit=100)
        wanted = [(row["step"], row["rocstar_answers"], row["advantage"]) for row in theirs]  # no reward where dropped
        found = [(row["step"], row["reward"], row["advantage"]) for row in rows]
        assert sorted(found, key=str) == [pytest.approx(one) for one in sorted(wanted, key=str)]
        assert {row["method"] for row in rows if row["reward"] is not None} == {"rocstar_answers"}
        assert [rows[n]["sibling"] for n in (0, 3)] == [0, 3]
        shown, told = page.attempt(rows[0]), theirs[0]
        assert shown["question"].endswith(told["prompt"][-1]["content"]) and shown["fields"]["roc"] == told["roc"]
        results = [result["stdout"] + result["stderr"] for turn in shown["turns"] for result in turn["results"]]
        texts = [turn["text"] for turn in shown["turns"]]
        for message in told["completion"]:
            assert any(message["content"] in text for text in (results if message["role"] == "tool" else texts))


def test_a_plain_tool_is_called_by_grpo_trainer(warm: tuple[Any, Any], tmp_path: Path) -> None:
    with running() as url:
        there = SandboxThread(url)
        made = trainer(warm, tmp_path, tools=[python_tool(there)], max_steps=1)
        made.train()
        there.close()
    assert made.state.log_history[0]["tools/call_frequency"] > 0


def test_an_environment_is_a_notebook_of_one_attempt(sandbox: SandboxThread) -> None:
    one, other = PythonEnvironment(sandbox), PythonEnvironment(sandbox)
    one.reset(prompt=[])
    assert (one.python("x = 6"), one.python("x * 7")) == ("", "42")
    assert "NameError" in other.python("x")
    assert [result.is_error for result in (*one.results, *other.results)] == [False, False, True]
    one.reset()
    assert one.results == () and "NameError" in one.python("x")


def test_an_outage_is_told_and_leaves_the_attempt_out(warm: tuple[Any, Any], tmp_path: Path) -> None:
    nowhere = SandboxThread("http://127.0.0.1:9")
    environment = PythonEnvironment(nowhere)
    with pytest.raises(SandboxUnavailable):
        environment.python("1")
    assert environment.outage and environment.results == ()
    made = trainer(warm, tmp_path, environment_factory=python_environments(nowhere), max_steps=1)
    made.train()
    (batch,) = made.batches
    for completion, reason in zip(batch["completions"], batch["reasons"], strict=True):
        called = any(message["role"] == "tool" for message in completion)
        assert (reason is Reason.DROPPED_ENVIRONMENT) <= called
    assert Reason.DROPPED_ENVIRONMENT in batch["reasons"]


def test_penalties_count_what_failed(sandbox: SandboxThread) -> None:
    environment = PythonEnvironment(sandbox)
    for code in ("1", "1/0", "2"):
        environment.python(code)
    call, reply = {"role": "assistant", "content": ""}, {"role": "tool", "content": "an error, says the program"}
    answer = {"role": "assistant", "content": "<answer>2</answer>"}
    assert attempt_penalty([call, reply, call, reply, call, reply, answer], environment) == pytest.approx(1 / 3)
    assert attempt_penalty([call, reply, call, reply, call, reply, call, reply, answer], environment) == 2 / 4
    assert attempt_penalty([answer], None) == 0.5
    assert attempt_penalty("no tag", None) == 1.5


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"keep": 1}, "keep 1 must be at least 2"),
        ({"keep": 9}, "at most num_generations, which is 8"),
        ({"keep": 3, "steps_per_generation": 4, "per_device_train_batch_size": 2}, "make 3 rows, .* 4 steps"),
        ({"keep": 3, "steps_per_generation": 8, "per_device_train_batch_size": 8}, None),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "sum_then_normalize"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(
    warm: tuple[Any, Any], tmp_path: Path, sandbox: SandboxThread, settings: dict[str, Any], complaint: str | None
) -> None:
    if complaint is None:
        trainer(warm, tmp_path, tools=[python_tool(sandbox)], **settings)
        return
    with pytest.raises(ConfigError, match=complaint):
        trainer(warm, tmp_path, tools=[python_tool(sandbox)], **settings)
