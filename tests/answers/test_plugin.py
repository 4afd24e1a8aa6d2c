"""Verifiers by name, and functions of other trainers as verifiers."""

import asyncio
import gc
import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from rocstar.answers import plugin
from rocstar.answers.cases import Case
from rocstar.answers.grade import Grader
from rocstar.answers.plugin import (
    NAMES,
    Reward,
    RewardVerifier,
    Transcript,
    columns_for,
    load_reward,
    reward_of,
    scores,
    verifier_named,
)
from rocstar.cli.verbs import answers
from rocstar.config.sections import EvaluateSection
from rocstar.errors import ConfigError, VerifierUnavailable
from rocstar.evaluation.endpoint import CodePoints
from rocstar.support.plugins import own_loop
from rocstar.types import RIGHT_ABOVE, Outcome, Problem, Stop, Turn, Verdict
from tests.answers.reward_functions import seen
from tests.contracts.test_verifier import attempt, printed, problem, turn, verified

RIGHT, WRONG, UNDECIDED = Verdict.RIGHT, Verdict.WRONG, Verdict.UNDECIDED
HERE = "tests.answers.reward_functions:"


def loaded(name: str, seconds: float = 60.0) -> Reward:
    return replace(load_reward(HERE + name), seconds=seconds)


async def asked(
    name: str, text: str, answer: str = "5", stop: Stop = Stop.ANSWERED, right_above: float = 0.5
) -> Outcome | VerifierUnavailable:
    reward = RewardVerifier(CodePoints(), loaded(name, 0.2), right_above=right_above)
    (found,) = await reward.verify_all([(problem(answer), attempt(turn(text), stop=stop))])
    return found


@pytest.mark.parametrize("name", ["trl", "trl_of_chats", "verl"])
async def test_each_signature_gets_the_text_and_the_reference(name: str) -> None:
    for text, verdict in (("5", RIGHT), ("6", WRONG)):
        found = await asked(name, text)
        assert isinstance(found, Outcome)
        assert (found.verdict, found.reward, found.method) == (verdict, float(verdict is RIGHT), "function")


async def test_a_call_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = Mock(wraps=plugin.run_in_daemon_thread)
    monkeypatch.setattr(plugin, "run_in_daemon_thread", begun)
    reward = RewardVerifier(CodePoints(), loaded("moody", 0.2))
    for _ in range(2):
        found = await reward.verify_all([(problem("5"), attempt(turn("sleep")))] * 50)
        assert all(isinstance(one, VerifierUnavailable) for one in found)
    assert begun.call_count == 1

    cases = [Case(line=line, text=text, gold="5") for line, text in ((1, "yes"), (2, "sleep"), (2, "yes"))]
    found = await scores(load_reward(HERE + "moody"), cases, seconds=0.5)  # as long as in training
    assert [one.reward for one in found] == [1.0, None, None] and begun.call_count == 3
    assert [one.error for one in found] == ["", *[f"{HERE}moody gave no reward within 0.5 s."] * 2]


async def test_the_wait_for_other_groups_is_no_part_of_a_calls_time() -> None:
    def slow(solution_str: str, **_: Any) -> float:
        time.sleep(0.3)
        return 1.0

    reward = RewardVerifier(CodePoints(), replace(reward_of("f", slow), seconds=1.0))
    groups = await asyncio.gather(*(reward.verify_all([(problem("5"), attempt(turn("5")))]) for _ in range(4)))
    assert all(isinstance(found, Outcome) for (found,) in groups)


def test_an_async_function_judges_all_attempts_at_once_on_one_loop_for_the_clients_that_it_keeps() -> None:
    """They were asked one after the other, each on a loop of its own, where a kept client was of a closed one."""
    loops, all_there = list[asyncio.AbstractEventLoop](), asyncio.Event()

    async def ends() -> None:
        raise SystemExit(3)

    async def judge(completions: list[str], **_: Any) -> list[float]:
        loops.append(asyncio.get_running_loop())
        if len(loops) == 5:
            all_there.set()
        await all_there.wait()
        if completions == ["4"]:
            await asyncio.create_task(ends())  # it would end the loop
        return [1.0]

    reward = reward_of("judge", judge)
    asked = [(problem("5"), attempt(turn(text))) for text in "54555"]
    for _ in range(2):
        found = asyncio.run(RewardVerifier(CodePoints(), reward).verify_all(asked))
        assert [isinstance(one, Outcome) for one in found] == [True, False, True, True, True]
    assert len(loops) == 10 and len(set(loops)) == 1


