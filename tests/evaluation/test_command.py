"""`rocstar eval` with a tiny random model: where results lie, and mistakes that are told before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rocstar.cli import main as cli
from rocstar.errors import ConfigError, SandboxUnavailable
from rocstar.record.folder import RunFolder
from rocstar.support import exits
from tests.record.examples import run

pytest.importorskip("torch")
import torch
from pyarrow.parquet import read_table
from safetensors.torch import load_file, save_file

from rocstar.evaluation import subject
from tests.commands import json_and_words
from tests.files import jsonl

FEW = ["--max-response-tokens", "8", "--template", "compact", "sandbox.preload=[]", "sandbox.slots=1"]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, question in (("gsm8k", "1+1?"), ("math", "2+1?")):
        (tmp_path / name).mkdir()
        rows = [{"question": question, "answer": "2"}, {"question": "3+1?", "answer": "4"}]
        jsonl(tmp_path / name / "test.jsonl", *rows)
    return tmp_path


def evaluated(
    capsys: pytest.CaptureFixture[str], model: Path | str, data: str, *more: str
) -> tuple[dict[str, Any], str]:
    return json_and_words(capsys, "eval", str(model), "--data", data, *FEW, *more)


def test_evaluations_of_two_files_of_one_name_and_repeats_each_have_a_place_and_can_be_exported(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "rollout.preamble='Solve: '"
    first, told = evaluated(capsys, model_folder, "gsm8k/test.jsonl", words)
    assert "made before" not in told and "sampled 2/2 problems  right .00\n" in told
    other, told = evaluated(capsys, model_folder, "math/test.jsonl", "model.dtype=bfloat16", "run.seed=7")
    assert "made before" not in told
    again, told = evaluated(capsys, model_folder, "gsm8k/test.jsonl", words)
    assert f"the same evaluation was made before, in {first['saved']}" in told
    assert again["saved"] == f"{first['saved']}-2"
    places = {result["saved"] for result in (first, other, again)}
    assert len(places) == 3 and all((Path(place) / "result.json").is_file() for place in places)
    kept, changed = (json.loads((Path(one["saved"]) / "result.json").read_text())["setup"] for one in (first, other))
    assert kept["data"]["path"] == str(Path("gsm8k/test.jsonl").resolve()) and kept["max_response_tokens"] == 8
    assert (kept["data"]["question"], kept["data"]["answer"]) == (["question"], "answer")
    assert kept["template"]["name"] == "compact" and kept["model"] == str(model_folder.resolve())
    assert changed["engine"] == {"device": "cpu", "dtype": "bfloat16"} and changed["seed"] == 7

    assert first["evaluation"].startswith("tiny/test-")
    export = ["runs", "export", first["evaluation"], "--format", "trl", "--out", "rows.jsonl"]
    assert cli.run(export) == exits.OK, capsys.readouterr().err
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert [row["prompt"][0]["content"] for row in rows] == ["1+1?", "3+1?"]
    assert sum(row["verdict"] == "right" for row in rows) / 2 == first["avg@1"]["value"]


def test_answers_of_weights_that_a_folder_held_before_are_not_taken_for_those_it_holds_now(
    model_folder: Path, workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation is killed before its result is written, once under the same weights and once under others."""
    shutil.copytree(model_folder, workplace / "mine")
    file, text, told = workplace / "mine" / "model.safetensors", workplace / "mine" / "tokenizer.json", []
    for scale, more in ((1.0, ""), (1.0, ""), (1.1, ""), (1.0, "\n")):
        save_file({name: value * scale for name, value in load_file(file).items()}, file, {"format": "pt"})
        text.write_text(text.read_text() + more)
        with monkeypatch.context() as killed:
            killed.setattr("rocstar.evaluation.evaluate.write_attempts", Mock(side_effect=KeyboardInterrupt))
            cli.run(["eval", "mine", "--data", "gsm8k/test.jsonl", *FEW])
        told.append("answers exist from an earlier start" in capsys.readouterr().err)
    assert told == [False, True, False, False]


def test_an_evaluation_of_a_folder_says_what_it_held_and_one_of_another_tokenizer_is_told(
    model_folder: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model_folder, workplace / "mine")
    first, _ = evaluated(capsys, "mine", "gsm8k/test.jsonl")
    (workplace / "mine" / "tokenizer.json").open("a").write("\n")
    second, told = evaluated(capsys, "mine", "gsm8k/test.jsonl")
    assert "made before, of other weights or with another tokenizer, in " in told
    held, holds = (
        json.loads((Path(one["saved"]) / "result.json").read_text())["setup"]["holds"] for one in (first, second)
    )
    assert held["weights"] == holds["weights"] and held["tokenizer and config"] != holds["tokenizer and config"]


