"""Run somebody's reward function over cases and set what it gives beside our verdict.

Knows TRL's batch signature (`completions=..., **columns -> list[float]`, plain or async) and verl's per-sample one
(`data_source, solution_str, ground_truth, extra_info -> float | dict`). The function is the person's own code: it runs
in this process, without any wall.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rocstar.answers.cases import Case
from rocstar.errors import ConfigError
from rocstar.support.plugins import load, raised_by

TRL, VERL = "trl", "verl"
SHOWN_CHARS = 80  # of what a function gave, in a message
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    case: Case
    reward: float | None
    """What the function gave; None when it said nothing (TRL's None) or raised."""
    error: str
    """What it raised or returned instead of a number; empty otherwise."""
    milliseconds: float
    """Wall time; in TRL's signature the share of a batch."""


def load_function(name: str, folders: Sequence[Path | str] = ()) -> Function:
    """`module:function`, or `file.py:function` as verl names it; a class is made without arguments. `folders` and the
    current one are searched. Raises ConfigError."""
    found = load(name, folders=(*folders, Path.cwd()), setting="reward function")
    if not inspect.isclass(found):
        return cast(Function, found)
    try:
        return cast(Function, found())
    except Exception as error:
        raise ConfigError(f"{name} is a class that cannot be made without arguments: {error}.") from error


def signature_of(function: Function, name: str = "the reward function") -> str:
    """`trl` or `verl`, by the names of its parameters. Raises ConfigError when they tell neither."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # of builtins
        raise ConfigError(f"{name} does not say what it takes; wrap it in a function of your own.") from error
    if "completions" in parameters:
        return TRL
    if "solution_str" in parameters:
        return VERL
    raise ConfigError(
        f"{name} takes ({', '.join(parameters)}); TRL's signature has completions, verl's has solution_str."
    )


def score(
    function: Function, signature: str, cases: Sequence[Case], *, batch: int = 16, chat: bool = False
) -> list[Scored]:
    """What the function gives each case, in order; an exception of it becomes the `error` of the cases it was given.

    TRL: called with batches; every column of the rows goes in as a list, the text as `completions` (with `chat` as a
    conversation of one assistant message). verl: called per case; columns that are not its own make up `extra_info`."""
    if signature == VERL:
        return [_score_one(function, case) for case in cases]
    found: list[Scored] = []
    for at in range(0, len(cases), batch):
        found += _score_batch(function, cases[at : at + batch], chat=chat)
    return found


def _score_batch(function: Function, cases: Sequence[Case], *, chat: bool) -> list[Scored]:
    names = dict.fromkeys(name for case in cases for name in case.columns)
    columns: dict[str, Any] = {name: [case.columns.get(name) for case in cases] for name in names}
    columns.setdefault("answer", [case.gold for case in cases])
    prompts = columns.pop("prompt", columns.pop("prompts", [""] * len(cases)))
    columns.pop("completions", None)
    completions = [[{"role": "assistant", "content": case.text}] if chat else case.text for case in cases]
    started = time.perf_counter()
    try:
        given = function(prompts=prompts, completions=completions, **columns)
        given = asyncio.run(given) if inspect.iscoroutine(given) else given
        rewards, told = rewards_in(given, TRL, len(cases)), ""
    except ConfigError as wrong:
        told = str(wrong)
    except Exception as error:
        if len(cases) > 1:  # whose case it was is said, and the others have their rewards
            return [scored for case in cases for scored in _score_batch(function, [case], chat=chat)]
        told = raised_by(function, error)
    if told:
        rewards = [None] * len(cases)
    share = 1000 * (time.perf_counter() - started) / len(cases)
    return [_scored(case, reward, told, share) for case, reward in zip(cases, rewards, strict=True)]


def _score_one(function: Function, case: Case) -> Scored:
    row = dict(case.columns)
    extra = row.pop("extra_info", None) or row
    started = time.perf_counter()
    try:
        given = function(
            data_source=row.get("data_source", ""), solution_str=case.text, ground_truth=case.gold, extra_info=extra
        )
        (reward,), told = rewards_in(given, VERL, 1), ""
    except ConfigError as wrong:
        reward, told = None, str(wrong)
    except Exception as error:
        reward, told = None, raised_by(function, error)
    return _scored(case, reward, told, 1000 * (time.perf_counter() - started))


def rewards_in(given: Any, signature: str, completions: int) -> list[Any]:
    """The rewards, whatever they are, of so many completions (one, in verl's signature). Raises ConfigError, to be read
    after the function's name, where the function gave something else."""
    shown = repr(given)[:SHOWN_CHARS]
    if signature == VERL:
        if isinstance(given, Mapping) and "score" not in given:
            raise ConfigError(f'gave {shown}; let it return a number, or a dict with the number as "score"')
        return [given["score"] if isinstance(given, Mapping) else given]
    if isinstance(given, str | Mapping) or not hasattr(given, "__iter__"):
        raise ConfigError(f"gave {shown}; let it return a list, with one number for each completion")
    rewards = list(given)
    if len(rewards) != completions:
        raise ConfigError(f"gave {len(rewards)} rewards for {completions} completions")
    return rewards


def number_of(given: Any) -> float:
    """What a reward function gave; numbers of numpy and torch are taken, the text of a number is not. An integer past
    what a float holds is inf. Raises TypeError, ValueError."""
    if isinstance(given, str | bytes):
        raise TypeError("a text is no number")
    try:
        return float(given)
    except OverflowError:
        return math.inf


def _scored(case: Case, reward: Any, told: str, milliseconds: float) -> Scored:
    if reward is not None:
        try:
            reward = number_of(reward)
        except (TypeError, ValueError):
            reward, told = None, f"gave {reward!r} instead of a number"
        else:
            reward, told = (reward, told) if math.isfinite(reward) else (None, f"gave {reward}")
    return Scored(case=case, reward=reward, error=told, milliseconds=milliseconds)
