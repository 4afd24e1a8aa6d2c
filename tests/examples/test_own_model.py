"""examples/own_model as a user starts it, shortened, and its parts one by one."""

from __future__ import annotations

import json
from pathlib import Path
from runpy import run_path

import pytest

from rocstar.support.plugins import load
from rocstar.types import Completion, Finish, Stop
from tests.rollout.examples import ANSWER, CODEC, PROBLEM, STOP, conversation, limits
from tests.tiny_run import Command

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_model"
SHORT = (
    *("stage.show.steps=4", "stage.learn.steps=1", "rollout.problems_per_step=2", "rollout.max_response_tokens=40"),
    "evaluate.problems=2",
)
OWN_LEARNING = (
    "learning.loss=own_learning:cispo",
    "learning.advantage=own_learning:leave_one_out",
    "resample.method=own_learning:Balanced",
)


@pytest.mark.slow
def test_a_shortened_run_trains_a_model_folder_with_both_tools(tmp_path: Path) -> None:
    run_path(str(EXAMPLE / "make_model.py"))["make_model"](tmp_path / "model")
    settings = (f"model.path={tmp_path}/model", f"run.folder={tmp_path}", *SHORT, *OWN_LEARNING)
    ended = Command.start(EXAMPLE, "train", "recipe.toml", *settings).wait()
    assert ended.code == 0, ended.told
    run = tmp_path / "own_model"
    assert json.loads((run / "summary.json").read_text())["accuracy_after"]["n"] == 2
    (attempts,) = (run / "rollouts").glob("*.parquet")
    prompts = prompts_of(attempts, tmp_path / "model")
    assert len(prompts) == 16
    assert all('"name": "python"' in prompt and '"name": "grams_in"' in prompt for prompt in prompts)
    assert (run / "checkpoints" / "step=000005" / "model" / "tokenizer.json").is_file()


def prompts_of(attempts: Path, model: Path) -> list[str]:
    from pyarrow import parquet
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = parquet.read_table(attempts, partitioning=None).to_pylist()
    return [tokenizer.decode(row["token_ids"][: row["loss_mask"].index(True)]) for row in rows]


def test_the_problems_are_answered_by_the_tool_and_a_product() -> None:
    grams_in = load("tools.py:grams_in", folders=[EXAMPLE])
    rows = [json.loads(line) for name in ("problems", "heldout") for line in (EXAMPLE / f"{name}.jsonl").open()]
    assert len({row["question"] for row in rows}) == 48
    for row in rows:
        words = row["question"].rstrip("?.").split()
        count = next(word for word in words if word.isdigit())
        unit = words[words.index(count) + 1].removesuffix("s")
        assert int(count) * grams_in(unit) == int(row["answer"])


def test_the_reward_is_for_the_last_box() -> None:
    reward = load("reward.py:grams", folders=[EXAMPLE])
    texts = ["\\boxed{1} \\boxed{28}", "\\boxed{28 grams}", "\\boxed{27}", "28", "\\boxed{many}"]
    assert reward(prompts=[""] * 5, completions=texts, answer=["28"] * 5, line=[1, 2, 3, 4, 5]) == [1, 1, 0, 0, 0]


async def test_a_bare_answer_is_answered_with_a_hint_once_and_within_the_limits() -> None:
    made = load("environment.py:HintEnvironment", folders=[EXAMPLE])
    ids = (*CODEC.encode(ANSWER), STOP)
    answer = Completion(token_ids=ids, logprobs=(0.0,) * len(ids), finish=Finish.STOP)
    roomy, narrow = (made(PROBLEM, conversation(), limits(max_response_tokens=most), 0) for most in (500, len(ids) + 9))
    hint = await roomy.reply(answer)
    assert hint.stop is None and "Look the unit up" in CODEC.decode(hint.reply_ids)
    assert roomy.budget() == 500 - len(ids) - len(hint.reply_ids)
    assert (await roomy.reply(answer)).stop is Stop.ANSWERED
    assert (await narrow.reply(answer)).stop is Stop.MAX_TOKENS
