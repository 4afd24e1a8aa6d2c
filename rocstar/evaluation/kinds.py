"""What the kinds of benchmarks do with their rows: which columns they read, the problems they make, who scores.

To add a kind, write its module in `scorers/` and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rocstar.config.sections import Recipe
from rocstar.evaluation.benchmark import BenchmarkFile, Rows
from rocstar.evaluation.one_turn import OneTurn
from rocstar.evaluation.scorers import arena, choice, functions, ifbench, ifeval, mathematics
from rocstar.evaluation.scoring import Parts, Scorer
from rocstar.parts.build import AttemptParts
from rocstar.rollout.environment import Conversation, EnvironmentFactory
from rocstar.types import Problem

OF_DIALOGUE = ("rollout.preamble", "rollout.environment", "rollout.max_turns", "rollout.feedback")
"""How keys begin that a benchmark of one turn has no use for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkKind:
    columns: Callable[[BenchmarkFile], Sequence[str]]
    """Those that are read; the checksum is over them."""
    problems: Callable[[BenchmarkFile, Rows], list[Problem]]
    """In the order of the rows. Raises DataError. `metadata` may hold `messages` (a conversation so far) and
    `functions` (what the model may call), which `one_turn.py` shows."""
    scorer: Callable[[Parts], Scorer] | None
    """None: the verifier in force (`evaluate.verifier`)."""
    check: Callable[[], None] = lambda: None
    """Raises where something that scoring needs is not installed; called before anything starts."""
    one_turn: bool = False
    """Asked under the plain chat template, without tools of ours, for one completion."""
    needs_judge: bool = False

    def leaves_unread(self, key: str) -> bool:
        """Whether attempts of this kind have no use for a setting."""
        talks = self.one_turn and key.startswith(OF_DIALOGUE)
        return talks or (self.scorer is not None and key == "evaluate.verifier")


KINDS = {
    "math": BenchmarkKind(columns=mathematics.columns, problems=mathematics.problems, scorer=None),
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
        scorer=ifbench.scorer,
        check=ifbench.check,
        one_turn=True,
    ),
    "functions": BenchmarkKind(
        columns=functions.columns, problems=functions.problems, scorer=functions.FunctionScorer, one_turn=True
    ),
    "judged": BenchmarkKind(
        columns=arena.columns, problems=arena.problems, scorer=arena.ArenaScorer, one_turn=True, needs_judge=True
    ),
}


def plain_chat(conversation: Conversation, kind: BenchmarkKind | None) -> Conversation:
    """For a benchmark of one turn: its template without preamble and without tools of ours."""
    if kind is None or not kind.one_turn:
        return conversation
    return replace(conversation, template=conversation.template.chat(), tools=(), own_tools=lambda: ())


def environment_for(recipe: Recipe, kind: BenchmarkKind | None) -> EnvironmentFactory:
    """Raises ConfigError."""
    return OneTurn if kind is not None and kind.one_turn else AttemptParts(recipe).environment
