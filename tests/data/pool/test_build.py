import gzip
import hashlib
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from rocstar.data.pool.build import Datasheet, build_pool
from rocstar.data.pool.config import PoolConfig
from rocstar.data.problems import load_problems
from rocstar.errors import ConfigError, DataError
from rocstar.types import problem_id
from tests.files import jsonl

BENCHMARK = "Alice has nine red apples and Bob takes away four of them before lunch today."
ROWS = [
    ("How many legs do three cats have in all?", "12"),
    ("What fraction of a dozen are five eggs?", "\\frac{5}{12}"),
    ("Is seven a prime number or is it not?", "Yes"),
    ("How many legs do three cats have in all?", "12"),
    ("How many days are there in two weeks?", "14"),
    ("How many days are there in two weeks?", "15"),
    (BENCHMARK, "5"),
    ("When Alice has nine red apples and Bob takes away four, who wins?", "5"),
    ("How many hours has a day?", "1,013"),
]


def accept(gold: str, response: str) -> tuple[bool, str]:
    return response == f"\\boxed{{{gold}}}", "scripted"


def pool(folder: Path, **changes: Any) -> PoolConfig:
    jsonl(folder / "rows.jsonl", *({"question": q, "answer": a} for q, a in ROWS))
    jsonl(folder / "bench.jsonl", {"problem": BENCHMARK})
    settings = {
        "data": str(folder),
        "out": str(folder / "out"),
        "rewrite": {"fractions_and_roots": True},
        "source": [{"name": "s", "path": "rows.jsonl"}],
        "benchmark": [{"name": "b", "path": "bench.jsonl"}],
    }
    return PoolConfig.model_validate(settings | changes)


def build(config: PoolConfig) -> Datasheet:
    return build_pool(config, accept, lambda sentence: None)


def rows_of(config: PoolConfig, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.out) / name).read_text().splitlines()]


