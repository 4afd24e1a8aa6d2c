"""Our verdicts as reward functions of other trainers: TRL's batch signature, verl's per sample and per batch.

    from rocstar.adapters.rewards import TrlReward          # GRPOTrainer(reward_funcs=TrlReward(answer="solution"))
    custom_reward_function.path=.../rocstar/adapters/rewards.py custom_reward_function.name=compute_score     # verl

Neither library is imported. UNDECIDED is no reward in TRL (None: the sample is skipped) and 0 with a mark in verl,
which has no equivalent. An outage raises VerifierUnavailable: the trainer should stop rather than learn from it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

from rocstar.answers.cases import completion_text
from rocstar.answers.extract import boxed_answer, strict_answer
from rocstar.answers.grade import Grade, Grader, Pair
from rocstar.data.problems import reference_of
from rocstar.dialogue.calls import HERMES
from rocstar.errors import DataError
from rocstar.types import Verdict

Message = Mapping[str, Any]
NO_REFERENCE = Grade(Verdict.UNDECIDED, "no_reference", None)


class TrlReward:
    """`reward(prompts=..., completions=..., **columns) -> list[float | None]`, as TRL calls it."""

    def __init__(self, *, answer: str = "answer", strict: bool = False, grader: Grader | None = None) -> None:
        """answer: the column with the references. strict: only a box inside `<answer>` counts. grader: shared with
        others when given; its owner closes it."""
        self.__name__ = "rocstar_answers"  # TRL names the metric after it
        self._answer = answer
        self._strict = strict
        self._grader = grader

    def __call__(self, *, completions: Sequence[str | Sequence[Message]], **columns: Any) -> list[float | None]:
        """1.0, 0.0, or None for UNDECIDED. Raises DataError without the column, and VerifierUnavailable."""
        if self._answer not in columns:
            raise DataError(
                f"TRL passed the columns {', '.join(columns)}, and no {self._answer!r}; name it with answer=."
            )
        texts = [completion_text(completion) for completion in completions]
        grades = graded(texts, columns[self._answer], strict=self._strict, grader=self._grader)
        return [None if grade.verdict is Verdict.UNDECIDED else _reward(grade) for grade in grades]


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> dict[str, Any]:
    """verl's per-sample signature. Raises VerifierUnavailable."""
    (score,) = compute_scores([data_source], [solution_str], [ground_truth], [extra_info])
    return score


def compute_scores(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Any] | None = None,
    **_: Any,
) -> list[dict[str, Any]]:
    """verl's batch signature (`reward_manager=batch`): the same keys for every sample, as it wants them. `acc` is what
    it averages in validation. Raises VerifierUnavailable."""
    grades = graded(solution_strs, ground_truths)
    return [
        {
            "score": _reward(grade),
            "acc": grade.verdict is Verdict.RIGHT,
            "pred": grade.extracted or "",
            "method": grade.method,
            "undecided": grade.verdict is Verdict.UNDECIDED,
        }
        for grade in grades
    ]


def graded(
    texts: Sequence[str], golds: Sequence[Any], *, strict: bool = False, grader: Grader | None = None
) -> list[Grade]:
    """Extraction and comparison of whole texts in one call, from any thread: only a box is an answer, and none inside a
    tool call. A row without a reference is UNDECIDED. Raises DataError and VerifierUnavailable."""
    find = strict_answer if strict else boxed_answer
    if wrong := [gold for gold in golds if not isinstance(gold, str | Number | None)]:
        raise DataError(f"the reference {wrong[0]!r:.80} is a {type(wrong[0]).__name__}; give a text or a number")
    # NaN is pandas' None.
    references = ["" if gold is None or gold != gold else reference_of(str(gold)) for gold in golds]
    rows = zip(texts, references, strict=True)
    pairs = [Pair(gold=gold, predicted=find(HERMES.strip(text))) for text, gold in rows if gold]
    grades = iter((grader or shared_grader(os.getpid())).grade_now(pairs))
    return [next(grades) if gold else NO_REFERENCE for gold in references]


@functools.cache
def shared_grader(pid: int) -> Grader:
    """One for the process `pid`, which must be the caller's own: after a fork the workers belong to the parent."""
    return Grader()


def _reward(grade: Grade) -> float:
    return 1.0 if grade.verdict is Verdict.RIGHT else 0.0