def test_nothing_is_logged_of_an_async_call_that_is_no_longer_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def slow(solution_str: str, **_: Any) -> None:
        await asyncio.sleep(60)

    reward = replace(reward_of("slow", slow), seconds=0.1)
    with pytest.raises(VerifierUnavailable, match="An async def must leave its event loop free"):
        asyncio.run(reward.judge(problem("5"), Transcript.of_text("5"), "it"))
    for _ in range(5):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), own_loop()).result()
    gc.collect()
    assert not caplog.records


async def test_a_case_that_fails_loses_no_other_and_a_text_is_no_number() -> None:
    def odd(solution_str: str, **_: Any) -> Any:
        if solution_str == "4":
            raise SystemExit(3)
        return {"0": 1 / (solution_str != "2"), "1": 0.5}.get(solution_str, "1")

    found = await scores(reward_of("f", odd), [Case(line=n, text=str(n), gold="") for n in range(5)])
    assert [one.reward for one in found] == [1.0, 0.5, None, None, None]
    assert [bool(one.error) for one in found] == [False, False, True, True, True]
    assert "ZeroDivisionError" in found[2].error and "SystemExit" in found[4].error
    assert "f gave '1' as the reward of line 3; let it return a number" in found[3].error


async def test_none_is_undecided_and_columns_of_the_problem_are_offered() -> None:
    verifier = RewardVerifier(CodePoints(), loaded("trl_unsure"))
    hard = replace(problem("5"), metadata={"level": 3})
    assert (await verified(verifier, hard, attempt(turn("5")))).verdict is UNDECIDED
    assert (await verified(verifier, problem("5"), attempt(turn("5")))).verdict is RIGHT


@pytest.mark.parametrize(("text", "reward"), [("yes", 0.0), ("half", 0.0), ("no", 0.0), ("less", -1.0)])
async def test_a_truncated_attempt_is_wrong_and_never_cheaper_than_a_wrong_answer(text: str, reward: float) -> None:
    found = await asked("moody", text, stop=Stop.MAX_TOKENS)
    assert isinstance(found, Outcome)
    assert (found.verdict, found.method, found.reward) == (WRONG, "truncated", reward)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise", f"your reward function {HERE}moody raised SystemExit: no mood (reward_functions.py, line 29)"),
        ("sleep", "within 0.2 s"),
    ],
)
async def test_a_function_that_fails_is_an_outage_and_no_reward(text: str, told: str) -> None:
    found = await asked("moody", text)
    assert isinstance(found, VerifierUnavailable) and told in str(found)


@pytest.mark.parametrize(
    ("text", "above", "verdict", "reward"),
    [
        ("half", 0.5, WRONG, 0.5),
        ("half", 0.0, RIGHT, 0.5),
        ("more", 0.5, RIGHT, 0.75),
        ("less", 0.5, WRONG, -1.0),
        ("less", -2.0, RIGHT, -1.0),
    ],
)
async def test_a_graded_reward_is_kept_and_right_above_the_threshold(
    text: str, above: float, verdict: Verdict, reward: float
) -> None:
    found = await asked("moody", text, right_above=above)
    assert isinstance(found, Outcome) and (found.verdict, found.reward) == (verdict, reward)


def test_one_threshold_holds_where_nobody_names_another() -> None:
    assert EvaluateSection().right_above == RIGHT_ABOVE
    (shown,) = [one for one in inspect.signature(answers.test).parameters.values() if one.name == "right_above"]
    assert shown.default == RIGHT_ABOVE


@pytest.mark.parametrize(
    ("text", "stop"),
    [*((text, Stop.ANSWERED) for text in ("nan", "inf", "large")), ("nan", Stop.MAX_TOKENS), ("huge", Stop.MAX_TOKENS)],
)
async def test_a_reward_that_is_not_finite_is_a_fault_of_the_function_and_names_the_case(text: str, stop: Stop) -> None:
    found = await asked("moody", text, stop=stop)
    assert isinstance(found, VerifierUnavailable)
    assert "as the reward of attempt 0 at problem" in str(found) and "('q'); let it return a number up" in str(found)


