"""Reward functions as people write them, loaded by name in tests."""

import time
from collections.abc import Sequence
from typing import Any

score = 5


def trl(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    return [float(said == gold) for said, gold in zip(completions, answer, strict=True)]


def trl_of_chats(completions: list[list[dict[str, str]]], prompts: Any, solution: Sequence[str]) -> list[float]:
    asked, said = prompts[0][-1], completions[0][-1]
    return [float((asked["role"], said["role"], said["content"]) == ("user", "assistant", solution[0]))]


async def trl_unsure(completions: Sequence[str], level: Sequence[int] = (0,), **_: Any) -> list[float | None]:
    return [None if level[0] else 1.0]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    return {"score": float(solution_str == ground_truth and extra_info["question"] == "q")}


def moody(solution_str: str, **_: Any) -> Any:
    if solution_str == "raise":
        raise SystemExit("no mood")
    if solution_str == "sleep":
        time.sleep(30)
    odd = {"half": 0.5, "more": 0.75, "less": -1, "nan": float("nan"), "inf": float("inf"), "huge": 10**400}
    return {**odd, "large": 1e308, "much": "much", "digit": "1", "yes": True, "list": [1]}.get(solution_str, 0)


def greedy(completions: Sequence[str], answer: Sequence[str], width: int) -> list[float]:
    return [1.0]


def greedy_of_verl(data_source: str, solution_str: str, width: int, **_: Any) -> float:
    return 1.0


class Kept:
    def __call__(self, completions: Sequence[str], **_: Any) -> list[bool]:
        return [True]


class Picky:
    def __init__(self, model: str) -> None:
        self.model = model


def scalar(completions: Sequence[str], **_: Any) -> float:
    return 1.0


def empty(completions: Sequence[str], **_: Any) -> list[float]:
    return []


def unscored(solution_str: str, **_: Any) -> dict[str, int]:
    return {"scor": 1}


seen: list[dict[str, Any]] = []
"""What some of them were given."""


def trl_as_usual(completions, prompts, level=None, **columns):  # type: ignore[no-untyped-def]
    """Without annotations, as in TRL's own examples: shows what it was given."""
    seen.append({"completions": completions, "prompts": prompts, "level": level, **columns})
    return [1.0]


def trl_of_lengths(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def verl_of_rows(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    seen.append({**extra_info, "data_source": data_source, "text": solution_str})
    return 1.0


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def mute(completions: Sequence[str], **_: Any) -> list[float]:
    raise Mute


def greedy_of_cases(completions: list[list[dict[str, Any]]], prompts: Any, cases: Any = None, **_: Any) -> list[float]:
    """Changes all that it gets; the reward is the number of cases that were left."""
    prompts[0][-1]["content"] = "mine"
    for call in completions[0][0].get("tool_calls", ()):
        call["function"]["arguments"]["of"].append("mine")
    left = len(cases[0]["inputs"])
    cases[0]["inputs"].pop()
    return [left]


def verl_of_cases(solution_str: str, extra_info: Any, **_: Any) -> float:
    left = len(extra_info["cases"]["inputs"])
    extra_info["cases"]["inputs"].pop()
    return left
