"""Decides the fate of one row: by the rules over the row itself, the verifier, earlier rows and the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rocstar.data.pool.config import PoolConfig
from rocstar.data.pool.decontamination import STOCK_QUESTIONS, BenchmarkIndex
from rocstar.data.pool.duplicates import QuestionIndex
from rocstar.data.pool.instructions import in_other_words
from rocstar.data.pool.integers import asked_for_integer, integer_of, same_form
from rocstar.data.pool.rules import RULES, Bounds
from rocstar.types import Problem

LATER_RULES = (
    "gold_refused",
    "conflicting_labels",
    "duplicate",
    "near_duplicate",
    "benchmark_question",
    "benchmark_phrase",
    "benchmark_overlap",
    "disagreement",
)
RULE_NAMES = ("bad_row", *RULES, *LATER_RULES)
"""All reasons to drop a row, in the order in which they are looked for."""
OVERLAP = "rocstar overlap"
"""In the metadata of a problem: evidence that it shares 8-grams with a benchmark. Which rule that is, whether a stock
phrase or more, is known only when all sources were read: see `Judges.late`."""

Check = Callable[[str, str], tuple[bool, str]]
"""(reference, a full response) -> (whether the verifier calls it right, how it decided)."""


@dataclass(frozen=True, slots=True)
class Drop:
    rule: str
    """One of `RULE_NAMES`."""
    evidence: str
    """For a person: what was found, and where."""


@dataclass(slots=True, kw_only=True)
class Judges:
    """All that a row is judged by. Rows must come in order: of two equal ones the first is kept."""

    config: PoolConfig
    check: Check
    """The verifier."""
    seen: QuestionIndex
    benchmarks: BenchmarkIndex
    conflicts: dict[str, str] = field(default_factory=dict)
    """Name of a kept row -> evidence that its question has another label elsewhere; filled while judging."""

    def judge(self, published: Problem, name: str) -> tuple[Problem, Drop | None]:
        """The problem as it goes into the pool, and why it does not, if so."""
        problem = published
        bounds = Bounds(**self.config.limits.model_dump(exclude={"max_bad_rows"}))
        for rule, speak in RULES.items():
            if rule == "not_integer":
                problem = self._with_integer(problem)
            if self._holds(rule) and (evidence := speak(problem, bounds)):
                return problem, Drop(rule, evidence)
        # The sentence that asks for an integer is the same in many questions and must not make them alike.
        repeated = self._repeated(published, name)
        if reason := self._refused(problem) or repeated:
            return problem, reason
        return self._cleared(problem)

    def late(self, problem: Problem, name: str) -> Drop | None:
        """Why a row that was kept so far is dropped after all; to be asked when all rows were judged."""
        if name in self.conflicts and (reason := self._drop("conflicting_labels", self.conflicts[name])):
            return reason
        if OVERLAP not in problem.metadata:
            return None
        rarest = self.benchmarks.rarest(problem.question)
        if rarest >= STOCK_QUESTIONS:
            told = (
                f"a stock phrase: all 8-grams shared with benchmarks stand in {rarest} questions of the sources or more"
            )
            return self._drop("benchmark_phrase", f"{problem.metadata[OVERLAP]}; {told}")
        return self._drop("benchmark_overlap", problem.metadata[OVERLAP])

    def _holds(self, rule: str) -> bool:
        return rule not in self.config.rules.skip

    def _drop(self, rule: str, evidence: str) -> Drop | None:
        return Drop(rule, evidence) if self._holds(rule) else None

    def _with_integer(self, problem: Problem) -> Problem:
        """Plain digits where the answer is an integer, a question for one where that can be had, else as it was."""
        value = integer_of(problem.answer)
        if value is not None:
            return replace(problem, answer=str(value)) if self._holds("not_integer") else problem
        return (asked_for_integer(problem) if self.config.rewrite.fractions_and_roots else None) or problem

    def _refused(self, problem: Problem) -> Drop | None:
        accepted, method = self.check(problem.answer, f"\\boxed{{{problem.answer}}}")
        if accepted:
            return None
        return self._drop("gold_refused", f'the verifier refuses "{problem.answer[:80]}" as its own answer ({method})')

    def _repeated(self, problem: Problem, name: str) -> Drop | None:
        answer = problem.answer
        match = self.seen.add(problem.question, answer, name, form=same_form(answer))
        if match is None:
            return None
        if not match.exact:
            return self._drop("near_duplicate", match.evidence)
        same = match.same_answer or self._equal(match.answer, answer)
        if same and match.name not in self.conflicts:
            return self._drop("duplicate", match.evidence)
        if not same:
            self.conflicts.setdefault(
                match.name, f"{name} has the same text and the answer {answer}, not {match.answer}"
            )
            return self._drop(
                "conflicting_labels", f"{match.name} has the same text and the answer {match.answer}, not {answer}"
            )
        return self._drop("conflicting_labels", f"same text as {match.name}; {self.conflicts[match.name]}")

    def _equal(self, gold: str, other: str) -> bool:
        """Whether two answers of different form are equal; where only integers, fractions and roots are left, never."""
        return not self._holds("not_integer") and self.check(gold, f"\\boxed{{{other}}}")[0]

    def _cleared(self, problem: Problem) -> tuple[Problem, Drop | None]:
        """The problem without what it shares with a benchmark, where that is an instruction; else with the evidence."""
        overlap = self.benchmarks.find(problem.question)
        if overlap is None:
            return problem, None
        if overlap.exact:
            return problem, self._drop("benchmark_question", overlap.evidence)
        self.benchmarks.count(problem.question)
        other = in_other_words(problem) if self.config.rewrite.instructions else None
        if other is not None and self.benchmarks.find(other.question) is None:
            return other, None
        return replace(problem, metadata={**problem.metadata, OVERLAP: overlap.evidence}), None