def test_an_evaluation_of_a_run_lies_in_the_run_and_needs_no_lock(
    model_folder: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder: RunFolder = run(workplace / "runs")
    (folder.checkpoint(4)).mkdir()
    (folder.checkpoint(4) / "model").symlink_to(model_folder)
    (folder.checkpoint(4) / "state.json").write_text('{"policy_version": 7}')
    with folder.locked():
        made, _ = evaluated(capsys, "tiny", "math/test.jsonl")
    place = Path(made["saved"])
    assert place.parent.parent == Path("runs/tiny/evals") and place.name == "step=000004"
    assert place.parent.name.startswith("test-") and made["setup"]["step"] == 4
    assert set(read_table(place / "samples.parquet")["policy_version"].to_pylist()) == {7}


def test_a_sandbox_that_dies_ends_in_a_sentence_and_no_result(
    model_folder: Path, workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rocstar.rollout import environment

    async def dead(*_: Any, **__: Any) -> Any:
        raise SandboxUnavailable("the sandbox host died")

    monkeypatch.setattr(environment.ToolEnvironment, "reply", dead)
    assert cli.run(["eval", str(model_folder), "--data", "math/test.jsonl", *FEW]) == exits.FAILED
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("rocstar: 1 of the 2 attempts of this evaluation ended by failures outside the model")
    assert not (workplace / "runs").exists()


def test_a_refused_sandbox_is_found_before_weights_are_read_and_only_where_something_calls_it(
    model_folder: Path, workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(subject, "load_model", lambda *_, **__: read.append("weights"))

    def refused(*_: Any, **__: Any) -> Any:
        raise ConfigError("this machine offers L1")

    monkeypatch.setattr("rocstar.sandbox.client.SandboxClient.start", refused)
    assert cli.run(["eval", str(model_folder), "--data", "math/test.jsonl", *FEW]) == exits.USAGE
    assert "this machine offers L1" in capsys.readouterr().err and not read
    assert cli.run(["chat", str(model_folder), "rollout.template=compact"]) == exits.USAGE
    assert "this machine offers L1" in capsys.readouterr().err and not read
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    monkeypatch.setattr("rocstar.sandbox.client.SandboxClient.start", refused)
    for nothing_calls in ("rollout.max_turns=1", "sandbox.tools=[]"):
        evaluated(capsys, model_folder, "math/test.jsonl", nothing_calls)


def test_a_cap_that_nobody_asked_for_is_what_fits_into_the_model(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uncapped = ["eval", str(model_folder), "--data", "gsm8k/test.jsonl", "--template", "compact", "sandbox.preload=[]"]
    result, told = json_and_words(capsys, *uncapped)
    cap = result["setup"]["max_response_tokens"]
    assert 200 < cap < 256
    sentence = f"at most {cap} tokens an attempt, because the longest prompt leaves no more of"
    assert f"{sentence} the 256 positions of the model; --max-response-tokens sets another cap\n" in told
    for asked_for in (["--max-response-tokens", "8192"], ["rollout.max_response_tokens=8192"]):
        assert cli.run([*uncapped, *asked_for]) == exits.USAGE
        assert "the model holds 256; set it to" in capsys.readouterr().err


def test_a_prompt_that_fills_the_model_is_refused_whoever_asked_for_the_cap(
    model_folder: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "long.jsonl").write_text(json.dumps({"question": "1+1?" * 200, "answer": "2"}))
    long = ["eval", str(model_folder), "--data", "long.jsonl", "--template", "compact", "sandbox.preload=[]"]
    assert cli.run([*long, "--max-response-tokens", "8"]) == exits.USAGE
    assert "leave such problems out" in capsys.readouterr().err
    assert cli.run(long) == exits.USAGE
    told = capsys.readouterr().err  # no word of a cap that nobody gave
    assert "(long.jsonl line 1), fills the 256 positions of the model; take a template" in told and "max_" not in told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--template", "papr"], "--template papr"),
        (["--verifier", "boxd"], "--verifier boxd"),
        (["--max-turns", "0"], "--max-turns 0"),
        (["--max-response-tokens", "300"], "the model holds 256"),
        (["--question", "ask"], 'no field "ask"'),
        (["rollout.top_pp=1"], "did you mean rollout.top_p?"),
        (["--runs", "gsm8k/test.jsonl"], "change --runs"),
        (["--n", "3", "--temperature", "0"], "3 attempts at temperature 0 are one attempt 3 times"),
        (["rollout.temperature=0.1"], "use --temperature"),
        (["evaluate.attempts=4"], "use --n"),
        (["evaluate.problems=1"], "use --limit"),
        (["learning.learning_rate=0.5"], "is not read here"),
        *([(["model.device=cuda"], "finds no GPU")] if not torch.cuda.is_available() else []),
    ],
)
def test_a_mistake_is_one_sentence_before_a_folder_is_made(
    model_folder: Path, workplace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    before = sorted(workplace.rglob("*"))
    assert cli.run(["eval", str(model_folder), "--data", "gsm8k/test.jsonl", *FEW, *arguments]) == exits.USAGE
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("rocstar: ") and sentence in last
    assert sorted(workplace.rglob("*")) == before


def test_padding_of_an_embedding_is_never_drawn(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow.parquet as parquet

    from rocstar.dialogue.codec import Codec
    from rocstar.learning.models import load_model

    padded = tmp_path / "padded"
    shutil.copytree(model_folder, padded)
    known, model = Codec.load(padded).vocab_size, load_model(padded)
    model.resize_token_embeddings(known + 200, mean_resizing=False)
    model.save_pretrained(padded)
    result, _ = evaluated(capsys, padded, "math/test.jsonl", "--temperature", "8", "--n", "8")
    rows = parquet.read_table(f"{result['saved']}/samples.parquet").to_pylist()
    assert all(token < known for row in rows for token in row["token_ids"])


def test_a_run_is_evaluated_under_the_limits_of_its_last_rl_stage() -> None:
    from rocstar.config.recipe import recipe_of

    stage = {"name": "a", "kind": "rl", "steps": 1, "rollout": {"max_response_tokens": 48, "max_turns": 3}}
    staged = recipe_of({"rollout": {"max_response_tokens": 20}}, [stage]).as_evaluated()
    assert (staged.rollout.max_response_tokens, staged.rollout.max_turns) == (48, 3)
