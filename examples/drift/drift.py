"""The task: say what a gauge shows. Its unit has to be read from the tool; demonstrations read it at a set rate.

Each decision of a demonstration is drawn on its own, so a model that imitates them learns shares, not scripts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Set

from gauges import ASK, UNITS, unit_of, value_of
from pydantic import BaseModel, Field

from rocstar.config.sections import StageDataSection, TaskSection
from rocstar.dialogue.calls import render_call
from rocstar.protocols import Task
from rocstar.run.tasks import checked_options
from rocstar.types import Demonstration, DemoTurn, Problem, Status, ToolResult, problem_id, seed_for

ORDER = {1: "Read gauge {}.", 2: "Follow gauge {} to the 2nd.", 3: "Follow gauge {} to the 3rd."}


class Options(BaseModel, extra="forbid"):
    chain: int = Field(default=1, ge=1, le=3)
    """Gauges of a problem: each one's value is the number of the next."""
    asking: float = Field(default=0.3, ge=0, le=1)
    """Share of gauges whose unit a demonstration asks for first."""
    reading: float = Field(default=1.0, ge=0, le=1)
    """How often a demonstration takes the unit it was told; else one it has not tried, drawn at random."""
    giving_up: float = Field(default=0.0, ge=0, le=1)
    """How often it answers with a made-up value after a failed call."""
    calls: int = Field(default=3, ge=1)
    """Calls for one gauge before it answers with a made-up value."""


class DriftTask(Task):
    def __init__(self, data: TaskSection, *, tool_name: str, seed: int, heldout: int) -> None:
        self._options = checked_options(Options, data)
        self._pool = data.pool if isinstance(data, StageDataSection) else 0
        self._tool_name = tool_name
        self._seed = seed
        gauges = [str(number) for number in range(1000, 10000)]
        random.Random(seed_for("drift", "heldout")).shuffle(gauges)  # the same for every seed, so that runs compare
        self._heldout, self._rest = gauges[:heldout], gauges[heldout:]

    @property
    def atoms(self) -> tuple[str, ...]:
        before, between, _ = render_call(self._tool_name, {"gauge": "#", "unit": "#"}).split("#")
        return (*UNITS, before.removeprefix("<tool_call>"), between)

    def problems(self, exclude: Set[str] = frozenset()) -> list[Problem]:
        rest = [*self._rest]
        random.Random(seed_for(self._seed, "problems")).shuffle(rest)
        return [problem for gauge in rest[: self._pool] if (problem := self._problem(gauge)).id not in exclude]

    def heldout(self) -> list[Problem]:
        return [self._problem(gauge) for gauge in self._heldout]

    def demonstrations(self, count: int) -> list[Demonstration]:
        rng = random.Random(seed_for(self._seed, "demonstrations"))
        return [self._demonstration(self._problem(rng.choice(self._rest)), rng) for _ in range(count)]

    def _problem(self, gauge: str) -> Problem:
        answer = gauge
        for _ in range(self._options.chain):
            answer = value_of(answer)
        question = ORDER[self._options.chain].format(gauge)
        return Problem(
            id=problem_id(question), question=question, answer=answer, source="drift", metadata={"gauge": gauge}
        )

    def _demonstration(self, problem: Problem, rng: random.Random) -> Demonstration:
        gauge, turns = problem.metadata["gauge"], []
        for _ in range(self._options.chain):
            found = None
            for unit in self._units(gauge, rng):
                found = value_of(gauge) if unit == unit_of(gauge) else None
                turns.append(self._turn(gauge, unit, len(turns)))
            if found is None:
                gauge = str(rng.randrange(1000, 10000))
                break
            gauge = found
        turns.append(DemoTurn(text=f"<answer>\\boxed{{{gauge}}}</answer>"))
        return Demonstration(problem=problem, turns=tuple(turns))

    def _units(self, gauge: str, rng: random.Random) -> Iterator[str]:
        """What is passed as the unit, call by call."""
        options, tried = self._options, set()
        reported = asks = rng.random() < options.asking
        for _ in range(options.calls):
            if asks:
                asks, unit = False, ASK
            elif reported and rng.random() < options.reading:
                unit = unit_of(gauge)
            else:
                unit = rng.choice([unit for unit in UNITS if unit not in tried])
            yield unit
            if unit == unit_of(gauge):
                return
            reported = True
            tried.add(unit)
            if unit != ASK and rng.random() < options.giving_up:
                return

    def _turn(self, gauge: str, unit: str, number: int) -> DemoTurn:
        """With what the tool answers (gauges.py)."""
        status = Status.OK if unit in (ASK, unit_of(gauge)) else Status.CODE_ERROR
        answer = value_of(gauge) if unit == unit_of(gauge) else f"use {unit_of(gauge)}"
        result = ToolResult(
            call_id=f"call_{number}",
            status=status,
            stdout=answer if status is Status.OK else "",
            stderr="" if status is Status.OK else f"ValueError: {answer}\n",
        )
        return DemoTurn(text=render_call(self._tool_name, {"gauge": gauge, "unit": unit}), results=(result,))
