"""Scorers: what each instruction of IFEval means, which calls BFCL takes, which letter an answer names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocstar.dialogue.calls import HERMES
from rocstar.errors import ConfigError, DataError
from rocstar.evaluation.benchmark import find_benchmarks
from rocstar.evaluation.endpoint import CodePoints
from rocstar.evaluation.kinds import KINDS
from rocstar.evaluation.recall import Recall
from rocstar.evaluation.scorers.arena import verdict_in
from rocstar.evaluation.scorers.choice import chosen
from rocstar.evaluation.scorers.functions import (
    ELSEWHERE,
    LIVE,
    NON_LIVE,
    FunctionScorer,
    by_turns,
    complaint_of,
    shown,
)
from rocstar.evaluation.scorers.ifeval import CHECKS, IfevalScorer, check, follows, variants
from rocstar.evaluation.scoring import Scorer, judged, ratio
from rocstar.types import Group, Problem, ToolCall, Trajectory, Verdict
from tests.contracts import test_verifier as examples

CODEC = CodePoints()
PARTS: dict[str, Any] = {"codec": CODEC, "calls": HERMES, "recall": Recall()}


def attempt(text: str) -> Trajectory:
    return examples.attempt(examples.turn(text))


# IFEval: instruction, its arguments, answers that follow, answers that do not

LESS, MORE = "less than", "at least"
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["sea", "sky"]}, ["The Sky and the seaside"], ["The sky"]),
    (
        "keywords:frequency",
        {"keyword": "ox", "frequency": 2, "relation": MORE},
        ["ox OX", "a boxer, an ox"],
        ["one ox"],
    ),
    ("keywords:frequency", {"keyword": "ox", "frequency": 2, "relation": LESS}, ["ox"], ["ox ox"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ["concatenate"], ["A CAT."]),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 2, "let_relation": MORE},
        ["Quite quick"],
        ["quite"],
    ),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 1, "let_relation": MORE}, ["# x"], ["x"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a *** b", "***\na\n***\nb"], ["a", "a******b"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": LESS}, ["two words"], ["it's three"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": MORE}, ["one two three"], ["one two"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "hello"},
        ["a\n\nHello, b", "a\n\n'Hello' b"],
        ["a\n\nb", "a\n\nHello\n\nc", "Hello"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] and [b c]"], ["[a] (b)"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye.\nP. S. more"], ["Bye. PS more"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["p.p.s more"], ["P.S. more"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n- b"], ["* a", "* a\n* b\n* c"]),
    ("detectable_format:constrained_response", {}, ["My answer is maybe."], ["My answer is perhaps."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* *b*"], ["*a* **"]),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Day", "num_sections": 2},
        ["Day 1 a Day 2 b"],
        ["Day 1 a"],
    ),
    ("detectable_format:json_format", {}, ['```json\n{"a": 1}\n```', "[1]"], ["Here: {}", "{a: 1}"]),
    ("detectable_format:title", {}, ["<<A song>>\nla"], ["<< >>\nla", "<A song>"]),
    ("combination:two_responses", {}, ["a\n******\nb"], ["a\n******\na", "a ****** b ****** c", "a"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, [" say it. Yes"], ["Yes. Say it."]),
    ("startend:end_checker", {"end_phrase": "The end."}, ['So, the END."'], ["The end. Bye"]),
    ("startend:quotation", {}, ['"a"'], ['"a', '"', "a"]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
]
WITH_LIBRARIES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("language:response_language", {"language": "de"}, ["Das ist ein guter Tag für uns alle."], ["A fine day for us."]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": MORE},
        ["It rains. We go."],
        ["It rains."],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": MORE},
        ["STOP right NOW"],
        ["STOP right now"],
    ),
    ("change_case:english_capital", {}, ["THIS IS A FINE DAY FOR ALL OF US."], ["This is a fine day for all of us."]),
    ("change_case:english_lowercase", {}, ["this is a fine day for all of us."], ["This is a fine day for all of us."]),
]


@pytest.mark.parametrize(("name", "arguments", "passing", "failing"), CASES, ids=[case[0] for case in CASES])
def test_an_instruction_tells_answers_that_follow(
    name: str, arguments: dict[str, Any], passing: list[str], failing: list[str]
) -> None:
    assert [follows(name, arguments, "", answer) for answer in passing] == [True] * len(passing)
    assert [follows(name, arguments, "", answer) for answer in (*failing, "", " \n")] == [False] * (len(failing) + 2)


@pytest.mark.parametrize(
    ("name", "arguments", "passing", "failing"), WITH_LIBRARIES, ids=[c[0] for c in WITH_LIBRARIES]
)
def test_an_instruction_that_needs_libraries_tells_answers_that_follow(
    name: str, arguments: dict[str, Any], passing: list[str], failing: list[str]
) -> None:
    if find_spec("nltk") is None or find_spec("langdetect") is None:
        pytest.skip("nltk and langdetect are not installed: pip install 'rocstar[eval]'")
    try:
        check()
    except ConfigError as error:
        pytest.skip(str(error))
    test_an_instruction_tells_answers_that_follow(name, arguments, passing, failing)


def test_every_kind_has_a_case() -> None:
    assert {case[0] for case in (*CASES, *WITH_LIBRARIES)} == set(CHECKS) and len(CHECKS) == 25


def test_the_loose_forms_are_the_eight_of_the_original() -> None:
    assert set(variants("Sure:\n*a*\nb\nBye")) == {
        "Sure:\n*a*\nb\nBye", "*a*\nb\nBye", "Sure:\n*a*\nb", "*a*\nb",
        "Sure:\na\nb\nBye", "a\nb\nBye", "Sure:\na\nb", "a\nb",
    }  # fmt: skip


async def test_ifeval_counts_prompts_and_instructions_strict_and_loose() -> None:
    metadata = {"instructions": ["startend:quotation", "punctuation:no_comma"], "arguments": [{}, {}]}
    problem = Problem(id="p", question="?", answer="", metadata=metadata)
    texts = ['"a"', 'Sure\n"a"', 'Sure, yes\n"a"', "a"]
    scorer = IfevalScorer(**PARTS)
    found = await scorer.verify_all([(problem, attempt(text)) for text in texts])
    assert [one.method for one in found] == ["instructions SS", "instructions lS", "instructions ll", "instructions .S"]
    assert [one.verdict is Verdict.RIGHT for one in found] == [True, False, False, False]
    attempts = [replace(attempt(text), outcome=outcome) for text, outcome in zip(texts, found, strict=True)]
    groups = [Group(problem=problem, trajectories=(one,)) for one in attempts]
    figures = {name: figure["value"] for name, figure in scorer.figures(groups).items()}
    assert figures == {"prompt_strict": 1 / 4, "prompt_loose": 3 / 4, "instruction_strict": 4 / 8,
                       "instruction_loose": 7 / 8}  # fmt: skip


# BFCL

PARAMETERS = {
    "type": "dict",
    "required": ["city"],
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "float"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "dict", "properties": {"lat": {"type": "float"}}},
        "dry": {"type": "boolean"},
    },
}
POSSIBLE = {
    "city": ["San Francisco, CA", "SF"],
    "days": [3, ""],
    "share": [0.5, 2.0, ""],
    "tags": [["rain", "wind"], ""],
    "place": [{"lat": [1.5], "name": ["x", ""]}, ""],
    "dry": [True, ""],
}
ASKED = {
    "described": [{"name": "get.weather", "parameters": PARAMETERS}],
    "possible": [{"get.weather": POSSIBLE}],
    "wants_call": True,
}


def call(tool: str = "get.weather", **arguments: Any) -> ToolCall:
    return ToolCall(id="call_0", tool=tool, arguments=arguments, raw="")


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        *(([call(tool, **arguments)], None) for tool in ("get.weather", "get_weather") for arguments in (
            {"city": "SF"}, {"city": "san francisco CA"}, {"city": "SF", "days": 3, "share": 2},
            {"city": "SF", "tags": ["Rain", "wind."], "dry": True}, {"city": "SF", "place": {"lat": 1.5}},
            {"city": "SF", "place": {"lat": 1.5, "name": "X"}},
        )),
        ([], "wrong number of calls"),
        ([call(city="SF"), call(city="SF")], "wrong number of calls"),
        ([call("get.rain", city="SF")], "wrong function"),
        ([call(days=3)], "required parameter missing"),
        ([call(city="SF", nights=3)], "unexpected parameter"),
        ([call(city="LA")], "wrong value"),
        ([call(city="SF", days=3.0)], "wrong type"),
        ([call(city="SF", days=True)], "wrong type"),
        ([call(city="SF", share=0.7)], "wrong value"),
        ([call(city="SF", share=10**400)], "wrong value"),  # beyond all floats
        ([call(city="SF", tags=["wind", "rain"])], "wrong value"),
        ([call(city="SF", tags=["rain", 1])], "wrong value"),
        ([call(city="SF", place={"name": "x"})], "wrong value"),
        ([call(city="SF", dry=False)], "wrong value"),
        ([ToolCall(id="call_0", tool="", arguments={}, raw="{", parse_error="no JSON")], "malformed call"),
    ],
)  # fmt: skip
def test_a_call_with_possible_values_is_right_and_another_is_told_why(calls: list[ToolCall], told: str | None) -> None:
    assert complaint_of(ASKED, calls) == told


BOTH = {**ASKED, "possible": [{"get.weather": {"city": [city]}} for city in ("SF", "LA")]}
NONE_FITS = {"described": [], "possible": None, "wants_call": False}


@pytest.mark.parametrize(
    ("asked", "calls", "told"),
    [
        (BOTH, [call(city="LA"), call(city="SF")], None),  # parallel calls come in any order, but each once
        (BOTH, [call(city="SF"), call(city="SF")], "wrong value"),
        (NONE_FITS, [], None),
        (NONE_FITS, [call()], "called"),
        ({**NONE_FITS, "wants_call": True}, [], "no call"),
        ({**NONE_FITS, "wants_call": True}, [call()], None),
    ],
)
def test_parallel_and_irrelevant_calls(asked: dict[str, Any], calls: list[ToolCall], told: str | None) -> None:
    assert complaint_of(asked, calls) == told


def test_functions_are_shown_with_types_of_json_schema() -> None:
    properties = shown({"name": "f", "parameters": PARAMETERS})["parameters"]["properties"]
    assert (properties["share"]["type"], properties["place"]["type"]) == ("number", "object")
    described = {"type": "dict", "properties": {"type": {"type": "any"}}}  # a parameter called type
    assert shown({"name": "f", "parameters": described})["parameters"]["properties"] == {"type": {"type": "string"}}


LEAF = st.none() | st.booleans() | st.integers() | st.text('aé "\x00漢', max_size=3)
FLAT = LEAF | st.lists(LEAF, max_size=3) | st.dictionaries(st.text("aé\x00", max_size=2), LEAF, max_size=3)


@settings(max_examples=40)
@given(FLAT | st.lists(FLAT, max_size=3))
def test_no_value_of_a_model_makes_the_scorer_fail(value: Any) -> None:
    for name in PARAMETERS["properties"]:
        complaint_of(ASKED, [call(**{"city": "SF", name: value})])


# The others


@pytest.mark.parametrize(
    ("texts", "letter"),
    [
        (["so \\boxed{C}"], "C"),
        (["\\boxed{\\text{B}}"], "B"),
        (["\\boxed{(D)}", "done"], "D"),
        (["\\boxed{A) 3 metres}"], "A"),
        (["Therefore the answer is (B)."], "B"),
        (["**Answer:** D"], "D"),
        (["A is wrong, and so is B"], None),
        (["\\boxed{Because}"], None),
        (["\\boxed{E}"], None),
        (["\\boxed{\\text{Option C}}"], "C"),
        (["\\boxed{\\textcolor{red}{C}\\,}"], "C"),
        (["\\boxed{\\{\uff23\\}}"], "C"),
        (["\\boxed{A photon is emitted}"], None),
        (["\\boxed{A} or \\boxed{B}"], None),
        (["\\boxed{A-D}"], None),
        ([], None),
    ],
)
def test_the_letter_that_an_answer_ends_with(texts: Sequence[str], letter: str | None) -> None:
    assert chosen(texts) == letter


async def test_a_choice_is_right_by_its_letter() -> None:
    (benchmark,) = find_benchmarks("gpqa_diamond")
    row = {"Question": "Q?", "Correct Answer": "yes"} | {f"Incorrect Answer {n}": f"no {n}" for n in (1, 2, 3)}
    (problem,) = KINDS["choice"].problems(benchmark.file, {benchmark.file.files[0]: [(1, row)]})
    build = KINDS["choice"].scorer
    assert build is not None
    texts = [f"\\boxed{{{letter}}}" for letter in "ABCD"]
    found = await build(**PARTS).verify_all([(problem, attempt(text)) for text in texts])
    assert ["ABCD"[n] for n, one in enumerate(found) if one.verdict is Verdict.RIGHT] == [problem.answer]


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("[[A>>B]]", "A>>B"),
        ("first [[A<B]], so [[B>A]]", "B>A"),
        ("[[A>B]] no, [[B>A]]", None),
        ("A>B", None),
        ("[[A>A]]", None),
    ],
)
def test_a_judge_has_one_verdict_or_none(said: str, verdict: str | None) -> None:
    assert verdict_in(said) == verdict


def test_a_conversation_is_split_into_turns() -> None:
    said = [("system", "s"), ("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")]
    messages = [{"role": role, "content": content} for role, content in said]
    joined = [("system", "s"), ("user", "a\n\nb"), ("assistant", "c"), ("user", "d")]
    assert [(one["role"], one["content"]) for one in by_turns(messages)] == joined


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=20))
def test_a_ratio_lies_in_its_interval(pairs: list[tuple[int, int]]) -> None:
    bounded = [(min(part, whole), whole) for part, whole in pairs]
    found = ratio(bounded)
    assert 0 <= found.low <= found.value <= found.high <= 1
    if bounded:
        assert found.value == pytest.approx(sum(p for p, _ in bounded) / sum(w for _, w in bounded))


def test_made_up_rows_of_each_kind_are_told_where_they_do_not_fit() -> None:
    for name in ("ifeval", "bfcl", "arena_hard", "math500", "gpqa_diamond"):
        (benchmark,) = find_benchmarks(name)
        with pytest.raises(DataError, match="line 3"):
            KINDS[benchmark.file.kind].problems(benchmark.file, {benchmark.file.files[0]: [(3, json.loads("{}"))]})


@pytest.mark.parametrize(
    ("category", "turns", "row", "told"),
    [
        ("multi_turn_base", 3, {"involved_classes": ["TradingBot"]}, "needs the systems that BFCL simulates"),
        ("simple_java", 1, {"type": "HashMap"}, "values of type HashMap"),
        ("nested", 1, {"type": "dict", "properties": {"b": {"type": "long"}}}, "values of type long"),
        ("items", 1, {"type": "array", "items": {"type": "char"}}, "values of type char"),
    ],
)
def test_a_category_of_bfcl_that_is_not_scored_is_refused_by_its_name(
    category: str, turns: int, row: dict[str, Any], told: str
) -> None:
    name = f"bfcl/BFCL_v4_{category}.jsonl.gz"
    question = [[{"role": "user", "content": "?"}]] * turns
    function = {"name": "f", "parameters": {"type": "dict", "properties": {"a": row}, "required": []}}
    asked = {"id": "1", "question": question, **(row if "involved_classes" in row else {"function": [function]})}
    file = find_benchmarks("bfcl")[0].file.model_copy(update={"files": [name], "answers": []})
    with pytest.raises(DataError, match=f"line 1: BFCL's category BFCL_v4_{category} .*{told}.*; take it out"):
        KINDS["functions"].problems(file, {name: [(1, asked)]})


def test_the_parts_of_bfcl_are_summed_up_as_bfcl_does() -> None:
    """Non-live categories count alike, live rows do."""

    def group(category: str, right: bool) -> Group:
        problem = Problem(id=category, question="", answer="", metadata={"family": category})
        outcome = judged(right, method="", extracted=None, text="")
        return Group(problem=problem, trajectories=(replace(attempt(""), outcome=outcome),))

    scorer = FunctionScorer(**PARTS)
    rows = {"simple_python": [1, 1, 1, 0], "multiple": [0], "live_simple": [1, 0, 0, 0], "live_relevance": [1]}
    groups = [group(f"BFCL_v4_{name}", bool(right)) for name, some in rows.items() for right in some]
    found = scorer.figures(groups)
    assert (found["non_live_python"], found["live"]) == pytest.approx((0.75 / 2, 2 / 5))
    assert set(found["not_run"]) == {*NON_LIVE, *LIVE, *ELSEWHERE} - set(rows)
    assert scorer.figures([group("my_category", True)]) == scorer.figures([]) == {}


@pytest.mark.parametrize("end", ["<|im_end|>", "</s>", "<|user|>", "<|end|>", "<｜end▁of▁sentence｜>", "<end_of_turn>"])
def test_what_ends_a_turn_is_no_part_of_an_answer(end: str) -> None:
    assert Scorer(**PARTS).final_text(attempt(f"<think>x</think>\nSo 7.{end}")) == "So 7."
