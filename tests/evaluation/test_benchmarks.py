"""Benchmarks end to end, with made-up rows: on a model folder, on an endpoint, killed and given again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rocstar.cli import main as cli
from rocstar.config.recipe import changed
from rocstar.config.sections import Recipe
from rocstar.errors import ConfigError
from rocstar.evaluation.benchmark import checksum, find_benchmarks, known
from rocstar.evaluation.kinds import KINDS
from rocstar.evaluation.recall import FILE
from rocstar.evaluation.scorers.choice import WRONG
from rocstar.support import exits
from tests.evaluation.served import Raw, Said, served, text
from tests.files import jsonl
from tests.published import DATA

AIME = [{"id": n, "problem": f"{n}+1?", "answer": str(n + 1)} for n in range(6)]
SMALL = ["sandbox.preload=[]", "sandbox.slots=1"]
ONE_TURN = ["--max-response-tokens", "64", *SMALL]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("ROCSTAR_JUDGE_API_KEY", "other")
    jsonl(tmp_path / "data/eval_math/aime24.jsonl", *AIME)
    return tmp_path


def asked(*more: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any, str]:
    code = cli.run(["eval", *more, "--data-folder", "data", "--json"])
    told = capsys.readouterr()
    return code, json.loads(told.out) if told.out else None, told.err


def solves(body: Mapping[str, Any]) -> Said:
    """Right where the number asked about is even."""
    number = int(body["messages"][-1]["content"].rpartition("\n")[2].split("+")[0])
    return text(f"\\boxed{{{number + 1 + number % 2}}}", tokens=10)


def test_rows_that_differ_are_refused_with_both_sums_unless_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    with served(solves) as endpoint:
        on = ["m", "--endpoint", endpoint.url, "--benchmark", "aime24", "--n", "2", "--max-turns", "3", *SMALL]
        code, _, told = asked(*on, capsys=capsys)
        expected = find_benchmarks("aime24")[0].file.sha256
        found = checksum({"f": list(enumerate(AIME, 1))}, ["problem", "answer"])
        assert code == exits.USAGE and str(expected) in told and found in told and not endpoint.bodies
        code, result, _ = asked(*on, "--accept-rows", capsys=capsys)
    assert code == exits.OK and result["avg@2"]["value"] == 0.5 and result["attempts"] == 12
    setup = result["setup"]
    assert (setup["data"]["sha256"], setup["data"]["expected_sha256"]) == (found, expected)
    assert setup["temperature"] == 0.6 and setup["max_turns"] == 3 and setup["engine"]["endpoint"] == endpoint.url
    assert "secret" not in json.dumps(result) and endpoint.keys == {"Bearer secret"}


def test_a_killed_evaluation_asks_only_for_what_is_missing(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answered: list[Mapping[str, Any]] = []

    def answers(body: Mapping[str, Any]) -> Said:
        answered.append(body)
        return {**solves(body), "model": "m-1"}

    on = ["m", "--benchmark", "aime24", "--accept-rows", "--n", "2", "--parallel", "1", *ONE_TURN]
    with served(lambda body: 401 if len(answered) == 7 else answers(body)) as endpoint:
        on += ["--endpoint", endpoint.url]
        code, _, _ = asked(*on, capsys=capsys)
        assert code == exits.USAGE
        (journal,) = (workplace / "runs").rglob(FILE)
        assert len(journal.read_text().splitlines()) == 8  # and the model's name
        endpoint.script = lambda body: {**solves(body), "model": "m-2"}
        code, _, told = asked(*on, capsys=capsys)
        assert code == exits.USAGE and "answered as 'm-1', and now as 'm-2'" in told
        endpoint.script = answers
        code, result, told = asked(*on, capsys=capsys)
        asked_before, endpoint.script = len(endpoint.bodies), lambda body: Raw(400, b"content_filter")
        assert asked(*on, capsys=capsys)[0] == exits.FAILED
        assert len(endpoint.bodies) - asked_before < 6, "a fault too many ends it, whatever is left to ask"
    assert code == exits.OK and "7 answers exist from an earlier start" in told
    seeds = [body["seed"] for body in answered]
    assert len(seeds) == 12 == len(set(seeds)) and result["attempts"] == 12
    assert not journal.exists() and (journal.parent / "result.json").exists()


def test_a_killed_list_of_benchmarks_goes_on_with_the_one_it_was_at(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        made = [{"question": f"{name}\n{n}+1?", "answer": str(n + 1)} for n in range(3)]
        jsonl(workplace / f"data/{name}.jsonl", *made)
        mine = f'title = "T"\nsource = "me"\nkind = "math"\nfiles = ["{name}.jsonl"]\n'
        (workplace / f"{name}.toml").write_text(mine)
    on = ["m", "--benchmark", "one.toml,two.toml", "--parallel", "1", *ONE_TURN]
    with served(lambda body: 401 if len(endpoint.bodies) == 5 else solves(body)) as endpoint:
        on += ["--endpoint", endpoint.url]
        assert asked(*on, capsys=capsys)[0] == exits.USAGE
        _, result, told = asked(*on, capsys=capsys)
        assert "one is finished in" in told and [one["attempts"] for one in result["results"]] == [3, 3]
        assert len(endpoint.bodies) == 6 + 1 and len(set(endpoint.prompts)) == 6  # the fifth was refused
        _, result, told = asked(*on, capsys=capsys)  # a command that had ended is made again
    assert "made before" in told and all(one["saved"].endswith("-2") for one in result["results"])


def test_functions_are_shown_called_and_scored(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bfcl = find_benchmarks("bfcl")[0].file
    parameters = {"type": "dict", "properties": {"a": {"type": "float"}}, "required": ["a"]}
    for name in bfcl.files:
        part = Path(name).name.split(".")[0]
        row = {"id": part, "question": [[{"role": "user", "content": f"Double 2, {part}."}]]}
        jsonl(workplace / "data" / name, {**row, "function": [{"name": "m.double", "parameters": parameters}]})
    for name in bfcl.answers:
        part = Path(name).name.split(".")[0]
        jsonl(workplace / "data" / name, {"id": part, "ground_truth": [{"m.double": {"a": [2.0]}}]})
    function = {"name": "m_double", "arguments": '{"a": 2}'}
    reply = {"content": "", "tool_calls": [{"id": "x", "type": "function", "function": function}]}
    with served(lambda body: reply) as endpoint:
        on = ["m", "--endpoint", endpoint.url, "--benchmark", "bfcl", "--accept-rows", *ONE_TURN]
        _, result, _ = asked(*on, capsys=capsys)
    assert result["attempts"] == 11 and endpoint.bodies[0]["temperature"] == 0
    assert endpoint.bodies[0]["tools"][0]["function"]["parameters"]["properties"]["a"] == {"type": "number"}
    by_part = {name: figure["value"] for name, figure in result["accuracy_by_source"].items()}
    wrong = [name for name, value in by_part.items() if value == 0]
    assert wrong == ["BFCL_v4_irrelevance", "BFCL_v4_live_irrelevance"]
    assert (result["non_live_python"], result["live"]) == pytest.approx((4 / 5, 5 / 6))
    assert result["not_run"][:2] == ["simple_java", "simple_javascript"] and len(result["not_run"]) == 6


def test_a_judge_sees_both_orders_and_is_asked_nothing_twice(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [{"uid": str(n), "prompt": f"Write {n}."} for n in range(3)]
    jsonl(workplace / "data/arena_hard/v0.1_question.jsonl.gz", *questions)
    jsonl(workplace / "data/arena_hard/gpt-4-0314.jsonl", *({"uid": q["uid"], "answer": "base"} for q in questions))
    left = [4]

    def judges(body: Mapping[str, Any]) -> Said:
        """Better, then much worse, then without a clear word; the third question has two verdicts at once."""
        left[0] -= 1
        if left[0] == 0:
            return 403
        asked, first = body["messages"][1]["content"], "Answer A:\nmine" in body["messages"][1]["content"]
        if "Write 0." in asked:
            return text("[[A>B]]" if first else "so [[B>A]]")
        if "Write 1." in asked:
            return text("[[B>>A]]" if first else "[[A>>B]]")
        return text("[[A>B]] or [[B>A]]")

    with served(lambda body: text("mine")) as endpoint, served(judges) as judge:
        on = ["m", "--endpoint", endpoint.url, "--benchmark", "arena_hard", "--accept-rows", "--parallel", "1"]
        on += ONE_TURN
        code, _, told = asked(*on, capsys=capsys)
        assert code == exits.USAGE and "--judge" in told and not endpoint.bodies
        on += ["--judge", judge.url, "--judge-model", "j"]
        assert asked(*on, capsys=capsys)[0] == exits.USAGE
        code, result, told = asked(*on, capsys=capsys)
    assert code == exits.OK, told
    assert len(endpoint.bodies) == 3 and len(judge.bodies) == 6 + 1  # the fourth was refused
    assert judge.keys == {"Bearer other"}
    assert result["win_rate"]["value"] == pytest.approx(2 / 8) and result["undecided"] == 1
    assert result["setup"]["judge"] == {"endpoint": judge.url, "model": "j"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tools", "text"], "--tools is about an endpoint"),
        (["--system", "x"], "--system is about an endpoint"),
        (["--parallel", "4"], "--parallel is about an endpoint"),
        (["--judge", "http://x/v1", "--judge-model", "j"], "no benchmark here needs a judge"),
        (["--endpoint", "http://x/v1", "model.device=cpu"], "model.device=cpu has no effect on an endpoint"),
        (["--endpoint", "http://x/v1", "--template", "model"], "--template model has no effect on an endpoint"),
        (["--endpoint", "x"], "'x' is no address of an endpoint"),
        (["--question", "q"], "a benchmark names its columns itself"),
        (["--data", "x.jsonl"], "give either --data FILE or --benchmark NAMES"),
    ],
)
def test_what_nothing_would_read_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], model_folder: Path
) -> None:
    subject = "m" if "--endpoint" in arguments else str(model_folder)
    few = ["--max-response-tokens", "8", "sandbox.preload=[]"]
    code, _, said = asked(subject, "--benchmark", "aime24", "--accept-rows", *few, *arguments, capsys=capsys)
    assert code == exits.USAGE and told in said, said
    assert not Path("runs").exists()


def test_gpqa_rows_become_shuffled_options_the_same_each_time() -> None:
    (benchmark,) = find_benchmarks("gpqa_diamond")
    options = {"Correct Answer": "right", **{name: f"wrong {name[-1]}" for name in WRONG}}
    values = {benchmark.file.files[0]: [(n, {"Question": f"Q{n}?", **options}) for n in range(1, 41)]}
    made = KINDS["choice"].problems(benchmark.file, values)
    assert {problem.answer for problem in made} == set("ABCD")
    for problem in made:
        assert f"{problem.answer}) right" in problem.question
        assert all(f"wrong {n}" in problem.question for n in "123")
    assert made == KINDS["choice"].problems(benchmark.file, values)


@pytest.mark.parametrize("name", known())
def test_each_benchmark_says_what_the_paper_does(name: str) -> None:
    """Paper §5.1: temperature 0.6, T = 30, 16 samples for mathematics and GPQA; default templates and temperature 0 for
    the others; 30K tokens."""
    (benchmark,) = find_benchmarks(name)
    protocol, kind = benchmark.file.protocol, benchmark.file.kind
    recipe = changed(Recipe(), protocol.settings, {})
    reasoning = kind in ("math", "choice")
    assert (protocol.attempts, protocol.temperature) == ((16, 0.6) if reasoning else (1, 0.0))
    assert recipe.rollout.max_response_tokens == 30720
    assert (recipe.rollout.max_turns == 30) == reasoning and KINDS[kind].one_turn == (not reasoning)


@pytest.mark.parametrize("name", known())
def test_the_rows_of_each_benchmark_have_the_checksum_that_its_file_says(name: str) -> None:
    (benchmark,) = find_benchmarks(name)
    if not all((DATA / file).is_file() for file in (*benchmark.file.files, *benchmark.file.answers)):
        pytest.skip(f"the rows of {name} are not in ROCSTAR_DATA ({DATA})")
    found, _ = benchmark.read(DATA)
    kind = KINDS[benchmark.file.kind]
    assert checksum(found, kind.columns(benchmark.file)) == benchmark.file.sha256
    assert len(kind.problems(benchmark.file, found)) == sum(len(found[name]) for name in benchmark.file.files)


def test_an_unknown_benchmark_is_told_with_the_nearest_and_one_of_your_own_is_a_file(workplace: Path) -> None:
    with pytest.raises(ConfigError, match="the nearest is 'aime24'"):
        find_benchmarks("aime2024")
    mine = workplace / "mine.toml"
    mine.write_text('title = "T"\nsource = "me"\nkind = "math"\nfiles = ["x.jsonl"]\n')
    (benchmark,) = find_benchmarks(str(mine))
    assert benchmark.name == "mine" and benchmark.file.protocol.attempts == 1
    mine.write_text('title = "T"\nsource = "me"\nkind = "math"\nfiles = ["x.jsonl"]\nquestoin = "q"\n')
    with pytest.raises(ConfigError, match="questoin"):
        find_benchmarks(str(mine))


def test_a_checksum_is_of_the_columns_that_are_read() -> None:
    one = checksum({"f": [(1, {"q": "a", "extra": 1, "none": None})]}, ["q", "none"])
    other = checksum({"g": [(7, {"extra": 2, "q": "a"})]}, ["q", "none"])
    assert one == other != checksum({"f": [(1, {"q": "b"})]}, ["q"])
    assert one == hashlib.sha256(b'{"q": "a"}\n').hexdigest()


def test_rows_that_are_on_no_hub_are_refused_with_the_place_where_they_were_published() -> None:
    (benchmark,) = find_benchmarks("aime24")
    with pytest.raises(ConfigError, match=r"QwenLM/Qwen2\.5-Math, .*test\.jsonl, save them as eval_math/aime24\.jsonl"):
        benchmark.read(None)
