import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from rocstar.cli.main import run
from rocstar.data.problems import load_problems
from rocstar.dialogue.template import COMPACT
from rocstar.errors import DataError
from rocstar.evaluation.benchmark import known
from rocstar.support.child import child_environment
from rocstar.support.exits import INTERRUPTED
from tests.commands import json_and_words, json_of
from tests.dialogue.folders import LLAMA, THINKING, byte_level, folder_of
from tests.files import jsonl

ROWS = [{"question": "How many legs do two cats have?", "answer": "8"}, {"question": "How much is it?", "answer": "x"}]
RECIPE = '[[source]]\nname = "s"\npath = "rows.jsonl"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    jsonl(tmp_path / "rows.jsonl", *ROWS)
    (tmp_path / "pool.toml").write_text(RECIPE)
    return tmp_path


def test_data_build_prints_the_funnel_and_writes_the_pool(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["data", "build", f"{folder / 'pool.toml'}", f"data={folder}", f"out={folder / 'out'}"])
    printed = capsys.readouterr().out
    counts = [line.split()[:2] for line in printed.splitlines()[1:4]]
    assert code == 0 and counts == [["read", "2"], ["not_integer", "1"], ["kept", "1"]]
    assert json.loads((folder / "out" / "problems.jsonl").read_text())["answer"] == "8"


def test_data_build_compares_with_every_known_benchmark_that_is_there_and_names_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "eval_math").mkdir()
    for name, column, question in (
        ("aime25", "problem", ROWS[0]["question"]),
        ("aime24", "Frage", "Wie viel ist das?"),
    ):
        jsonl(folder / "eval_math" / f"{name}.jsonl", {column: question, "answer": "8"})
    own = '[[benchmark]]\nname = "mine"\npath = "eval_math/aime24.jsonl"\nquestion = "Frage"\n'  # as the recipe says
    (folder / "pool.toml").write_text(RECIPE + own)
    command = ["data", "build", f"{folder / 'pool.toml'}", f"data={folder}", f"out={folder / 'out'}"]
    assert run(command) == 0
    printed = capsys.readouterr().out
    assert "compared with the questions of mine (1), aime25 (1)\n" in printed
    assert f"not compared with hmmt_feb_2025: eval_math/hmmt_feb_2025.jsonl is not in {folder}; its rows:" in printed
    told = json.loads((folder / "out" / "datasheet.json").read_text())
    assert told["funnel"]["benchmark_question"]["all"] == 1 and told["kept"] == 0
    named = {"mine", *(file["name"] for file in told["inputs"]), *told["benchmarks_not_compared"]}
    assert named == {"mine", "s", *known()} - {"aime24"}
    assert told["benchmarks_not_compared"]["gpqa_diamond"]

    assert run([*command, "known_benchmarks=false"]) == 0
    printed = capsys.readouterr().out
    assert "questions of mine (1)\n" in printed and "not compared with aime25: known_benchmarks is false" in printed


def test_data_check_against_a_pool_recipe_compares_with_the_known_benchmarks_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "eval_math").mkdir()
    rows = json.dumps({"problem": ROWS[0]["question"], "answer": "8"}) + "\n"
    (folder / "eval_math" / "hmmt_feb_2025.jsonl").write_text(rows)
    (folder / "pool.toml").write_text(f'data = "{folder}"\n' + RECIPE)
    against = ("--against", str(folder / "pool.toml"))
    found, told = json_and_words(capsys, "data", "check", str(folder / "rows.jsonl"), *against)
    assert found["overlaps_by_benchmark"] == {"hmmt_feb_2025": 1}
    assert "not compared with aime25: " in told


