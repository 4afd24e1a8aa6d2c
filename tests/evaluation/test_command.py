"""`rocstar eval` with a tiny random model: where results lie, and mistakes that are told before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rocstar import cli, exits
from rocstar.errors import SandboxUnavailable
from rocstar.runs.folder import RunFolder
from tests.runs.examples import run

pytest.importorskip("torch")
FEW = ["--max-response-tokens", "8", "--template", "compact", "sandbox.preload=[]"]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, question in (("gsm8k", "1+1?"), ("math", "2+1?")):
        (tmp_path / name).mkdir()
        rows = [{"question": question, "answer": "2"}, {"question": "3+1?", "answer": "4"}]
        (tmp_path / name / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def evaluated(
    capsys: pytest.CaptureFixture[str], model: Path | str, data: str, *more: str
) -> tuple[dict[str, Any], str]:
    assert cli.run(["eval", str(model), "--data", data, "--json", *FEW, *more]) == exits.OK, capsys.readouterr().err
    told = capsys.readouterr()
    return json.loads(told.out), told.err


def test_evaluations_of_two_files_of_one_name_and_repeats_each_have_a_place(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, told = evaluated(capsys, model_folder, "gsm8k/test.jsonl")
    assert "made before" not in told
    other, told = evaluated(capsys, model_folder, "math/test.jsonl")
    assert "made before" not in told
    again, told = evaluated(capsys, model_folder, "gsm8k/test.jsonl")
    assert f"the same evaluation was made before, in {first['saved']}" in told
    assert again["saved"] == f"{first['saved']}-2"
    places = {result["saved"] for result in (first, other, again)}
    assert len(places) == 3 and all((Path(place) / "result.json").is_file() for place in places)
    kept = json.loads((Path(first["saved"]) / "result.json").read_text())["setup"]
    assert kept["data"]["path"] == str(Path("gsm8k/test.jsonl").resolve()) and kept["max_response_tokens"] == 8
    assert (kept["data"]["question"], kept["data"]["answer"]) == (["question"], "answer")
    assert kept["template"]["name"] == "compact" and kept["model"] == str(model_folder.resolve())


def test_an_evaluation_of_a_run_lies_in_the_run_and_needs_no_lock(
    model_folder: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder: RunFolder = run(workplace / "runs")
    (folder.checkpoint(4)).mkdir()
    (folder.checkpoint(4) / "model").symlink_to(model_folder)
    with folder.locked():
        made, _ = evaluated(capsys, "tiny", "math/test.jsonl")
    place = Path(made["saved"])
    assert place.parent.parent == Path("runs/tiny/evals") and place.name == "step=000004"
    assert place.parent.name.startswith("test-") and made["setup"]["step"] == 4


def test_a_sandbox_that_dies_ends_in_a_sentence_and_no_result(
    model_folder: Path, workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rocstar.rollout import environment

    async def dead(*_: Any, **__: Any) -> Any:
        raise SandboxUnavailable("the sandbox host died")

    monkeypatch.setattr(environment.ToolEnvironment, "reply", dead)
    assert cli.run(["eval", str(model_folder), "--data", "math/test.jsonl", *FEW]) == exits.FAILED
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("rocstar: 2 of the 2 attempts of this evaluation ended by faults of ours")
    assert not (workplace / "runs").exists()


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
    ],
)
def test_a_mistake_is_one_sentence_before_a_folder_is_made(
    model_folder: Path,
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    before = sorted(workplace.rglob("*"))
    assert cli.run(["eval", str(model_folder), "--data", "gsm8k/test.jsonl", *FEW, *arguments]) == exits.USAGE
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("rocstar: ") and sentence in last
    assert sorted(workplace.rglob("*")) == before
