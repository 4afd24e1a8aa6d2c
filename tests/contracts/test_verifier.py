"""What every Verifier promises: an Outcome for any attempt, whatever the model wrote and whoever stands beside it, in
order, and reward for RIGHT only."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import pytest

from rocstar.answers.grade import Grader
from rocstar.answers.plugin import NAMES, RewardVerifier, load_reward, verifier_named
from rocstar.answers.symbolic import SymbolicChecker
from rocstar.answers.verifier import BoxedVerifier
from rocstar.errors import ContractBroken
from rocstar.evaluation.endpoint import CodePoints
from rocstar.protocols import Verifier
from rocstar.types import (
    Completion,
    Finish,
    Outcome,
    Problem,
    Status,
    Stop,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
    problem_id,
)
from tests.scripted import ScriptedVerifier

HOSTILE = {
    "empty": "",
    "long": "{x}" * 100_000,
    "long in a box": "\\boxed{" + "7" * 300_000 + "}",
    "boxes that never close": "\\boxed{" * 20_000,
    "braces": "\\boxed{" + "{" * 30_000 + "}" * 30_000 + "}",
    "answer tags": "<answer>" * 20_000 + "</answer>" * 20_000,
    "control characters": "\\boxed{" + "".join(map(chr, range(32))) + "\x7f\x85\u2028\ud800\uffff}",
    "tower of powers": "\\boxed{9^{9^{9^{9^{9}}}}}",
    "factorials of factorials": "\\boxed{((((10!)!)!)!)}",
    "deep brackets": "\\boxed{" + "(" * 900 + "x" + ")" * 900 + "}",
    "deep fractions": "\\boxed{" + "\\frac{1}{" * 200 + "x" + "}" * 200 + "}",
    "division by zero": "\\boxed{\\frac{1}{0}}",
    "huge exponent": "\\boxed{10^{999999999}}",
    "python": "\\boxed{__import__('os').abort()}",
    "latex commands": "\\boxed{\\input{/etc/passwd}\\def\\x{\\x}\\x}",
}


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    grader = Grader(SymbolicChecker(deadline_seconds=0.7, memory_bytes=512 << 20))
    yield grader
    asyncio.run(grader.close())


def judged_by(function: str, grader: Grader) -> Verifier:
    return RewardVerifier(CodePoints(), load_reward(f"tests.answers.reward_functions:{function}"))


MAKERS: dict[str, Callable[[Grader], Verifier]] = {
    **{name: partial(verifier_named, name, CodePoints()) for name in NAMES},
    "boxed_foreign": lambda grader: BoxedVerifier(CodePoints(), grader, truncated="graded", phrases=True),
    "trl_function": partial(judged_by, "trl"),
    "verl_function": partial(judged_by, "verl"),
    "scripted": lambda grader: ScriptedVerifier(lambda problem, trajectory: Verdict.RIGHT),
    "scripted_undecided": lambda grader: ScriptedVerifier(lambda problem, trajectory: Verdict.UNDECIDED),
}


@pytest.fixture(params=MAKERS)
def verifier(request: pytest.FixtureRequest, grader: Grader) -> Verifier:
    return MAKERS[request.param](grader)


def turn(text: str, result: ToolResult | None = None) -> Turn:
    ids = tuple(CodePoints().encode(text))
    completion = Completion(token_ids=ids, logprobs=(0.0,) * len(ids), finish=Finish.STOP)
    if result is None:
        return Turn(completion=completion)
    call = ToolCall(id=result.call_id, tool="python", arguments={"code": ""}, raw="")
    return Turn(completion=completion, calls=(call,), results=(result,), reply_ids=tuple(CodePoints().encode("reply")))


def printed(text: str, status: Status = Status.OK) -> ToolResult:
    return ToolResult(call_id="0", status=status, stdout=text)


def attempt(*turns: Turn, stop: Stop = Stop.ANSWERED) -> Trajectory:
    return Trajectory(problem_id="p", index=0, prompt_ids=(1, 2), turns=turns, stop=stop)


def problem(answer: str) -> Problem:
    return Problem(id=problem_id("q"), question="q", answer=answer)


async def verified(verifier: Verifier, problem: Problem, trajectory: Trajectory) -> Outcome:
    """The outcome of one attempt on its own."""
    (outcome,) = await verifier.verify_all([(problem, trajectory)])
    assert isinstance(outcome, Outcome)
    return outcome


def hostile_attempt(text: str) -> Trajectory:
    return attempt(turn(text, printed(text)), turn(f"<answer>{text}</answer>"))


async def test_hostile_text_gets_the_same_outcome_whoever_stands_beside_it(verifier: Verifier) -> None:
    """A step in one call: one outcome each, in order, and each the one that the attempt gets in other company."""
    golds = cycle((r"\sqrt{2}", "5"))
    attempts = [(problem(gold), hostile_attempt(text)) for gold, text in zip(golds, HOSTILE.values(), strict=False)]
    together = await verifier.verify_all(attempts)
    assert list(reversed(await verifier.verify_all(attempts[::-1]))) == together
    for name, outcome in zip(HOSTILE, together, strict=True):
        assert isinstance(outcome, Outcome) and outcome.method, name
        assert outcome.reward == (1.0 if outcome.verdict is Verdict.RIGHT else 0.0), name
        assert outcome.verdict is not Verdict.RIGHT or isinstance(verifier, ScriptedVerifier), name
    for alone in (0, -1):
        assert await verified(verifier, *attempts[alone]) == together[alone]


async def test_any_shape_of_attempt_gets_an_outcome(verifier: Verifier) -> None:
    for turns in ((), (turn(""),), (turn("call", printed("")),)):
        for stop in (Stop.ANSWERED, Stop.MAX_TURNS, Stop.MAX_TOKENS):
            outcome = await verified(verifier, problem("5"), attempt(*turns, stop=stop))
            assert outcome.reward == (1.0 if outcome.verdict is Verdict.RIGHT else 0.0)
    assert await verifier.verify_all([]) == []


async def test_a_truncated_attempt_earns_nothing(request: pytest.FixtureRequest, verifier: Verifier) -> None:
    if "boxed_foreign" in request.node.name or isinstance(verifier, ScriptedVerifier):
        pytest.skip("graded on request; told what to say")
    for stop in (Stop.MAX_TURNS, Stop.MAX_TOKENS):
        wrote = attempt(turn("c", printed("5")), turn("\\boxed{5}"), stop=stop)
        outcome = await verified(verifier, problem("5"), wrote)
        assert (outcome.verdict, outcome.reward, outcome.method) == (Verdict.WRONG, 0.0, "truncated")
        assert outcome.format_facts.boxed


async def test_an_environment_failure_is_never_verified(verifier: Verifier) -> None:
    right, failed = (attempt(turn("\\boxed{5}"), stop=stop) for stop in (Stop.ANSWERED, Stop.ENVIRONMENT_FAILED))
    with pytest.raises(ContractBroken):
        await verifier.verify_all([(problem("5"), right), (problem("5"), failed)])