def test_data_check_prints_a_prompt_and_ends_with_2_for_bad_rows(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "rows.jsonl"
    monkeypatch.setattr("rocstar.support.screen.Screen.never_silent", never_silent := Mock(wraps=nullcontext))
    assert run(["data", "check", str(file), "--template", "compact"]) == 0
    assert never_silent.called
    assert "«<|im_end|>»" in capsys.readouterr().out
    file.write_text(file.read_text() + "{broken\n")
    told = json_of(capsys, "data", "check", str(file), code=2)
    assert (told["rows"], told["bad"]["rows"]) == (3, 1)
    file.write_text(file.read_text() + "".join(f'{{"question": "q", "answer": [{n}]}}\n' for n in range(7)))
    assert run(["data", "check", str(file)]) == 2
    shown = capsys.readouterr().out
    assert shown.count('field "answer"') == 4 and shown.count("and 3 more") == 1, "five are shown"
    lines = json_of(capsys, "data", "check", str(file), code=2)["bad"]["lines"]
    assert sorted(line for of in lines.values() for line in of) == [*range(3, 11)] and "line N, " in list(lines)[-1], (
        "all are given"
    )


def test_data_check_tells_of_references_that_are_right_backwards(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "rows.jsonl"
    answers = ["3, 5, 9", "abc", "stop", "12", "5, 5", "(1, 2)"]
    jsonl(file, *({"question": f"q {each}", "answer": each} for each in answers))
    told = json_of(capsys, "data", "check", str(file))["reordered"]
    assert told["examples"] == ['line 1: "9, 5, 3" for "3, 5, 9"', 'line 2: "cba" for "abc"']
    own = ["evaluate.verifier=rocstar.adapters.rewards:compute_score", 'data.columns.answer=""']
    for settings in (["evaluate.verifier=boxed_text"], own):
        told = json_of(capsys, "data", "check", str(file), *settings)  # a function of the user's own judges by itself
        assert not any(told[name]["rows"] for name in ("reordered", "refused", "unread"))


@pytest.mark.parametrize(
    ("template", "tokens"),
    [(THINKING, ("<|im_start|>", "<|im_end|>")), (LLAMA, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"))],
)
def test_special_tokens_of_the_model_are_marked(
    folder: Path, capsys: pytest.CaptureFixture[str], template: str, tokens: tuple[str, ...]
) -> None:
    model = folder / "model"
    byte_level(*dict.fromkeys((*tokens, COMPACT.stop))).save(model, COMPACT)
    folder_of(model, template, eos_token=tokens[-1])
    (model / "config.json").write_text("{}")
    command = ["data", "check", str(folder / "rows.jsonl"), "--template", "model", f"model.path='{model}'"]
    prompt = json_of(capsys, *command, "rollout.max_turns=1")["prompt"]
    for token in tokens:
        assert prompt.count(f"«{token}»") == prompt.count(token) > 0
    assert "\nHow many legs do two cats have?«" in prompt


def test_data_check_refuses_what_training_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "rows.jsonl"
    jsonl(file, {"question": "1 + 1?", "result": "2"})
    with pytest.raises(DataError) as refused:
        load_problems(file)
    assert run(["data", "check", str(file)]) == 2
    assert str(refused.value)[:100] in capsys.readouterr().out
    assert len(load_problems(file, answer="result")) == 1
    assert run(["data", "check", str(file), "data.columns.answer=result"]) == 0
    byte_level(COMPACT.stop).save(folder / "model", COMPACT)
    (folder / "model" / "config.json").write_text('{"max_position_embeddings": 9000, "vocab_size": 300}')
    (folder / "model" / "pytorch_model.bin").touch()
    stage = '[[stage]]\nname = "rl"\nkind = "rl"\nsteps = 1\nrollout.max_response_tokens = 400\n'
    given = json.dumps({"tools_kwargs": json.dumps({"python": {"create_kwargs": {"a": 1}}})})
    rows = [{"question": "2?" * 100}, {"question": "2?" * 9000}, {"question": "3?", "extra_info": given}]
    jsonl(file, *(row | {"answer": "2"} for row in rows))
    (folder / "run.toml").write_text(f'model.path = "{folder / "model"}"\n{stage.replace("400", "9001")}')
    assert run(["data", "check", str(file), "--recipe", str(folder / "run.toml")]) == 2
    assert "max_response_tokens leave 0; lower rollout.max_response_tokens." in capsys.readouterr().out  # leave -1
    long, unread = "2 a prompt of", "3 tools_kwargs for python"
    for limit, refused_rows in ("", [long, unread]), ("20_000", [long, unread]), ("8_000", [unread]):
        most = limit and f"data.max_prompt_tokens = {limit}\n"
        (folder / "run.toml").write_text(f'model.path = "{folder / "model"}"\n{most}{stage}')
        capsys.readouterr()
        report = json_of(capsys, "data", "check", str(file), "--recipe", str(folder / "run.toml"), code=2)
        found = re.findall(r"line (\d).*?(a prompt of|tools_kwargs for python)", "\n".join(report["bad"]["examples"]))
        assert list(map(" ".join, found)) == refused_rows


def test_data_check_takes_columns_template_and_turns_of_a_recipe(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    jsonl(folder / "rows.jsonl", {"ask": "1 + 1?", "says": "2"})
    recipe = (
        '[data]\nsource = "files"\ntrain_files = ["rows.jsonl"]\n[data.columns]\nquestion = "ask"\nanswer = "says"\n'
        '[evaluate]\nverifier = "boxed_text"\n[rollout]\ntemplate = "compact"\n'
        '[[stage]]\nname = "cold"\nkind = "sft"\nsteps = 1\n[[stage]]\nname = "rl"\nkind = "rl"\nsteps = 1\n'
    )
    (folder / "run.toml").write_text(recipe)
    told = json_of(capsys, "data", "check", "rows.jsonl", "--recipe", "run.toml")
    assert (told["columns"]["question"], told["columns"]["answer"]) == (["ask"], "says")
    assert told["prompt"] == "<|im_start|>user\n1 + 1?«<|im_end|>»\n<|im_start|>assistant\n"
    assert told["held_out"]["rows"] == 0
    (folder / "run.toml").write_text(recipe.replace('["rows.jsonl"]', '["rows.jsonl"]\ntest_files = ["test.jsonl"]'))
    (folder / "test.jsonl").write_text((folder / "rows.jsonl").read_text())
    assert run(["data", "check", "rows.jsonl", "--recipe", "run.toml"]) == 0
    told = "      1 held out by the recipe, and so not learnt from\n          line 1: 1 + 1?\n"
    assert told in capsys.readouterr().out
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    jsonl(folder / "test.jsonl", {"ask": said, "says": "2"})
    assert run(["data", "check", "rows.jsonl", "--recipe", "run.toml"]) == 0
    told = "      1 held-out questions under another system text, which are learnt from\n          line 1: 1 + 1?\n"
    assert told in capsys.readouterr().out
    assert run(["data", "check", "rows.jsonl", "learning.clip_low=0.1"]) == 2
    assert "learning.clip_low is not read here" in capsys.readouterr().err


def test_sigterm_ends_data_build_as_ctrl_c_and_leaves_nothing_half(folder: Path) -> None:
    build = 'run(["data", "build", "pool.toml", "data=.", "out=out"])'
    lost = "Judges.judge = lambda *_: signal.raise_signal(signal.SIGTERM)"
    imports = "import signal\nfrom rocstar.cli.main import run\nfrom rocstar.data.pool.rules import Judges\n"
    command = [sys.executable, "-c", f"{imports}{lost}\nraise SystemExit({build})"]
    ended = subprocess.run(command, cwd=folder, env=child_environment({}), capture_output=True)
    assert ended.returncode == INTERRUPTED and b"stopped; what is in out is as it was" in ended.stderr
    assert not list((folder / "out").iterdir())
