"""Arena-Hard: a judge model compares each answer with a baseline's, twice, the second time with the places swapped.

The judge writes [[A>>B]], [[A>B]], [[A=B]], [[B>A]] or [[B>>A]]; a strong verdict counts three times. The figure is the
mean score of all games, 1 for a win and 0.5 for a tie, without a correction for style. An attempt is RIGHT if its two
games score more than a half. A judge that gives no verdict is not asked again: the attempt is UNDECIDED.

Source: Arena-Hard-Auto (Li et al. 2024, arXiv 2406.11939), Apache-2.0, for verdicts, weights and the mean of games; the
prompt to the judge is ours."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rocstar.errors import DataError, VerifierUnavailable
from rocstar.evaluation.benchmark import BenchmarkFile, Row, Rows, column, lines
from rocstar.evaluation.intervals import figure
from rocstar.evaluation.scoring import Scorer, judged, ratio
from rocstar.rollout.together import all_or_none
from rocstar.types import Group, Outcome, Problem, Trajectory, Verdict, problem_id

STRONG = 3  # games that a strong verdict counts as
SCORES: Mapping[str, tuple[float, int]] = {
    "A>>B": (1.0, STRONG),
    "A>B": (1.0, 1),
    "A=B": (0.5, 1),
    "B>A": (0.0, 1),
    "B>>A": (0.0, STRONG),
}
"""Verdict -> (score of A, games it counts as)."""
SPELLED = {"A<B": "B>A", "A<<B": "B>>A", "B<A": "A>B", "B<<A": "A>>B", "B=A": "A=B"}
_VERDICT = re.compile(r"\[\[([AB](?:>>|>|=|<<|<)[AB])\]\]")
SYSTEM = (
    "You compare two answers to one request, A and B, as an impartial judge. First write down how you would answer it "
    "yourself. Then compare both answers with that: correctness first, then whether they help, are to the point and "
    "leave nothing out. Name what is wrong. The order of the answers and their length must not sway you. End with "
    "exactly one verdict: [[A>>B]] if A is much better, [[A>B]] if A is slightly better, [[A=B]] if they are about "
    "equal, [[B>A]] if B is slightly better, [[B>>A]] if B is much better."
)


def columns(file: BenchmarkFile) -> list[str]:
    return ["uid", file.question]


def problems(file: BenchmarkFile, rows: Rows) -> list[Problem]:
    """Raises DataError. `answer` is the baseline's: `answers` holds rows with `uid` and `answer`."""
    baseline = {column(row, "uid", where): _answer(row, where) for _, where, row in lines(rows, file.answers)}
    problems_found = []
    for part, where, row in lines(rows, file.files):
        name, question = column(row, "uid", where), str(column(row, file.question, where))
        if name not in baseline:
            raise DataError(
                f"{where}: the baseline has no answer to {name!r} in {', '.join(file.answers) or 'no file'}."
            )
        problems_found.append(Problem(id=problem_id(question), question=question, answer=baseline[name], source=part))
    return problems_found


def _answer(row: Row, where: str) -> str:
    """The baseline's answer in a plain row, or in a row of Arena-Hard's own `model_answer` files."""
    if "messages" in row:
        content = row["messages"][-1]["content"]
        return str(content["answer"] if isinstance(content, Mapping) else content)
    return str(column(row, "answer", where))


class ArenaScorer(Scorer):
    async def verify_all(self, attempts: Sequence[tuple[Problem, Trajectory]]) -> list[Outcome | VerifierUnavailable]:
        """VerifierUnavailable where the judge could not be reached. Raises ContractBroken for an ENVIRONMENT_FAILED
        attempt."""
        return await all_or_none(self._judged(problem, attempt) for problem, attempt in attempts)

    def figures(self, groups: Sequence[Group]) -> dict[str, Any]:
        """`win_rate` with an interval that treats the question as the unit."""
        games = [
            [_score_of(found) for a in group.trajectories if a.outcome and (found := a.outcome.extracted)]
            for group in groups
        ]
        sums = [(sum(won for won, _ in group), sum(weight for _, weight in group)) for group in games]
        return {"win_rate": figure(ratio(sums))}

    async def _judged(self, problem: Problem, attempt: Trajectory) -> Outcome | VerifierUnavailable:
        text = self.final_text(attempt)
        try:
            first = await self._ask(problem.question, text, problem.answer)
            second = await self._ask(problem.question, problem.answer, text)
        except VerifierUnavailable as error:
            return error
        if first is None or second is None:
            undecided = judged(False, method="no_verdict", extracted=None, text=text)
            return replace(undecided, verdict=Verdict.UNDECIDED)
        verdicts = f"{first}, {second}"
        won, weight = _score_of(verdicts)
        return judged(won / weight > 0.5, method="judge", extracted=verdicts, text=text)

    async def _ask(self, question: str, a: str, b: str) -> str | None:
        assert self.judge is not None
        judge, prompt = self.judge, f"The request:\n{question}\n\nAnswer A:\n{a}\n\nAnswer B:\n{b}"
        key = f"judge/{hashlib.sha256(prompt.encode('utf-8', 'replace')).hexdigest()}"
        return verdict_in(str(await self.recall.answer(key, lambda: judge.ask(prompt, system=SYSTEM))))


def verdict_in(text: str) -> str | None:
    """The verdict in a judge's text; None if there is none, or several that differ."""
    found = {SPELLED.get(one, one) for one in _VERDICT.findall(text)} & SCORES.keys()
    return found.pop() if len(found) == 1 else None


def _score_of(verdicts: str) -> tuple[float, int]:
    """(score, games) of the subject: it was A in the first game and B in the second."""
    first, second = (SCORES[one] for one in verdicts.split(", "))
    return first[0] * first[1] + (1 - second[0]) * second[1], first[1] + second[1]
