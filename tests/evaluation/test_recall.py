"""What was asked once is not asked again, in this process or the next."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.errors import ConfigError
from rocstar.evaluation.recall import FILE, Recall, pack, unpack
from rocstar.types import Completion, Finish, Status, Stop, ToolCall, ToolResult, Trajectory, Turn, VersionSpan


def attempt(ids: tuple[int, ...] = (5, 70_000), stop: Stop = Stop.ANSWERED) -> Trajectory:
    call = ToolCall(id="call_0", tool="python", arguments={"code": "1", "n": [1, None]}, raw="{}")
    result = ToolResult(call_id="call_0", status=Status.CODE_ERROR, stderr="x", run_seconds=0.5)
    completion = Completion(
        token_ids=ids, logprobs=(-0.5,) * len(ids), finish=Finish.STOP, version_spans=(VersionSpan(3, len(ids)),)
    )
    turn = Turn(completion=completion, calls=(call,), results=(result,), reply_ids=(9,))
    return Trajectory(problem_id="p", index=2, prompt_ids=(1, 2), turns=(turn,), stop=stop, seconds=1.5, told_tokens=4)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_an_attempt_comes_back_as_it_was_and_unknown_log_probabilities_stay_unknown(ids: list[int]) -> None:
    made = attempt(tuple(ids))
    assert unpack(pack(made)) == made
    unknown = replace(made.turns[0].completion, logprobs=(math.nan,) * len(ids))
    back = unpack(pack(replace(made, turns=(replace(made.turns[0], completion=unknown),))))
    assert all(map(math.isnan, back.turns[0].completion.logprobs))


async def test_what_an_earlier_process_got_is_not_asked_again_and_faults_are(tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(name: str, stop: Stop) -> Any:
        async def made() -> Trajectory:
            asked.append(name)
            return replace(attempt(stop=stop), turns=()) if stop is Stop.AGENT_FAILED else attempt(stop=stop)

        return made

    first = Recall(tmp_path / "e")
    assert not (tmp_path / "e").exists()
    await first.attempt("a", ask("a", Stop.ANSWERED))
    await first.attempt("b", ask("b", Stop.ENVIRONMENT_FAILED))
    await first.attempt("c", ask("c", Stop.AGENT_FAILED))  # before the model said anything
    first.close()
    with (tmp_path / "e" / FILE).open("a") as torn:
        torn.write('{"asked": "c", "ans')
    second = Recall(tmp_path / "e")
    assert second.found == 1
    assert await second.attempt("a", ask("a", Stop.ANSWERED)) == attempt()
    await second.attempt("b", ask("b", Stop.ANSWERED))
    await second.attempt("c", ask("c", Stop.ANSWERED))
    assert asked == ["a", "b", "c", "b", "c"]
    second.close()
    assert Recall(tmp_path / "e").found == 3


async def test_what_was_asked_under_other_settings_is_asked_again(tmp_path: Path) -> None:
    given = []

    async def answer() -> str:
        given.append("x")
        return "x"

    for setup, found in (("before-1", 0), ("before-2", 0), ("before-2", 1), ("before-1", 1)):
        with Recall(tmp_path, setup) as recall:
            assert recall.found == found and recall.first("model", f"{setup} {found}") == f"{setup} 0"
            await recall.answer("a", answer)
    assert len(given) == 2


async def test_two_processes_do_not_make_one_evaluation(tmp_path: Path) -> None:
    async def answer() -> str:
        return "x"

    one, other = Recall(tmp_path), Recall(tmp_path)
    await one.answer("a", answer)
    with pytest.raises(ConfigError, match="another process"):
        await other.answer("a", answer)
    with pytest.raises(ConfigError, match="another process"):
        Recall(tmp_path)
    one.forget()
    assert not (tmp_path / FILE).exists()
