"""The problems of an evaluation, from a file or a benchmark, and the kinds of benchmarks: the columns each reads, its
problems, its conversation, its scorer.

To add a kind, write its module in `scorers/`, a line in KINDS and its name in `BenchmarkFile.kind`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rocstar.data.problems import ProblemColumns, columns_of, load_problems, problem_of
from rocstar.data.rows import fingerprint, read_rows
from rocstar.errors import DataError
from rocstar.evaluation.benchmark import (
    Benchmark,
    BenchmarkFile,
    ProtocolSection,
    Rows,
    checksum,
    lines,
    refuse_no_folder,
)
from rocstar.evaluation.chat_client import ChatClient
from rocstar.evaluation.endpoint import EndpointSolver
from rocstar.evaluation.recall import Recall
from rocstar.evaluation.scorers import arena, choice, functions, ifeval
from rocstar.evaluation.scoring import Scorer
from rocstar.rollout.collect import Roller
from rocstar.rollout.environment import Conversation, EnvironmentFactory, OneTurn
from rocstar.types import Problem

if TYPE_CHECKING:
    from rocstar.parts.build import AttemptParts

OF_DIALOGUE = ("rollout.preamble", "rollout.environment", "rollout.max_turns", "rollout.feedback")
"""Prefixes of keys without effect on a benchmark of one turn."""
OneSolver = TypeVar("OneSolver", bound=Roller | EndpointSolver)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkKind:
    columns: Callable[[BenchmarkFile], Sequence[str]]
    """The columns that are read; the checksum is over them."""
    problems: Callable[[BenchmarkFile, Rows], list[Problem]]
    """Builds the problems, in the order of the rows. Raises DataError. Their `metadata` may hold `functions` that the
    model may call, which `OneTurn` shows."""
    scorer: Callable[..., Scorer] | None = None
    """Takes the fields of a Scorer; None: the verifier in force (`evaluate.verifier`)."""
    check: Callable[[], None] = lambda: None
    """Raises if a requirement of scoring is not installed; called before anything starts."""
    one_turn: bool = False
    """Whether it uses the plain chat template, without our tools, for one completion."""
    needs_judge: bool = False

    def leaves_unread(self, key: str) -> bool:
        """Whether a setting has no effect on attempts of this kind."""
        talks = self.one_turn and key.startswith(OF_DIALOGUE)
        return talks or (self.scorer is not None and key == "evaluate.verifier")

    def refuse_rows(self, problems: Sequence[Problem], parts: AttemptParts) -> None:
        """Raises DataError like `AttemptParts.refuse_rows`."""
        calls = parts.recipe.calls_tools and not self.one_turn
        parts.refuse_rows(problems, calls=calls, verified=self.scorer is None)

    def conversation(self, usual: Conversation) -> Conversation:
        """`usual`; for a benchmark of one turn without preamble and tools."""
        if not self.one_turn:
            return usual
        return replace(usual, template=usual.template.chat(), tools=(), own_tools=lambda: ())

    @property
    def environment(self) -> EnvironmentFactory | None:
        """Makes the environment of each attempt; None: the one in force (`rollout.environment`)."""
        return OneTurn if self.one_turn else None

    def solver(self, usual: OneSolver, recall: Recall, judge: ChatClient | None = None) -> OneSolver:
        """`usual`, with its engine, sandbox and limits, for attempts of this kind. recall: stores the judge's
        answers."""
        conversation = self.conversation(usual.conversation)
        parts = {"codec": usual.codec, "calls": conversation.template.calls, "recall": recall, "judge": judge}
        return replace(
            usual,
            conversation=conversation,
            environment=self.environment or usual.environment,
            verifier=self.scorer(**parts) if self.scorer else usual.verifier,
        )


def _math_problems(file: BenchmarkFile, rows: Rows) -> list[Problem]:
    """Problems with a short answer. A number as the answer becomes text, as in any file (data/problems.py); several
    answers become one list in text: all of them are required (OlympiadBench). Raises DataError."""
    columns = ProblemColumns(layout="given", question=(file.question,), answer=file.answer)
    problems = []
    for number, (part, where, row) in enumerate(lines(rows, file.files), start=1):
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected one JSON object with columns, got {type(row).__name__}.")
        answer = row.get(file.answer)
        if isinstance(answer, list):
            row = {**row, file.answer: ", ".join(map(str, answer))}
        problems.append(problem_of(row, columns, where=where, source=part, line=number))
    return problems


MATH = BenchmarkKind(columns=lambda file: [file.question, file.answer], problems=_math_problems)
"""Also the kind of a plain file of problems, which are posed and judged as in training."""
KINDS = {
    "math": MATH,
    "choice": BenchmarkKind(columns=choice.columns, problems=choice.problems, scorer=choice.ChoiceScorer),
    "ifeval": BenchmarkKind(
        columns=ifeval.columns,
        problems=ifeval.problems,
        scorer=ifeval.IfevalScorer,
        check=ifeval.check,
        one_turn=True,
    ),
    "ifbench": BenchmarkKind(
        columns=ifeval.columns,
        problems=ifeval.problems,
        scorer=partial(ifeval.IfevalScorer, decide=ifeval.published),
        check=ifeval.check_ifbench,
        one_turn=True,
    ),
    "functions": BenchmarkKind(
        columns=functions.columns, problems=functions.problems, scorer=functions.FunctionScorer, one_turn=True
    ),
    "judged": BenchmarkKind(
        columns=arena.columns, problems=arena.problems, scorer=arena.ArenaScorer, one_turn=True, needs_judge=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """The problems of one evaluation, read and checked."""

    title: str
    """The file's path or the benchmark's name, for the user."""
    stem: str
    """Names the folder of the result."""
    kind: BenchmarkKind
    protocol: ProtocolSection
    """How they are sampled, unless the command line changes it."""
    problems: Sequence[Problem]
    described: Mapping[str, Any]
    """`setup.data` of the result."""


def read_file(path: str, question: Sequence[str], answer: str, limit: int | None) -> ProblemSet:
    """A file of problems. question: columns, joined by a space. limit: read only the first so many rows. Raises
    DataError."""
    problems = load_problems(path, question=question, answer=answer, limit=limit)
    sha256, _ = fingerprint(path)
    _, row = next(iter(read_rows(path)))
    columns = columns_of(row, path, tuple(question), answer)
    return ProblemSet(
        title=path,
        stem=Path(path).name.split(".")[0],
        kind=MATH,
        protocol=ProtocolSection(attempts=1, temperature=1.0),
        problems=problems,
        described={
            "path": str(Path(path).resolve()) if sha256 else path,
            "sha256": sha256,
            "question": list(columns.question),
            "answer": columns.answer,
            "limit": limit,
        },
    )


def read_benchmark(benchmark: Benchmark, folder: Path | None, *, limit: int | None, accept: bool) -> ProblemSet:
    """A benchmark with its rows. folder: holds them; None: use the hub. accept: allow rows with another checksum than
    the benchmark's file gives; the result then records both. Raises DataError, ConfigError."""
    file, kind = benchmark.file, KINDS[benchmark.file.kind]
    kind.check()
    refuse_no_folder(folder, benchmark.name)
    rows, place = benchmark.read(folder)
    sha256 = checksum(rows, kind.columns(file))
    benchmark.checked(sha256, accept=accept)
    return ProblemSet(
        title=benchmark.name,
        stem=benchmark.name,
        kind=kind,
        protocol=file.protocol,
        problems=kind.problems(file, rows)[:limit],
        described={
            "benchmark": benchmark.name,
            "title": file.title,
            "place": place,
            "sha256": sha256,
            "expected_sha256": file.sha256,
            "limit": limit,
        },
    )