class Tensor:
    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


async def test_other_finite_numbers_of_a_dict_are_parts_of_the_reward() -> None:
    none = {
        "why": "so",
        "none": None,
        "list": [1],
        "nan": float("nan"),
        "large": 1e308,
        "huge": 10**400,
        "tensor": Tensor(),
    }
    given: dict[Any, Any] = {"score": 0.25, "form": True, 3: 2.5, **none}
    for function in (lambda solution_str: given, lambda completions: [given]):
        reward = RewardVerifier(CodePoints(), reward_of("f", function))
        for stop, earned in ((Stop.ANSWERED, 0.25), (Stop.MAX_TOKENS, 0.0)):
            found = await verified(reward, problem("5"), attempt(turn("5"), stop=stop))
            assert (found.reward, found.parts) == (earned, {"form": 1.0, "3": 2.5})


@pytest.mark.parametrize("text", ["much", "digit", "list"])
async def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"of attempt 0 at problem \w+ \('q'\); let it return a number"):
        await asked("moody", text)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("scalar", "gave 1.0; let it return a list, with one number for each completion"),
        ("empty", "gave 0 rewards for 1 completion"),
        ("unscored", "gave {'scor': 1}; let it return a number, or a dict with the number as \"score\""),
    ],
)
async def test_a_reward_of_another_shape_is_refused_and_says_what_to_return(name: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        await asked(name, "5")
    assert str(refused.value) == f"your reward function {HERE}{name} {told}"
    (case,) = await scores(load_reward(HERE + name), [Case(line=1, text="5", gold="5")])
    assert case.error == str(refused.value)


async def test_a_class_is_made_and_true_is_right() -> None:
    for name in ("Kept", "moody"):
        found = await asked(name, "yes")
        assert isinstance(found, Outcome) and found.verdict is RIGHT


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("boxd", "the nearest is 'boxed'"),
        ("tool-output", "the nearest is 'tool_output'"),
        ("no_such_module_at_all:f", "there is no module no_such_module_at_all"),
        (HERE + "verll", "the nearest is 'verl'"),
        (HERE + "verll", "evaluate.verifier = "),
        (HERE + "score", "score is of type int"),
        (HERE + "Picky", "cannot be made without arguments"),
        (HERE + "greedy_of_verl", "requires width, which no verifier gets"),
        (HERE + "greedy_of_verl", "extra_info has the columns of the data"),
        ("builtins:vars", "has no readable signature"),
        ("os.path:join", "evaluate.verifier = 'os.path:join' takes (a, p); TRL's signature has completions"),
    ],
)
def test_a_name_that_cannot_work_is_refused_in_one_sentence_before_anything_starts(name: str, told: str) -> None:
    for refuse in (columns_for, lambda name: verifier_named(name, CodePoints(), Grader())):
        with pytest.raises(ConfigError) as error:
            refuse(name)
        assert told in str(error.value) and "\n" not in str(error.value)


async def test_every_name_makes_a_verifier_with_the_settings_it_knows() -> None:
    cut = attempt(turn("the answer is 5"), stop=Stop.MAX_TURNS)
    assert columns_for(HERE + "greedy") == ["width"]
    for name in (*NAMES, HERE + "trl"):
        assert not columns_for(name)
        found = await verified(verifier_named(name, CodePoints(), Grader()), problem("5"), cut)
        assert (found.verdict, found.method) == (WRONG, "truncated")
    foreign = verifier_named("boxed", CodePoints(), Grader(), truncated="graded", phrases=True)
    assert (await verified(foreign, problem("5"), cut)).verdict is RIGHT


@pytest.mark.parametrize(
    ("gold", "said", "verdict"),
    [("XIV", "XIV", RIGHT), ("XIV", "XVI", WRONG), ("a3b2", "b2a3", WRONG), ("007", "7", WRONG), ("Hi", "hi", WRONG)],
)
async def test_boxed_text_compares_letter_for_letter(gold: str, said: str, verdict: Verdict) -> None:
    verifier = verifier_named("boxed_text", CodePoints(), Grader())
    found = await verified(verifier, problem(gold), attempt(turn(rf"\boxed{{\text{{{said}}}}}")))
    assert (found.verdict, found.extracted) == (verdict, rf"\text{{{said}}}")


