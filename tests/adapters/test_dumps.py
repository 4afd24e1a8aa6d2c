"""`rocstar replay` of what TRL and verl write: their own trainer or dump function writes, and loss and gradient norm
that they logged come out again."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: scripts/adapters_env")

import pyarrow
import torch
import typer
from datasets import Dataset
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rocstar.cli.verbs.replay import replay
from rocstar.errors import ConfigError, DataError
from rocstar.record.rollouts import read_table
from rocstar.run.dumps import DEFAULTS, learnt, read_dump

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789?*:ĠĊ"  # the last two stand for a space and a new line in byte-level BPE
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = 64
"""Of the embedding; more than there are tokens, as in many models."""
LIMIT = 12
CLOSE: Any = {"rel": 1e-6, "abs": 0}


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


def vowels(completions: list[Any], **columns: Any) -> list[float]:
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [sum(text.count(letter) for letter in "aeiou02468") / 4 + len(text) / 10 for text in texts]


def trained(model: Path, target: Path, prompts: list[Any], rewards: Any = vowels, **settings: Any) -> None:
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


def backwards(prompt: list[dict[str, str]]) -> list[dict[str, str]]:
    return asked(prompt[0]["content"][::-1])


TEXTS = ["12 * 13?", "what is 7 * 8?", "2?", "1 * 1 * 3?", "a?", "bb cc?"]


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("trl")
    trained(model, target, [asked(text) for text in TEXTS], beta=0.04, use_bias_correction_kl=False)
    return target


def again(place: Path, wrote: Path, *settings: str, **given: Any) -> dict[str, Any]:
    reference = given.pop("reference", None)
    found = learnt(read_dump(place, wrote, **given), wrote, [settings], reference)
    print(found["logged"], found["difference"])
    return found


def test_loss_and_gradient_norm_of_trl_come_out_again(model: Path, run: Path) -> None:
    for step, wrote in ((1, model), (2, run / "checkpoint-1"), (3, run / "checkpoint-2")):
        found = again(run, wrote, "learning.kl_coefficient=0.04", step=step, reference=model)
        assert found["again"] == pytest.approx(found["logged"], **CLOSE)


def test_other_weights_and_other_settings_come_out_otherwise(model: Path, run: Path) -> None:
    kl = "learning.kl_coefficient=0.04"
    for wrote, settings in (
        (model, [kl]),
        (run / "checkpoint-1", ["learning.kl_coefficient=0.05"]),
        (run / "checkpoint-1", [kl, "rollout.temperature=0.99"]),
    ):
        folder = shutil.copytree(wrote, run.parent / f"{wrote.name}-alone", dirs_exist_ok=True)
        (folder / "trainer_state.json").unlink(missing_ok=True)
        found = again(run, folder, *settings, step=2, reference=model)
        assert found["again"] != pytest.approx(found["logged"], rel=1e-4)


def test_the_verb_prints_both_and_what_other_settings_make(
    model: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["learning.kl_coefficient=0.04,0.08"]
    given: dict[str, Any] = {"step": 2, "model": run / "checkpoint-1", "reference": model}
    replay(str(run), settings, **given, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["again"] == pytest.approx(told["logged"], **CLOSE)
    assert [one["settings"] for one in told["tried"]] == [
        "learning.kl_coefficient=0.04",
        "learning.kl_coefficient=0.08",
    ]
    assert told["tried"][0]["attempts"] == 8 and told["tried"][1]["loss"] > told["tried"][0]["loss"]
    assert len(told["tokens"]) == 10 and told["notes"] and all(one["token"] for one in told["tokens"])
    replay(str(run), settings, **given)
    assert (
        "grad_norm" in (shown := capsys.readouterr().out) and "logged" in shown and "under the first settings" in shown
    )
    norm = told["logged"]["grad_norm"]  # several times as much as the gradient that was applied, which is clipped
    assert norm > 1 and told["tried"][0]["gradient_norm"] == pytest.approx(norm, **CLOSE)
    assert f"{norm:.4f}" in shown and "before clipping" in shown and told["differs"] == []


def test_the_verb_fails_where_the_loss_is_not_the_logged_one(
    model: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {"step": 2, "model": run / "checkpoint-1", "reference": model}
    for as_json in (False, True):
        with pytest.raises(typer.Exit) as end:
            replay(str(run), ["learning.kl_coefficient=0.08,0.04"], **given, as_json=as_json)
        shown = capsys.readouterr()
        assert end.value.exit_code == 1
        assert re.search(r"step 2 came out otherwise than TRL logged it: loss by .*e-0\d, grad_norm by ", shown.err)
        if as_json:
            assert json.loads(shown.out)["differs"] == ["loss", "grad_norm"]


def test_without_a_logged_loss_nothing_is_compared(
    model: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads((run / "checkpoint-3" / "trainer_state.json").read_text())
    for row in told["log_history"]:
        del row["loss"], row["grad_norm"]
    (log := tmp_path / "state.json").write_text(json.dumps(told))
    replay(str(run), ["learning.kl_coefficient=0.04"], step=2, model=run / "checkpoint-1", reference=model, log=log)
    assert len(re.findall(r"(?:loss|grad_norm) +\d.*, not in the log, so not compared", capsys.readouterr().out)) == 2


def logs_ids(completion_ids: list[list[int]], log_extra: Callable[..., None], **columns: Any) -> list[float]:
    log_extra("completion_ids", completion_ids)
    return [0.0] * len(completion_ids)


def test_ids_that_a_reward_function_logs_are_taken_as_they_are(model: Path, tmp_path: Path) -> None:
    """Marks are drawn as well, which no text shows."""
    unwanted = {"suppress_tokens": [0, *range(len(MARKS) + len(LETTERS), ROWS)]}
    settings: dict[str, Any] = {"loss_type": "grpo", "temperature": 0.8, "max_steps": 2, "generation_kwargs": unwanted}
    micro = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    trained(model, tmp_path, TEXTS, [vowels, logs_ids], **settings, **micro)
    file, wrote = tmp_path / "completions" / "completions_00002.parquet", tmp_path / "checkpoint-1"
    found = again(file, wrote, "learning.loss_mean=attempts", "rollout.temperature=0.8")
    assert found["again"]["grad_norm"] == pytest.approx(found["logged"]["grad_norm"], **CLOSE)
    assert found["again"]["loss"] == pytest.approx(found["logged"]["loss"], abs=1e-6)  # advantages, whose mean is 0
    parquet.write_table(read_table(file).drop_columns(["completion_ids"]), file)
    with pytest.raises(DataError, match="completion"):
        read_dump(file, wrote)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[:-1], r"num_tokens|completion|prompts have"),
        (lambda rows: [{**rows[0], "completion": [{"role": "assistant", "content": "A"}]}, *rows[1:]], "row 0, compl"),
        (lambda rows: [*rows[:3], {**rows[3], "completion": rows[3]["completion"] * 2}, *rows[4:]], "row 3, .*tool"),
        (lambda rows: [{**rows[0], "advantage": math.nan}, *rows[1:]], "row 0, advantage"),
        (lambda rows: [{**rows[0], "step": 1}, *rows[1:]], r"steps \[1, 2\]"),
        (lambda rows: [{**rows[0], "prompt": backwards(rows[0]["prompt"])}, *rows[1:]], r"have \[1, 3, 4\] rows"),
        (lambda rows: [{**row, "prompt": asked("longer")} for row in rows], "prompt: num_tokens"),
    ],
)  # fmt: skip
def test_a_dump_that_is_not_what_was_drawn_is_refused(run: Path, tmp_path: Path, change: Any, said: str) -> None:
    file, log = tmp_path / "completions_00002.parquet", run / "checkpoint-3" / "trainer_state.json"
    rows = change(read_table(run / "completions" / file.name).to_pylist())
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    with pytest.raises(DataError, match=said):
        read_dump(file, run / "checkpoint-1", log=log)


def test_what_cannot_be_held_is_refused_in_a_sentence(model: Path, run: Path) -> None:
    wrote, dump = run / "checkpoint-1", read_dump(run, run / "checkpoint-1", step=2)
    with pytest.raises(ConfigError, match=r"checkpoint of step 2, and the rollouts .* of step 1"):
        read_dump(run, run / "checkpoint-2", step=2)
    for setting, said in (
        ("learning.normalize_by_std=false", "^'{}' makes advantages, and a dump of TRL has its own; leave it out$"),
        ("learning.importance_cap=2", "^'{}' asks for the engine's log-probabilities, which TRL writes nowhere;"),
        (
            "resample.keep=2",
            "^a dump of TRL takes no '{}'; give learning.KEY=VALUE, or a value of rollout.temperature,",
        ),
        ("learning.los=grpo", "^override '{}': unknown key learning.los; did you mean learning.loss"),
        ("rollout.temperature=-1", "^override '{}': rollout.temperature = -1 should be greater than 0"),
    ):
        with pytest.raises(ConfigError, match=said.format(setting)):
            learnt(dump, wrote, [[setting]], None)
    for settings, reference in (["learning.kl_coefficient=0.1"], None), ([], model):
        with pytest.raises(ConfigError, match="go together"):
            learnt(dump, wrote, [settings], reference)
    with pytest.raises(ConfigError, match="no step in it"):
        read_dump(run, wrote)


def test_rollouts_that_several_steps_learnt_from_are_refused(model: Path, tmp_path: Path) -> None:
    trained(model, tmp_path, TEXTS, num_iterations=2, max_steps=2, save_steps=2)
    for step in (1, 2):
        with pytest.raises(DataError, match="several steps"):
            read_dump(tmp_path, model, step=step)


def test_defaults_are_those_of_the_trainers() -> None:
    theirs = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[])
    assert (theirs.loss_type, theirs.epsilon, theirs.epsilon_high, theirs.delta, theirs.beta) == (
        "dapo",
        0.2,
        None,
        None,
        0,
    )
    own = DEFAULTS["TRL"]
    assert (own.loss_mean, own.clip_low, own.clip_high, own.dual_clip) == ("tokens", 0.2, 0.2, 0)
    assert theirs.temperature == theirs.max_grad_norm == own.max_grad_norm == 1
    verl = pytest.importorskip("verl.workers.config", reason="verl has an environment of its own: scripts/adapters_env")
    other = verl.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    ours = DEFAULTS["verl"]
    clips = (ours.clip_low, ours.clip_high, ours.dual_clip)
    assert (other.clip_ratio_low, other.clip_ratio_high, other.clip_ratio_c) == clips
    assert (other.loss_agg_mode, other.use_kl_loss, other.entropy_coeff) == ("token-mean", False, 0)


# -- verl: its dump, metrics, advantage, loss and loggers, around logprobs that transformers computes ------------------


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


@pytest.fixture(scope="module")
def verl_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One update of verl as its trainer makes it, without its workers: those want Ray and a GPU."""
    pytest.importorskip("verl", reason="verl has an environment of its own: scripts/adapters_env")
    import numpy as np
    from verl import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.metric_utils import compute_data_metrics
    from verl.utils.logger.aggregate_logger import concat_dict_to_str
    from verl.utils.tracking import FileLogger
    from verl.workers.config import ActorConfig

    folder = tmp_path_factory.mktemp("verl")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    policy = Qwen2ForCausalLM.from_pretrained(model)
    torch.manual_seed(3)
    with torch.no_grad():
        for weights in policy.parameters():
            weights += 0.02 * torch.randn_like(weights)
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")

    tokenizer.padding_side = "left"
    texts = [[{"role": "system", "content": "be short"}, *asked(text)] for text in TEXTS[:3]] * 4  # siblings lie apart
    given = tokenizer.apply_chat_template(
        texts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    prompts, before = given["input_ids"], given["attention_mask"]
    unwanted = [0, 1, *range(len(MARKS) + len(LETTERS), ROWS)]
    whole = policy.generate(
        input_ids=prompts, attention_mask=before, do_sample=True, top_k=0, max_new_tokens=LIMIT,
        suppress_tokens=unwanted, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    responses = whole[:, prompts.shape[1] :]
    mask = (responses != 0).long()
    scores = torch.zeros(responses.shape)
    scores[torch.arange(len(mask)), mask.sum(1) - 1] = torch.tensor(vowels(tokenizer.batch_decode(responses)))
    uids = np.array([str(text) for text in texts], dtype=object)
    advantages, returns = core_algos.compute_grpo_outcome_advantage(scores, mask, index=uids)
    seen = torch.cat((before, mask), 1)

    def logprobs(of: Any) -> torch.Tensor:
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        logits = of(input_ids=whole, attention_mask=seen, position_ids=positions).logits[:, prompts.shape[1] - 1 : -1]
        found: torch.Tensor = logits.log_softmax(-1).gather(2, responses[..., None])[..., 0]
        return found

    now = logprobs(policy)
    with torch.no_grad():
        kept = logprobs(Qwen2ForCausalLM.from_pretrained(model))
    config: Any = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    loss, _ = core_algos.get_policy_loss_fn("vanilla")(
        now.detach(), now, advantages, mask, loss_agg_mode="token-mean", config=config
    )
    kl = core_algos.kl_penalty(now, kept, "low_var_kl")
    loss = loss + 0.05 * core_algos.agg_loss(loss_mat=kl, loss_mask=mask, loss_agg_mode="token-mean")
    loss.backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in policy.parameters() if one.grad is not None])

    tensors = {
        "prompts": prompts, "responses": responses, "attention_mask": seen, "response_mask": mask, "returns": returns,
        "token_level_scores": scores, "token_level_rewards": scores, "advantages": advantages,
    }  # fmt: skip
    turns = np.full(len(mask), 2)
    batch = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids, "__num_turns__": turns})
    trainer = dumper_of_verl()()
    trainer.tokenizer, trainer.global_steps = tokenizer, 7
    trainer._init_dump_executor()
    trainer._log_rollout_data(batch, {}, {}, str(folder / "rollouts"))
    trainer._shutdown_dump_executor()
    metrics = {"actor/loss": loss.item(), "actor/grad_norm": norm.item(), **compute_data_metrics(batch, False)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VERL_FILE_LOGGER_PATH", str(folder / "metrics.jsonl"))
        logger = FileLogger("project", "experiment")
    logger.log(metrics, 7)
    logger.finish()
    (folder / "console.txt").write_text(f"(TaskRunner pid=1) {concat_dict_to_str(metrics, 7)}\n")
    return folder


@pytest.mark.parametrize("log", ["metrics.jsonl", "console.txt"])
def test_loss_and_gradient_norm_of_verl_come_out_again(model: Path, verl_run: Path, tmp_path: Path, log: str) -> None:
    given: dict[str, Any] = {"step": 7, "log": verl_run / log}
    found = again(verl_run / "rollouts", verl_run / "policy", "learning.kl_coefficient=0.05", reference=model, **given)
    assert found["again"] == pytest.approx(found["logged"], **CLOSE)
    marked = tmp_path / log
    marked.write_bytes(b"\xef\xbb\xbf" + given["log"].read_bytes())  # as Windows' editors save it
    assert read_dump(verl_run / "rollouts", verl_run / "policy", step=7, log=marked).logged == found["logged"]
    other = again(verl_run / "rollouts", verl_run / "policy", "learning.advantage=rloo", **given)
    assert other["again"] != pytest.approx(other["logged"], rel=1e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [*lines[:-1], lines[-1][:-9]], "row 11, all: it is no JSON object"),
        (lambda lines: lines[:-1], "input: prompt_length/mean|output: response_length/mean"),
        (lambda lines: [lines[0].replace("assistant", "someone"), *lines[1:]], "row 0, input: 0 conversations"),
        (lambda lines: [lines[0].replace("short", "short\\nuser\\nno"), *lines[1:]], "row 0, input: 2 conversations"),
        (lambda lines: [lines[0].replace('"score": ', '"score": 1'), *lines[1:]], "score: critic/rewards/mean"),
        (lambda lines: [re.sub('"score": [^,}]*', '"score": true', lines[0]), *lines[1:]], "row 0, score: True"),
        (lambda lines: [re.sub('"score": ', '"score": ' + "9" * 400, lines[0]), *lines[1:]], "row 0, score: inf"),
        (lambda lines: [lines[0].replace('"output": "', '"output": "\\ud800'), *lines[1:]], "row 0, output: '"),
    ],
)
def test_a_dump_of_verl_that_is_not_what_was_drawn_is_refused(
    verl_run: Path, tmp_path: Path, change: Any, said: str
) -> None:
    lines = change((verl_run / "rollouts" / "7.jsonl").read_text().splitlines())
    (tmp_path / "7.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=said):
        read_dump(tmp_path, verl_run / "policy", step=7, log=verl_run / "metrics.jsonl")


@pytest.mark.parametrize("data", [b"", b"no parquet", b"\xff\xfe"])
def test_a_file_that_is_none_of_theirs_is_refused(verl_run: Path, tmp_path: Path, data: bytes) -> None:
    log = verl_run / "metrics.jsonl"
    for name in ("completions_00001.parquet", "1.jsonl"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=name):
            read_dump(tmp_path / name, verl_run / "policy", log=log)
    (tmp_path / "broken.jsonl").write_bytes(b"\xff" + log.read_bytes())
    with pytest.raises(DataError, match="broken"):
        read_dump(verl_run / "rollouts" / "7.jsonl", verl_run / "policy", log=tmp_path / "broken.jsonl")


def test_what_verl_does_not_tell_is_asked_for(verl_run: Path, tmp_path: Path) -> None:
    place, wrote = verl_run / "rollouts" / "7.jsonl", verl_run / "policy"
    with pytest.raises(ConfigError, match="--log"):
        read_dump(place, wrote)
    log = tmp_path / "metrics.jsonl"
    log.write_text((verl_run / "metrics.jsonl").read_text().replace('"num_turns/max":2', '"num_turns/max":4'))
    with pytest.raises(DataError, match="num_turns/max of step 7 is 4"):
        read_dump(place, wrote, log=log)
