from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rocstar.answers.cases import Case
from rocstar.answers.plugin import TRL, Scored, load_function, reward_of, scores, signature_of
from rocstar.errors import ConfigError


async def scored(function: Any) -> list[Scored]:
    """Of the texts 0 to 4."""
    return await scores(reward_of("f", function), [Case(line=n, text=str(n), gold="") for n in range(5)])


async def test_what_goes_wrong_in_the_function_is_told_for_its_cases() -> None:
    def short_of_one(completions: Sequence[str], **_: Any) -> list[float]:
        return [1.0] * (len(completions) - 1)

    def broken(solution_str: str, **_: Any) -> Any:
        if solution_str == "4":
            raise SystemExit(3)
        return {"1": 1 / 0, "2": "much", "3": float("nan")}[solution_str] if solution_str != "0" else 1

    assert {one.error for one in await scored(short_of_one)} == {
        "your reward function f gave 0 rewards for 1 completion"
    }
    found = (await scored(broken))[1:]
    assert [one.reward for one in found] == [None] * 4
    assert all(one.error for one in found) and "SystemExit" in found[-1].error


async def test_a_case_that_fails_loses_no_other_and_a_text_is_no_number() -> None:
    def odd(completions: Sequence[str], **_: Any) -> list[Any]:
        return [{"0": 1 / (one != "2"), "3": "1"}.get(one, 0.5) for one in completions]

    found = (await scored(odd))[:4]
    assert [one.reward for one in found] == [1.0, 0.5, None, None]
    assert "ZeroDivisionError" in found[2].error
    assert "f gave '1' as the reward of line 3; let it return a number" in found[3].error


def test_functions_are_loaded_by_module_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_for_a_test.py").write_text(
        "class Score:\n    def __call__(self, completions): return [1]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_rewards_for_a_test:Score", f"{tmp_path}/my_rewards_for_a_test.py:Score"):
        assert signature_of(load_function(name)) == TRL
    for name in ("my_rewards_for_a_test:missing", "no_such_module:f", "nothing", "os:sep"):
        with pytest.raises(ConfigError):
            load_function(name)
