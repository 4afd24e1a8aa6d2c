"""Shared by the adapters of foreign environments. A run creates its Task and its attempts in different places, so a
problem's `source` holds everything needed to create its environment: `verifiers {"taskset": {"id": "gsm8k-v1"}}`."""

from __future__ import annotations

import asyncio
import json
import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from rocstar.agents.agent import Client
from rocstar.answers.reward import LARGEST
from rocstar.config.sections import TaskSection
from rocstar.errors import ConfigError, Unavailable
from rocstar.protocols import Task
from rocstar.types import Problem, seed_for


class EnvironmentTask(Task):
    """Holds out some problems, the same ones for every seed."""

    def __init__(self, data: TaskSection, *, tool_name: str, seed: int, heldout: int) -> None:
        """Raises ConfigError, also if none is left to train on."""
        every = self.asked(data)
        random.Random(seed_for("heldout")).shuffle(every)
        self._heldout, self._others = every[:heldout], every[heldout:]
        if not self._others:
            raise ConfigError(f"the environment has {len(every)} problems; set evaluate.problems to fewer than that")

    @abstractmethod
    def asked(self, data: TaskSection) -> list[Problem]:
        """All problems. Raises ConfigError."""

    def problems(self, exclude: Set[str] = frozenset()) -> list[Problem]:
        return [problem for problem in self._others if problem.id not in exclude]

    def heldout(self) -> list[Problem]:
        return self._heldout


def as_reward(value: float | None) -> float:
    """Raises ValueError unless it is a number that an agent may give back."""
    if value is None or not -LARGEST <= value <= LARGEST:
        raise ValueError(f"its rewards come to {value}")
    return float(value)


def source_of(library: str, options: Mapping[str, Any]) -> str:
    return f"{library} {json.dumps(options, sort_keys=True)}"


def options_in(source: str) -> dict[str, Any]:
    """The options in a `source_of` text."""
    return dict(json.loads(source.partition(" ")[2]))


@contextmanager
def faults_of(client: Client) -> Iterator[None]:
    """An environment's exception, or time-out (`GatewayAgent`), is a fault and never a reward, unless a limit of the
    run refused the last request."""
    client.attempt.in_environment = True
    try:
        yield
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        ended = isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling()
        if ended or client.attempt.refused:
            raise
        said = " ".join(str(error.__cause__ or error).split())[:300]  # a library's own may begin with all of a request
        raise Unavailable(f"the environment failed: {type(error).__name__}: {said}") from error
