"""Asks a model for the answers that the agreement check lacks, and adds them to the answers file.

Every response is remembered in a cache beside that file before it is used, so a build that was stopped goes on where it
was. Problems are asked in blocks and attempts one after another, so what is held in memory has a bound.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rocstar.data.pool.agreement import AnswerBook
from rocstar.data.pool.config import AgreementSection, EndpointSection
from rocstar.data.sft.endpoint import AnswerCache, ChatEndpoint
from rocstar.data.sft.format import Refused
from rocstar.errors import ConfigError
from rocstar.types import Problem

BLOCK_PROBLEMS = 1000


def ask_missing(
    agreement: AgreementSection, book: AnswerBook, problems: Iterable[Problem], note: Callable[[str], None]
) -> None:
    """Ask the endpoint about each problem that the book has no answers to, into `agreement.answers`; nothing to do
    without an endpoint. Raises EngineUnavailable, and ConfigError for wrong settings."""
    endpoint = agreement.endpoint
    if endpoint is None or agreement.answers is None:
        return
    file = Path(agreement.answers)
    cache = AnswerCache(file.with_name(f"{file.name}.cache.sqlite"))
    try:
        missing = (problem for problem in problems if not book.answers(problem.id))
        for block in _blocks(missing):
            said = asyncio.run(_ask_all(endpoint, cache, block))
            with file.open("a", encoding="utf-8") as answers:
                for problem, texts in zip(block, said, strict=True):
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
    by_attempt = []
    for attempt in range(settings.attempts):
        endpoint = ChatEndpoint(
            url=settings.url,
            model=settings.model,
            key=key,
            concurrency=settings.concurrency,
            timeout_seconds=settings.timeout_seconds,
            # The seed makes attempts different requests, for the cache too.
            parameters={"temperature": settings.temperature, "max_tokens": settings.max_tokens, "seed": attempt},
            cache=cache,
        )
        async with endpoint:
            by_attempt.append(await asyncio.gather(*(_ask(endpoint, settings, problem) for problem in block)))
    return [list(texts) for texts in zip(*by_attempt, strict=True)]


async def _ask(endpoint: ChatEndpoint, settings: EndpointSection, problem: Problem) -> str:
    """A response that was refused, cut or empty is an attempt that found nothing."""
    content = f"{problem.question}\n\n{settings.instruction}"
    try:
        return await endpoint.answer([{"role": "user", "content": content}])
    except Refused:
        return ""


def _blocks(problems: Iterable[Problem]) -> Iterator[list[Problem]]:
    remaining = iter(problems)
    while block := list(itertools.islice(remaining, BLOCK_PROBLEMS)):
        yield block
