"""Detects evaluation problems that a run has trained on, word for word or by a shared 8-gram; and lists the benchmarks
that a pool of problems must not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rocstar.data.pool.config import InputSection, PoolConfig
from rocstar.data.pool.overlap import BenchmarkIndex, Overlap
from rocstar.evaluation.benchmark import find_benchmarks, known
from rocstar.record.folder import RunFolder
from rocstar.record.rollouts import questions_of
from rocstar.types import Problem

SHOWN = 5  # overlaps that a note quotes


def beside_known(config: PoolConfig) -> tuple[PoolConfig, dict[str, str]]:
    """A pool recipe with rocstar's own benchmarks added, if `known_benchmarks` includes them and their rows are below
    `data`; and for the others, by name, why they cannot be compared.

    A benchmark that the recipe lists itself, by name or rows, is read as in the recipe."""
    own = {text for section in config.benchmark for text in (section.name, section.path)}
    added, absent = [], {}
    for benchmark in find_benchmarks(",".join(known())):
        name, file = benchmark.name, benchmark.file
        if own.isdisjoint((name, file.hub, *file.files)):
            missing = [path for path in file.files if not (Path(config.data) / path).exists()]
            if not config.known_benchmarks:
                absent[name] = "known_benchmarks is false"
            elif file.kind == "functions":
                absent[name] = "its rows are conversations that ask for calls, and no questions"
            elif missing:
                absent[name] = f"{missing[0]} is not in {config.data}; its rows: {file.source}"
            else:
                added += [InputSection(name=name, path=path, question=[file.question]) for path in file.files]
    return config.model_copy(update={"benchmark": [*config.benchmark, *added]}), absent


def contamination(questions_asked: Iterable[str], trained: Iterable[str], name: str) -> dict[str, Any]:
    """A note for a result: how many of the evaluated questions were trained on, word for word or by an 8-gram.

    questions_asked, trained: repeats count once. name: of the evaluation, for the evidence. Source: the paper's filter
    (§5.1, 8-grams), reversed. An 8-gram may be a stock phrase: read the evidence."""
    questions = list(dict.fromkeys(questions_asked))
    index = BenchmarkIndex(
        Problem(id=f"{line}", question=question, answer="", source=name, metadata={"line": line})
        for line, question in enumerate(questions, 1)
    )
    same: set[int] = set()
    overlaps: dict[int, Overlap] = {}
    hashes: set[int] = set()  # hashes, so that a million questions take some 60 MB
    for question in trained:
        if (key := hash(question)) in hashes:
            continue
        hashes.add(key)
        if found := index.find(question):
            line = found.found.metadata["line"]
            overlaps.setdefault(line, found)
            if found.exact:
                same.add(line)
    shown = [overlap.evidence for line, overlap in sorted(overlaps.items()) if line not in same]
    return {
        "questions": len(questions),
        "trained_questions": len(hashes),
        "same": len(same),
        "shared_8_gram": len(overlaps.keys() - same),
        "evidence": shown[:SHOWN],
    }


def note_of(run: RunFolder | None, step: int, asked: Iterable[str], name: str) -> dict[str, Any] | None:
    """The note for an evaluation of a run's checkpoint; None where the training is unknown: of a plain model, and of a
    run that saved no attempts."""
    if run is None or next(run.rollouts.glob("step=*.parquet"), None) is None:
        return None
    return contamination(asked, trained_questions(run, step), name)


def trained_questions(run: RunFolder, step: int) -> Iterator[str]:
    """Questions that a run has attempted up to a step. Demonstrations of SFT stages are not included."""
    for file in sorted(run.rollouts.glob("step=*.parquet")):
        if file.name <= run.rollout_file(step).name:
            yield from questions_of(file)
