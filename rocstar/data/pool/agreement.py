"""Label check: a problem whose label few attempts reach is likely mislabelled (paper §4.2: 2 of 16 must agree).

The answers come from a file. A model is asked for the missing ones, which are added to that file; every response is
cached beside it before it is used, so a stopped build resumes. Problems are asked in blocks and attempts in sequence,
which bounds memory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rocstar.data.pool.config import AgreementSection, EndpointSection
from rocstar.data.problems import as_written
from rocstar.data.rows import read_rows
from rocstar.data.sft.endpoint import AnswerCache, ChatEndpoint
from rocstar.data.sft.format import Refused
from rocstar.errors import ConfigError, DataError
from rocstar.types import Problem, problem_id

BLOCK_PROBLEMS = 1000
SHOWN_ANSWERS = 3
SHOWN_CHARS = 40


class AnswerBook:
    """Answers by problem, in an SQLite file, so that memory does not grow with them."""

    def __init__(self, file: Path) -> None:
        self.rows = 0
        """Rows read."""
        self._database = sqlite3.connect(file, isolation_level=None)
        self._database.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; CREATE TABLE said (id TEXT, answer TEXT);"
        )

    def read(self, answers: Path) -> None:
        """Read a file of {"id" or "question", "answers": [text, ...]}; several rows of one problem add up.

        Raises DataError naming file, line and field."""
        self._database.execute("BEGIN")
        for line, row in read_rows(answers):
            where = f"{answers}, line {line}"
            name = row.get("id") or (problem_id(row["question"].strip()) if row.get("question") else None)
            if name is None:
                raise DataError(f'{where}: no field "id" or "question"; each row says which problem it answers.')
            given = row.get("answers")
            if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
                raise DataError(f'{where}, field "answers": expected a list of texts, got {as_written(given)}.')
            self.add(name, given)
        self._database.execute("COMMIT")
        self._database.execute("CREATE INDEX IF NOT EXISTS said_id ON said (id)")

    def add(self, name: str, said: Sequence[str]) -> None:
        """Add answers to the problem of that id."""
        self.rows += 1
        self._database.executemany("INSERT INTO said VALUES (?, ?)", [(name, text) for text in said])

    def answers(self, name: str) -> list[str]:
        """The answers to the problem of that id, in the order of the file."""
        return [
            text for (text,) in self._database.execute("SELECT answer FROM said WHERE id = ? ORDER BY rowid", (name,))
        ]

    def close(self) -> None:
        self._database.close()


def disagreement(
    gold: str, said: Sequence[str], least: int, agrees: Callable[[str, str], tuple[bool, str]]
) -> str | None:
    """Evidence that fewer than `least` of the answers equal the label; None if enough do. Source: paper §4.2."""
    wrong: Counter[str] = Counter()
    right = 0
    for text in said:
        accepted, _ = agrees(gold, text)
        right += accepted
        if right >= least:
            return None
        if not accepted:
            wrong[" ".join(text[-SHOWN_CHARS:].split())] += 1
    others = "; ".join(f"{count} x {text!r}" for text, count in wrong.most_common(SHOWN_ANSWERS))
    return (
        f"{right} of {len(said)} answers equal the label {gold}, at least {least} must; others end with {others or '-'}"
    )


def ask_missing(
    agreement: AgreementSection, book: AnswerBook, problems: Iterable[Problem], note: Callable[[str], None]
) -> None:
    """Ask the endpoint about each problem without answers, and store them in the book and `agreement.answers`; a no-op
    without an endpoint. Raises EngineUnavailable, and ConfigError for wrong settings."""
    endpoint = agreement.endpoint
    if endpoint is None or agreement.answers is None:
        return
    file = Path(agreement.answers)
    cache = AnswerCache(file.with_name(f"{file.name}.cache.sqlite"))
    try:
        missing = (problem for problem in problems if not book.answers(problem.id))
        while block := list(itertools.islice(missing, BLOCK_PROBLEMS)):
            said = asyncio.run(_ask_all(endpoint, cache, block))
            with file.open("a", encoding="utf-8") as answers:
                for problem, texts in zip(block, said, strict=True):
                    book.add(problem.id, texts)
                    answers.write(json.dumps({"id": problem.id, "answers": texts}, ensure_ascii=False) + "\n")
            note(f"asked {endpoint.model} {endpoint.attempts} times about {len(block)} problems")
    finally:
        cache.close()


async def _ask_all(settings: EndpointSection, cache: AnswerCache, block: Sequence[Problem]) -> list[list[str]]:
    """[problem][attempt]."""
    key = None
    if settings.key_variable is not None:
        key = os.environ.get(settings.key_variable)
        if key is None:
            raise ConfigError(f"agreement.endpoint.key_variable: there is no variable {settings.key_variable}; set it")

    endpoint = ChatEndpoint(
        url=settings.url,
        model=settings.model,
        key=key,
        concurrency=settings.concurrency,
        timeout_seconds=settings.timeout_seconds,
        parameters={"temperature": settings.temperature, "max_tokens": settings.max_tokens},
        cache=cache,
    )

    async def ask(problem: Problem, attempt: int) -> str:
        """A refused, cut or empty response is an attempt without an answer."""
        message = {"role": "user", "content": f"{problem.question}\n\n{settings.instruction}"}
        try:
            return await endpoint.answer([message], seed=attempt)  # the seed makes attempts different requests
        except Refused:
            return ""

    async with endpoint:
        attempts = range(settings.attempts)
        by_attempt = [await asyncio.gather(*(ask(problem, attempt) for problem in block)) for attempt in attempts]
    return [list(texts) for texts in zip(*by_attempt, strict=True)]
