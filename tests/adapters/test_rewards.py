"""Our rewards called as TRL and verl call theirs: keyword arguments, column lists, the module loaded by path."""

import asyncio
import math
from collections.abc import Iterator

import pytest

from rocstar.adapters.rewards import TrlReward, compute_scores, shared_grader
from rocstar.answers.cases import completion_text
from rocstar.answers.grade import Grader
from rocstar.errors import DataError


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    import os

    asyncio.run(shared_grader(os.getpid()).close())
    shared_grader.cache_clear()


def test_trl_calls_it_with_texts_and_columns() -> None:
    reward = TrlReward(answer="solution")
    given = reward(
        prompts=["p"] * 3,
        completions=[r"so \boxed{5}", "so the answer is 6", "no idea"],
        completion_ids=[[1], [2], [3]],
        solution=["5", "7", "8"],
        trainer_state=None,
    )
    assert given == [1.0, 0.0, 0.0]
    assert reward(completions=["the answer is 5", r"<tool_call>\boxed{5}</tool_call>"], solution=["5", "5"]) == [0, 0]
    assert reward.__name__ == "rocstar_answers"


def test_trl_calls_it_with_conversations_and_a_tool_cannot_answer() -> None:
    talk = [
        {"role": "assistant", "content": "let me see", "tool_calls": []},
        {"role": "tool", "content": r"\boxed{5}"},
        {"role": "assistant", "content": r"\boxed{6}"},
    ]
    assert TrlReward()(prompts=[[]], completions=[talk], answer=["6"]) == [1.0]
    assert TrlReward()(prompts=[[]], completions=[talk[:2]], answer=["5"]) == [0.0]
    assert completion_text([{"role": "assistant", "content": None}]) == ""


def test_undecided_is_no_reward_in_trl() -> None:
    assert TrlReward()(completions=[r"\boxed{5}"], answer=["9^{9^{9^{9}}}"]) == [None]
    assert TrlReward()(completions=[r"\boxed{9^{9^{9^{9}}}}"], answer=["5"]) == [0.0]


def test_trl_strict_wants_the_answer_block() -> None:
    texts = [r"\boxed{5}", r"<answer>\boxed{5}</answer>"]
    assert TrlReward(strict=True)(completions=texts, answer=["5", "5"]) == [0.0, 1.0]


def test_a_missing_column_is_named() -> None:
    with pytest.raises(DataError, match="'solution'"):
        TrlReward(answer="solution")(completions=["5"], answer=["5"])


def test_a_row_without_a_reference_has_no_reward() -> None:
    texts = [r"\boxed{None}", r"\boxed{nan}", "no box", r"\boxed{5}"]
    assert TrlReward()(completions=texts, answer=[None, math.nan, None, 5]) == [None, None, None, 1.0]
    scores = compute_scores(["math"] * 2, texts[::2], [None, None])
    assert [(score["score"], score["undecided"]) for score in scores] == [(0.0, True)] * 2


@pytest.mark.parametrize("reference", [["5", "6"], {"answer": "5"}])
def test_a_reference_that_is_no_text_and_no_number_is_refused(reference: object) -> None:
    with pytest.raises(DataError, match="text or a number"):
        TrlReward()(completions=[r"\boxed{5}"], answer=[reference])
    with pytest.raises(DataError, match="text or a number"):
        compute_scores(["math"], [r"\boxed{5}"], [reference])


async def test_it_works_inside_a_running_event_loop() -> None:
    assert TrlReward()(completions=[r"\boxed{x+1}"], answer=["1+x"]) == [1.0]


def test_verl_gets_the_same_keys_for_every_sample_of_a_batch() -> None:
    scores = compute_scores(
        data_sources=["math"] * 3,
        solution_strs=[r"\boxed{5}", "none", r"\boxed{7}"],
        ground_truths=["5", 6, "9^{9^{9^{9}}}"],
        extra_infos=[None, None, None],
    )
    assert [score["score"] for score in scores] == [1.0, 0.0, 0.0]
    assert [score["undecided"] for score in scores] == [False, False, True]
    assert len({tuple(score) for score in scores}) == 1


def test_a_grader_may_be_shared_with_others() -> None:
    grader = Grader(graders=("numbers",))
    assert TrlReward(grader=grader)(completions=[r"\boxed{x}", r"\boxed{2}"], answer=["x", "2"]) == [None, 1.0]


def test_references_in_the_form_of_gsm8k_are_reduced_as_in_training() -> None:
    completions = [r"\boxed{18}", r"\boxed{19}", r"\boxed{3}"]
    golds = ["9 * 2 = <<9*2=18>>18\n#### 18", "#### 18", r"so $\boxed{3}$"]
    assert TrlReward()(completions=completions, answer=golds) == [1.0, 0.0, 1.0]
    assert [one["score"] for one in compute_scores(["gsm8k"] * 3, completions, golds)] == [1.0, 0.0, 1.0]
    assert compute_scores(["gsm8k"], [r"\boxed{18}"], ["####"])[0]["method"] == "no_reference"