def test_a_pool_holds_questions_without_what_stands_before_them(tmp_path: Path) -> None:
    config = pool(tmp_path, benchmark=[], limits={"max_bad_rows": 1})
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many legs has a cat?"}]
    talk = [*asked, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And two of them?"}]
    jsonl(tmp_path / "rows.jsonl", {"prompt": asked, "label": "4"}, {"prompt": talk, "label": "8"})
    build(config)
    (kept,), (dropped,) = rows_of(config, "problems.jsonl"), rows_of(config, "dropped.jsonl")
    assert (kept["question"], kept["id"]) == ("How many legs has a cat?", problem_id("How many legs has a cat?"))
    assert dropped["rule"] == "bad_row" and "follows earlier turns" in dropped["evidence"]


def test_every_row_is_kept_or_dropped_with_its_rule_and_evidence(tmp_path: Path) -> None:
    config = pool(tmp_path)
    sheet = build(config)
    fates = {row["line"]: row["rule"] for row in rows_of(config, "dropped.jsonl")}
    assert fates == {
        3: "unverifiable",
        4: "duplicate",
        5: "conflicting_labels",
        6: "conflicting_labels",
        7: "benchmark_question",
        8: "benchmark_overlap",
    }
    assert all(row["evidence"] and row["question"] for row in rows_of(config, "dropped.jsonl"))
    kept = rows_of(config, "problems.jsonl")
    assert [row["line"] for row in kept] == [1, 2, 9]
    assert (kept[1]["answer"], kept[1]["asked_from"]) == ("17", "\\frac{5}{12}")  # is asked for as an integer
    assert sheet.total("read") == len(ROWS) == len(fates) + sheet.total("kept")
    problems = load_problems(Path(config.out) / "problems.jsonl")  # as training loads it
    assert [problem.answer for problem in problems] == ["12", "17", "1013"]
    assert [problem.metadata["source"] for problem in problems] == ["s", "s", "s"]
    assert build(pool(tmp_path, rewrite={})).total("not_integer") == 1


def test_same_input_and_config_give_the_same_bytes(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        config = pool(tmp_path, out=str(tmp_path / name))
        build(config)
        contents.append({file.name: file.read_bytes() for file in sorted(Path(config.out).iterdir())})
    assert contents[0] == contents[1]
    assert set(contents[0]) == {"problems.jsonl", "dropped.jsonl", "datasheet.json"}


def test_the_datasheet_counts_hashes_and_says_each_licence_or_that_none_is_stated(tmp_path: Path) -> None:
    config = pool(tmp_path, source=[{"name": "s", "path": "rows.jsonl", "license": "MIT"}])
    build(config)
    told = json.loads((Path(config.out) / "datasheet.json").read_text())
    assert told["kept"] == told["funnel"]["kept"]["s"] == len(rows_of(config, "problems.jsonl"))
    assert {file["name"]: len(file["sha256"]) for file in told["inputs"]} == {"b": 64, "s": 64}
    assert {file["name"]: file["license"] for file in told["inputs"]} == {"s": "MIT", "b": "not stated"}
    assert str(tmp_path) not in json.dumps(told)


def test_a_rule_that_is_skipped_drops_nothing(tmp_path: Path) -> None:
    config = pool(tmp_path, rules={"skip": ["benchmark_overlap", "duplicate"]})
    build(config)
    fates = {row["rule"] for row in rows_of(config, "dropped.jsonl")}
    assert fates == {"unverifiable", "conflicting_labels", "benchmark_question"}
    assert [row["line"] for row in rows_of(config, "problems.jsonl")] == [1, 2, 4, 8, 9]


def test_a_rule_that_does_not_exist_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean duplicate"):
        build(pool(tmp_path, rules={"skip": ["duplicats"]}))


def test_a_reference_that_the_verifier_refuses_is_dropped(tmp_path: Path) -> None:
    config = pool(tmp_path)
    sheet = build_pool(config, lambda gold, response: (gold != "12", "scripted"), lambda sentence: None)
    assert sheet.total("gold_refused") == 2


def test_a_bad_row_stops_the_build_with_its_place_and_leaves_nothing(tmp_path: Path) -> None:
    config = pool(tmp_path)
    jsonl(tmp_path / "rows.jsonl", {"question": "What is it?", "answer": "5"}, "{broken")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2, column 2: not JSON"):
        build(config)
    assert list(Path(config.out).iterdir()) == []


def test_bad_rows_are_dropped_as_far_as_the_config_allows(tmp_path: Path) -> None:
    config = pool(tmp_path, limits={"max_bad_rows": 3}, source=[{"name": "s", "path": "bad.jsonl"}])
    good = {"question": "What is it?", "answer": "5"}
    (tmp_path / "bad.csv").write_text("question,answer\nWhat is it?,5\nWhat, then,6\n")
    cells = build(config.model_copy(update={"source": [config.source[0].model_copy(update={"path": "bad.csv"})]}))
    assert (cells.total("bad_row"), cells.total("kept")) == (1, 1)
    jsonl(tmp_path / "bad.jsonl", good, "{broken", {**good, "answer": ["5"]}, {**good, "answer": ""}, "null")
    sheet = build(config)
    assert [sheet.total(fate) for fate in ("read", "bad_row", "empty", "kept")] == [5, 3, 1, 1]
    assert "line 2" in rows_of(config, "dropped.jsonl")[0]["evidence"]
    with pytest.raises(DataError, match="line 3"):
        build(config.model_copy(update={"limits": config.limits.model_copy(update={"max_bad_rows": 1})}))


def test_instructions_are_cut_and_columns_joined(tmp_path: Path) -> None:
    source = {"name": "s", "path": "a.jsonl", "question": ["body", "ask"], "answer": "gold", "cut": ["Think hard."]}
    jsonl(tmp_path / "a.jsonl", {"body": "Ann has two cats. Think hard.", "ask": "How many legs?", "gold": 8})
    config = pool(tmp_path, source=[source])
    build(config)
    (row,) = rows_of(config, "problems.jsonl")
    assert (row["question"], row["answer"]) == ("Ann has two cats.  How many legs?", "8")


def test_labels_that_too_few_answers_share_are_dropped(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    said = {0: ["\\boxed{12}", "\\boxed{12}", "\\boxed{3}"], 8: ["\\boxed{1013}", "\\boxed{24}", "\\boxed{24}"]}
    jsonl(answers, *({"question": ROWS[place][0], "answers": texts} for place, texts in said.items()))
    config = pool(tmp_path, agreement={"answers": [str(answers)], "least": 2})
    sheet = build(config)
    (dropped,) = [row for row in rows_of(config, "dropped.jsonl") if row["rule"] == "disagreement"]
    assert dropped["line"] == 9
    assert "1 of 3 answers equal the label 1013" in dropped["evidence"] and "2 x '\\\\boxed{24}'" in dropped["evidence"]
    assert sheet.unasked == 1
    (listed,) = [file for file in sheet.inputs if file["role"] == "answers"]
    assert (listed["rows"], listed["sha256"]) == (2, hashlib.sha256(answers.read_bytes()).hexdigest())


def test_only_the_labels_of_the_named_sources_are_checked(tmp_path: Path) -> None:
    """§4.2 checks OpenMathReasoning alone."""
    answers, wrong = tmp_path / "answers.jsonl", ["\\boxed{999}"] * 3
    asked = {name: f"What does the {name} puzzle ask of us today?" for name in ("euler", "forum")}
    for name, question in asked.items():
        jsonl(tmp_path / f"{name}.jsonl", {"question": question, "answer": "7"})
    jsonl(answers, *({"question": question, "answers": wrong} for question in asked.values()))
    sources = [{"name": name, "path": f"{name}.jsonl"} for name in asked]
    for named, kept in ((["forum"], ["euler"]), (["euler", "forum"], []), ([], [])):
        config = pool(tmp_path, source=sources, agreement={"answers": [str(answers)], "sources": named})
        assert build(config).unasked == 0
        assert [row["source"] for row in rows_of(config, "problems.jsonl")] == kept
    with pytest.raises(ValueError, match=r"names 'eular', which is no source; there are euler, forum"):
        pool(tmp_path, source=sources, agreement={"sources": ["eular"]})


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peak_of_build(tmp_path, 10)  # what is imported and compiled once is not what is measured
    few, many = (peak_of_build(tmp_path, rows) for rows in (50, 600))
    assert many < 1.2 * few, "a text of 64 characters kept of each row would be 1.25"


def peak_of_build(folder: Path, count: int) -> int:
    """Most bytes that Python held at once while a pool of so many rows was built."""
    rng = random.Random(count)
    words = [f"w{number}" for number in range(3000)]
    with gzip.open(folder / "many.jsonl.gz", "wt") as file:
        for _ in range(count):
            text = " ".join(rng.choices(words, k=12))
            file.write(json.dumps({"question": text, "answer": str(rng.randrange(1000))}) + "\n")
    config = pool(folder, source=[{"name": "s", "path": "many.jsonl.gz"}])
    tracemalloc.start()
    assert build(config).total("kept") > 0.99 * count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak
