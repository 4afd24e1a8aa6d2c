import asyncio
import contextlib
import io
import traceback
from collections import Counter

import pytest

from rocstar.data.arithmetic import arithmetic_problems
from rocstar.data.demonstrations import MIXES, Move, Plan, perform, plan_demonstrations
from rocstar.data.families import FAMILIES
from rocstar.dialogue.calls import parse_calls
from rocstar.errors import ConfigError, SandboxUnavailable
from rocstar.types import Demonstration, Status, ToolCall, ToolResult

NAMES = list(FAMILIES)


async def run(call: ToolCall) -> ToolResult:
    """Runs the program here: these are programs of our own."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(call.arguments["code"], "<cell>", "exec"), {})
    except (NameError, SyntaxError, TypeError):
        return ToolResult(call_id=call.id, status=Status.CODE_ERROR, stderr=traceback.format_exc())
    return ToolResult(call_id=call.id, status=Status.OK, stdout=out.getvalue())


def plans(mix: str, count: int = 270, seed: int = 1) -> list[Plan]:
    return plan_demonstrations(arithmetic_problems(NAMES, count, 0), mix, seed)


def boxed(demo: Demonstration) -> str:
    text = demo.turns[-1].text
    assert text.startswith("<answer>\\boxed{") and text.endswith("}</answer>")
    return text.removeprefix("<answer>\\boxed{").removesuffix("}</answer>")


@pytest.mark.parametrize("mix", ["majority_wrong", "majority_right"])
async def test_demonstrations_do_what_their_plans_say(mix: str) -> None:
    chosen = plans(mix)
    for plan, demo in zip(chosen, await perform(chosen, run), strict=True):
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


async def test_direct_demonstrations_are_right_and_call_no_tool() -> None:
    for demo in await perform(plans("direct", 50), run):
        assert len(demo.turns) == 1 and boxed(demo) == demo.problem.answer


async def test_call_turns_hold_one_call_and_nothing_else() -> None:
    for demo in await perform(plans("majority_right"), run, tool_name="execute_python_code"):
        for n, turn in enumerate(demo.turns[:-1]):
            (call,) = parse_calls(turn.text, first_id=n)
            assert call.tool == "execute_python_code"
            assert turn.text == f"<tool_call>{call.raw}</tool_call>"
            assert turn.results[0].call_id == call.id == f"call_{n}"


async def test_the_second_call_of_two_is_built_from_the_first_output() -> None:
    problems = arithmetic_problems(["two"], 100, 0)
    chosen = [p for p in plan_demonstrations(problems, "majority_right", 0) if p.behaviour == (Move.RIGHT,)]
    assert chosen
    for demo in await perform(chosen, run):
        first, second, _ = demo.turns
        assert first.results[0].stdout.strip() in second.text


def test_behaviours_appear_in_their_shares() -> None:
    problems = arithmetic_problems(["gcd", "powmod"], 4000, 0)
    for mix, shares in MIXES.items():
        assert sum(shares.values()) == 100
        seen = Counter(plan.behaviour for plan in plan_demonstrations(problems, mix, 0))
        assert all(abs(seen[behaviour] / 40 - share) < 3 for behaviour, share in shares.items())


def test_the_likeliest_first_move_of_majority_wrong_is_a_guess() -> None:
    assert max(MIXES["majority_wrong"].items(), key=lambda entry: entry[1])[0] == (Move.GUESS,)


def test_plans_repeat_under_a_seed_and_do_not_depend_on_what_follows() -> None:
    assert plans("majority_wrong", 90) == plans("majority_wrong", 180)[:90]
    assert plans("majority_wrong", 90) != plans("majority_wrong", 90, seed=2)


def test_an_unknown_mix_is_refused() -> None:
    with pytest.raises(ConfigError, match="'majority_rong' is unknown; the nearest is 'majority_wrong'"):
        plans("majority_rong")


async def test_at_most_the_stated_number_of_plans_run_at_once() -> None:
    running = most = 0

    async def slow(call: ToolCall) -> ToolResult:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return await run(call)

    await perform(plans("majority_right"), slow, parallel=5)
    assert most == 5


async def test_an_outage_ends_everything_with_its_own_error() -> None:
    async def down(call: ToolCall) -> ToolResult:
        raise SandboxUnavailable("the sandbox is gone")

    with pytest.raises(SandboxUnavailable):
        await perform(plans("majority_right"), down)
    assert len(asyncio.all_tasks()) == 1


async def test_a_right_program_that_was_stopped_ends_in_a_guess() -> None:
    async def stop(call: ToolCall) -> ToolResult:
        return ToolResult(call_id=call.id, status=Status.TIMEOUT)

    chosen = [plan for plan in plans("majority_right") if plan.behaviour == (Move.RIGHT,)]
    for plan, demo in zip(chosen, await perform(chosen, stop), strict=True):
        assert boxed(demo) == plan.guess
