"""IFEval: an answer is right where it follows every instruction of its prompt to the letter (strict, prompt level).
Figures beside that: strict for single instructions, and loose for both, where the answer may also pass without its
stars, its first or its last line.

IFBench has the same figures over 58 harder kinds of instructions. Its checks lean on taggers, syllable and emoji
tables, so they are not written again: the benchmark's own package `ifbench` of github.com/allenai/IFBench is asked.

Sources: Zhou et al. 2023, arXiv 2311.07911 (paper Table 5 quotes the strict prompt level); Pyatkin et al. 2025, arXiv
2507.02833."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from rocstar.errors import ConfigError, DataError
from rocstar.evaluation.benchmark import BenchmarkFile, Row, Rows, column, lines
from rocstar.evaluation.intervals import figure, mean_over_problems
from rocstar.evaluation.scorers.instructions import CHECKS, follows, variants
from rocstar.evaluation.scoring import Parts, Scorer, final_text, judged, ratio
from rocstar.types import Group, Outcome, Problem, Trajectory, problem_id

Follows = Callable[[str, Mapping[str, Any], str, str], bool]
"""(instruction, its arguments, prompt, answer) -> whether the answer follows it."""
IFBENCH_HINT = "pip install git+https://github.com/allenai/IFBench"


def columns(file: BenchmarkFile) -> list[str]:
    return [file.question, "instruction_id_list", "kwargs"]


def problems(file: BenchmarkFile, rows: Rows) -> list[Problem]:
    """Raises DataError."""
    return [_problem(file, part, where, row) for part, where, row in lines(rows, file.files)]


def _problem(file: BenchmarkFile, part: str, where: str, row: Row) -> Problem:
    question = str(column(row, file.question, where))
    names, arguments = column(row, "instruction_id_list", where), column(row, "kwargs", where)
    if not isinstance(names, list) or not isinstance(arguments, list) or len(names) != len(arguments):
        raise DataError(f"{where}: instruction_id_list and kwargs are not two lists of one length.")
    metadata = {"instructions": names, "arguments": arguments}
    return Problem(id=problem_id(question), question=question, answer="", source=part, metadata=metadata)


def check() -> None:
    """Raises ModuleNotFoundError without the libraries, ConfigError without the data that nltk downloads apart."""
    download = f"{sys.executable} -m nltk.downloader punkt_tab"
    for name in ("nltk", "langdetect"):
        if find_spec(name) is None:
            error = ModuleNotFoundError(f"No module named {name!r}", name=name)
            error.add_note(download)
            raise error
    try:
        import nltk

        nltk.word_tokenize("One. Two.")
    except LookupError:
        raise ConfigError(
            f"IFEval counts sentences with nltk's punkt_tab, which is not there; get it with: {download}"
        ) from None


def ours(instruction: str, arguments: Mapping[str, Any], prompt: str, answer: str) -> bool:
    return follows(instruction, arguments, answer)


def check_ifbench() -> None:
    """Raises ConfigError where its package is not there."""
    if find_spec("ifbench") is None:
        raise ConfigError(f"IFBench is scored by its own package, which is not installed; {IFBENCH_HINT}")


def published(instruction: str, arguments: Mapping[str, Any], prompt: str, answer: str) -> bool:
    """What IFBench's package says. Raises KeyError for an instruction that it does not know."""
    from ifbench import instructions_registry

    one = instructions_registry.INSTRUCTION_DICT[instruction](instruction)
    one.build_description(**{name: value for name, value in arguments.items() if value is not None})
    if "prompt" in (one.get_instruction_args() or {}):
        one.build_description(prompt=prompt)
    return bool(answer.strip()) and bool(one.check_following(answer))


class IfevalScorer(Scorer):
    """`follows` decides about one instruction; ours knows those of IFEval. `method` of an outcome spells the verdicts
    on single instructions: S strict, l only loose, . neither."""

    def __init__(self, parts: Parts, follows: Follows = ours) -> None:
        super().__init__(parts)
        self._follows = follows

    def figures(self, groups: Sequence[Group]) -> dict[str, Any]:
        signs = [[_signs(attempt) for attempt in group.trajectories if attempt.outcome] for group in groups]
        loose = [[("." not in one) for one in group] for group in signs if group]
        return {
            "prompt_strict": figure(mean_over_problems([_share(_strict(one) for one in g) for g in signs if g])),
            "prompt_loose": figure(mean_over_problems([sum(group) / len(group) for group in loose])),
            "instruction_strict": figure(ratio([("".join(g).count("S"), len("".join(g))) for g in signs])),
            "instruction_loose": figure(ratio([(len(t) - t.count("."), len(t)) for t in map("".join, signs)])),
        }

    def outcome(self, problem: Problem, attempt: Trajectory) -> Outcome:
        """Raises DataError for an instruction of no known kind."""
        text = final_text(self.parts, attempt)
        pairs = zip(problem.metadata["instructions"], problem.metadata["arguments"], strict=True)
        signs = "".join(self._sign(name, arguments, problem.question, text) for name, arguments in pairs)
        return judged(_strict(signs), method=f"instructions {signs}", extracted=None, text=text)

    def _sign(self, name: str, arguments: Mapping[str, Any], prompt: str, text: str) -> str:
        if self._follows is ours and name not in CHECKS:
            raise DataError(f"{name!r} is no instruction of IFEval; the rows are of another benchmark.")
        if self._follows(name, arguments, prompt, text):
            return "S"
        return "l" if any(self._follows(name, arguments, prompt, one) for one in variants(text)) else "."


def ifbench_scorer(parts: Parts) -> IfevalScorer:
    return IfevalScorer(parts, published)


def _signs(attempt: Trajectory) -> str:
    return attempt.outcome.method.partition(" ")[2] if attempt.outcome else ""


def _strict(signs: str) -> bool:
    return set(signs) <= {"S"}


def _share(right: Iterable[bool]) -> float:
    return fmean(map(float, right))
