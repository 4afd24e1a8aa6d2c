"""Graders that tests share: a worker loads sympy once, which takes longer than to answer most questions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rocstar.answers.grade import Grader
from rocstar.answers.symbolic import SymbolicChecker


@pytest.fixture(scope="session")
def grader() -> Iterator[Grader]:
    """With the limits that rewards have."""
    made = Grader(SymbolicChecker(workers=1))
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="session")
def checker() -> Iterator[SymbolicChecker]:
    """With a deadline that no question of these tests meets; every test uses it from an event loop of its own."""
    made = SymbolicChecker(deadline_seconds=30.0, workers=1)
    yield made
    asyncio.run(made.close())
