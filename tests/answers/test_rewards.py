from pathlib import Path
from typing import Any

import pytest

from rocstar.answers.cases import Case
from rocstar.answers.plugin import TRL, load_function, reward_of, scores, signature_of
from rocstar.errors import ConfigError


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
