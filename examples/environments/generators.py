"""Several generators of reasoning-gym as one task, for a model of random weights. Questions and scorers are the
library's; a demonstration is a program of ours, made from what an entry tells of its question.

    data.source = "generators:Generators"
    data.options = { gcd = {}, chain_sum = { max_terms = 4 } }    # generators, with settings of theirs
    evaluate.verifier = "rocstar.adapters.reasoning_gym:score"
"""

from __future__ import annotations

import random
from collections.abc import Set
from dataclasses import replace
from itertools import chain, cycle, islice

from rocstar.adapters.reasoning_gym import Generator
from rocstar.config.sections import StageDataSection, TaskSection
from rocstar.data.demonstrations import Behaviour, DemonstrationPlan, Move, perform
from rocstar.errors import ConfigError
from rocstar.protocols import Task
from rocstar.types import Demonstration, Problem, seed_for

PROGRAMS = {
    "base_conversion": (
        "n,s=int('{source_repr}',{source_base}),''\n"
        "while n:n,d=divmod(n,{target_base});s='0123456789abcdef'[d]+s\n"
        "print(s or 0)"
    ),
    "chain_sum": "print({expression})",
    "count_bits": "print(bin({number}).count('1'))",
    "decimal_chain_sum": "print(round({expression},4))",
    "fraction_simplification": "import math\na,b={numerator},{denominator}\ng=math.gcd(a,b)\nprint(a//g,b//g,sep='/')",
    "gcd": "import math\nprint(math.gcd(*{numbers}))",
    "lcm": "import math\nprint(math.lcm(*{numbers}))",
    "power_function": "print('%.2e'%pow({base},{exponent}))",
    "prime_factorization": (
        "n,r={number},[]\nfor d in range(2,n+1):\n while n%d<1:r+=[d];n//=d\nprint(*r,sep=' \u00d7 ')"
    ),
    "products": "print({expression})",
    "simple_equations": (
        "L,R='{equation}'.split('=')\nfor {variable} in range(1,101):\n if eval(L)==int(R):print({variable})"
    ),
    "simple_geometry": "print(int(180*({n_sides}-2)-sum({known_angles})))",
    "spell_backward": "print('{word}'[::-1])",
}
"""Programs that print the answer, as format strings over the metadata of an entry; each ends in a bracket."""

MIX: dict[Behaviour, int] = {(Move.GUESS,): 40, (Move.RIGHT,): 35, (Move.BROKEN, Move.RIGHT): 25}
"""Shares of behaviours, percent. Four in ten guess, and four in ten programs lack their last bracket at first: RL has
to find out what is worth it."""


class Generators(Task):
    """As many problems of each generator as of any other; the library's own count as the family."""

    def __init__(self, data: TaskSection, *, tool_name: str, seed: int, heldout: int) -> None:
        names = data.options.keys()
        if not names or names - PROGRAMS.keys():
            unknown = min(names - PROGRAMS.keys(), default="no generator")
            raise ConfigError(f"data.options names {unknown}; there are programs for {', '.join(PROGRAMS)}")
        self._data, self._tool_name, self._seed = data, tool_name, seed
        self._heldout = heldout // len(names)
        self._generators = self._drawing(data.pool if isinstance(data, StageDataSection) else 0, seed)

    def problems(self, exclude: Set[str] = frozenset()) -> list[Problem]:
        return [_named(problem) for one in self._generators for problem in one.problems(exclude)]

    def heldout(self) -> list[Problem]:
        return [_named(problem) for one in self._generators for problem in one.heldout()]

    def demonstrations(self, count: int) -> list[Demonstration]:
        """The generators take turns; one that has no more problems begins again."""
        drawn = self._drawing(count, seed_for(self._seed, "demonstrations"))
        shown = [[_named(problem) for problem in one.problems() if _has_an_answer(problem)] for one in drawn]
        turns = zip(*(cycle(zip(own, own[-1:] + own, strict=False)) for own in shown), strict=True)
        pairs = islice(chain.from_iterable(turns), count)
        behaviours = random.Random(self._seed).choices(list(MIX), weights=list(MIX.values()), k=count)
        plans = [_plan(problem, other, how) for (problem, other), how in zip(pairs, behaviours, strict=True)]
        return [perform(plan, self._tool_name) for plan in plans]

    def _drawing(self, pool: int, seed: int) -> list[Generator]:
        """Generators that give a share of `pool` problems each."""
        share = max(1, pool // len(self._data.options))
        return [
            Generator(
                StageDataSection(source=self._data.source, options={"name": name, "config": config}, pool=share),
                tool_name=self._tool_name,
                seed=seed,
                heldout=self._heldout,
            )
            for name, config in self._data.options.items()
        ]


def _plan(problem: Problem, other: Problem, behaviour: Behaviour) -> DemonstrationPlan:
    """other: one of the same generator, whose answer is the guess."""
    entry = problem.metadata["entry"]
    program = PROGRAMS[problem.metadata["family"]].format(**entry["metadata"])
    codes = {Move.BROKEN: program[:-1], Move.RIGHT: program}
    return DemonstrationPlan(
        problem=problem,
        behaviour=behaviour,
        codes=tuple(codes[move] for move in behaviour if move in codes),
        final=other.answer if behaviour == (Move.GUESS,) else None,
        guess=other.answer,
    )


def _has_an_answer(problem: Problem) -> bool:
    """A few entries of the library write 0 as no number, or ask for the variable of `0 = 0`."""
    entry = problem.metadata["entry"]["metadata"]
    return entry.get("decimal_value") != 0 and entry.get("variable", "") in entry.get("equation", "")


def _named(problem: Problem) -> Problem:
    """With its generator as its family, by which an evaluation tells accuracy apart."""
    entry = problem.metadata["entry"]
    return replace(problem, metadata={"entry": entry, "family": entry["metadata"]["source_dataset"]})