async def given(name: str, problem: Problem, *turns: Turn, ends: Sequence[int] = ()) -> dict[str, Any]:
    """What the function of this name was given for an attempt."""
    seen.clear()
    verifier = RewardVerifier(CodePoints(), loaded(name), ends=ends)
    assert (await verified(verifier, problem, attempt(*turns))).verdict is RIGHT
    return seen.pop()


async def test_completions_are_conversations_where_the_prompt_is_one_as_in_trl() -> None:
    asked = ({"role": "system", "content": "s"}, {"role": "user", "content": "q"})
    call = turn("I call.<tool_call>x</tool_call>", printed("5"))
    found = await given("trl_as_usual", replace(problem("5"), messages=asked), call, turn("It is 5."))
    (said,) = found["completions"]
    assert found["prompts"] == [list(asked)]
    assert [one["role"] for one in said] == ["assistant", "tool", "assistant"]
    assert [one["content"] for one in said] == ["I call.", "5", "It is 5."] and "tool_calls" not in said[2]
    assert said[0]["tool_calls"] == [{"type": "function", "function": {"name": "python", "arguments": {"code": ""}}}]
    found = await given("trl_as_usual", problem("5"), call, turn("It is 5."))
    assert (found["completions"], found["prompts"]) == (["I call.\nIt is 5."], ["q"])


async def test_columns_of_the_row_win_over_ours_of_the_same_name() -> None:
    row = replace(problem("5"), metadata={"solution": "So it is 5.", "source": "web", "level": None})
    found = await given("trl_as_usual", row, turn("5"))
    wanted = {"solution": ["So it is 5."], "answer": ["5"], "source": ["web"], "level": [None]}
    assert {name: found[name] for name in wanted} == wanted


async def test_verl_is_given_the_row_s_own_data_source_and_extra_info() -> None:
    row = {"data_source": "openai/gsm8k", "extra_info": {"index": 7, "question": "raw"}, "line": 3}
    found = await given("verl_of_rows", replace(problem("5"), metadata=row), turn("a", printed("5")), turn("b"))
    wanted = {"data_source": "openai/gsm8k", "index": 7, "question": "raw", "num_turns": 4}
    assert {name: found[name] for name in wanted} == wanted


async def test_what_ends_a_turn_is_not_shown_to_a_function() -> None:
    """A pattern that ends with $ would never match."""
    letters = CodePoints().encode("5.")
    assert (await given("verl_of_rows", problem("5"), turn("5."), ends=letters[-1:]))["text"] == "5"
    assert (await given("verl_of_rows", problem("5"), turn("5."), ends=letters[:1]))["text"] == "5."


async def test_a_function_may_count_the_tokens_after_the_prompt() -> None:
    verifier = RewardVerifier(CodePoints(), loaded("trl_of_lengths"))
    found = await verified(verifier, problem("5"), attempt(turn("abc", printed("5")), turn("de")))
    assert found.reward == len(CodePoints().encode("abc" + "reply" + "de"))


async def test_an_error_without_words_is_told_by_its_type_and_waited_for_no_longer() -> None:
    found = await RewardVerifier(CodePoints(), loaded("mute", 30)).verify_all([(problem("5"), attempt(turn("5")))])
    assert "raised Mute (its text cannot be read)" in str(found[0])


@pytest.mark.parametrize("name", ["greedy_of_cases", "verl_of_cases"])
async def test_a_function_that_changes_what_it_gets_changes_nothing_for_the_next_attempt(name: str) -> None:
    said = ({"role": "user", "content": "q"},)
    one = replace(problem("5"), metadata={"cases": {"inputs": [1, 2]}}, messages=said)
    asked = [(one, attempt(turn("5"))), (one, attempt(turn("6")))]
    found = await RewardVerifier(CodePoints(), loaded(name)).verify_all(asked)
    assert [isinstance(each, Outcome) and each.reward for each in found] == [2.0, 2.0]
    assert one.metadata == {"cases": {"inputs": [1, 2]}} and one.messages[0]["content"] == "q"
