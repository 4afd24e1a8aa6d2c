from collections import Counter
from collections.abc import Iterator

import pytest

from rocstar.data.arithmetic import FAMILIES, arithmetic_problems
from rocstar.data.demonstrations import MIXES, DemonstrationPlan, Move, perform, plan_demonstrations, work_out
from rocstar.dialogue.calls import HERMES, render_call
from rocstar.errors import ConfigError
from rocstar.sandbox.call import Limits
from rocstar.sandbox.client import SandboxClient
from rocstar.tools.python import PythonTool
from rocstar.types import Demonstration, Status

NAMES = list(FAMILIES)


def plans(mix: str, count: int = 120, seed: int = 1) -> list[DemonstrationPlan]:
    return plan_demonstrations(arithmetic_problems(NAMES, count, 0), mix, seed)


def boxed(demo: Demonstration) -> str:
    text = demo.turns[-1].text
    assert text.startswith("<answer>\\boxed{") and text.endswith("}</answer>")
    return text.removeprefix("<answer>\\boxed{").removesuffix("}</answer>")


@pytest.mark.parametrize("mix", ["majority_wrong", "majority_right"])
def test_demonstrations_do_what_their_plans_say(mix: str) -> None:
    chosen = plans(mix)
    for plan, demo in zip(chosen, map(perform, chosen), strict=True):
        assert demo.problem == plan.problem
        statuses = [result.status for turn in demo.turns for result in turn.results]
        assert len(statuses) == len(plan.codes) == len(demo.turns) - 1
        assert statuses.count(Status.CODE_ERROR) == plan.behaviour.count(Move.BROKEN)
        if plan.behaviour[-1] is Move.RIGHT:
            assert boxed(demo) == plan.problem.answer == demo.turns[-2].results[0].stdout.strip()
        if plan.behaviour[-1] is Move.WRONG:
            assert boxed(demo) == demo.turns[-2].results[0].stdout.strip()
        if plan.behaviour[-1] is Move.GUESS:
            assert boxed(demo) == plan.guess != plan.problem.answer
        if plan.behaviour[0] is Move.SILENT:
            assert demo.turns[0].results[0].stdout == ""


def test_direct_demonstrations_are_right_and_call_no_tool() -> None:
    for demo in map(perform, plans("direct", 50)):
        assert len(demo.turns) == 1 and boxed(demo) == demo.problem.answer


def test_call_turns_hold_one_call_and_nothing_else() -> None:
    for demo in (perform(plan, "execute_python_code") for plan in plans("majority_right")):
        for n, turn in enumerate(demo.turns[:-1]):
            (call,) = HERMES.parse(turn.text, first_id=n)
            assert call.tool == "execute_python_code"
            assert turn.text == f"<tool_call>{call.raw}</tool_call>"
            assert turn.results[0].call_id == call.id == f"call_{n}"


def test_the_second_call_of_two_is_built_from_the_first_output() -> None:
    problems = arithmetic_problems(["two"], 100, 0)
    chosen = [p for p in plan_demonstrations(problems, "majority_right", 0) if p.behaviour == (Move.RIGHT,)]
    assert chosen
    for demo in map(perform, chosen):
        first, second, _ = demo.turns
        assert first.results[0].stdout.strip() in second.text


def test_behaviours_appear_in_their_shares() -> None:
    assert max(MIXES["majority_wrong"].items(), key=lambda entry: entry[1])[0] == (Move.GUESS,)
    problems = arithmetic_problems(["gcd", "powmod"], 2000, 0)
    for mix, shares in MIXES.items():
        assert sum(shares.values()) == 100
        seen = Counter(plan.behaviour for plan in plan_demonstrations(problems, mix, 0))
        assert all(abs(seen[behaviour] / 20 - share) < 3 for behaviour, share in shares.items())


def test_plans_repeat_under_a_seed_and_do_not_depend_on_what_follows() -> None:
    assert plans("majority_wrong", 90) == plans("majority_wrong", 180)[:90]
    assert plans("majority_wrong", 90) != plans("majority_wrong", 90, seed=2)


def test_an_unknown_mix_is_refused() -> None:
    with pytest.raises(ConfigError, match="'majority_rong' is unknown; the nearest is 'majority_wrong'"):
        plans("majority_rong")


@pytest.fixture(scope="module")
def client() -> Iterator[SandboxClient]:
    with SandboxClient.start(slots=1, preload=()) as client:
        yield client


async def test_what_is_worked_out_is_what_the_sandbox_says(client: SandboxClient) -> None:
    """Every program of every family, tracebacks included, but for the work directory and the clock."""
    tool = PythonTool(client, Limits())
    problems = arithmetic_problems(NAMES, 2 * len(NAMES), 5)
    codes = {
        code.format(**operands, **family.fragments(operands)).replace("{out}", "12")
        for family, operands in ((FAMILIES[p.metadata["family"]], p.metadata["operands"]) for p in problems)
        for code in (*(c for chain in (*family.right, *family.wrong) for c in chain), *family.broken, *family.silent)
    } | {"print(3", "print 3", "def f(n):\n    return f(n - 1) if n else g\nprint(f(3))"}
    for code in sorted(codes):
        (call,) = HERMES.parse(render_call("python", {"code": code}))
        ours, real = work_out(call), await tool.run(call)
        assert (ours.status, ours.stdout, ours.value) == (real.status, real.stdout, real.value)
        assert ours.stderr == real.stderr
