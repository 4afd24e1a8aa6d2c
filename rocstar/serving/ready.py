"""A model or run that will be talked to: found and checked before anything is loaded, then opened."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rocstar.cluster.here import started_sandbox
from rocstar.config.sections import Recipe
from rocstar.errors import ConfigError
from rocstar.evaluation.subject import Subject, conversation_of, find_subject, loaded, opened, settings_in_force
from rocstar.learning.threads import use_threads
from rocstar.parts.build import AttemptParts
from rocstar.parts.modelfolder import model_facts
from rocstar.protocols import ToolSpec
from rocstar.rollout.collect import Roller


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    subject: Subject
    recipe: Recipe
    """Settings in force."""
    specs: Sequence[ToolSpec]
    """The tools, as the model is told of them; none where there is a single turn."""
    holds: int
    """Tokens of the longest conversation that the model holds."""

    @asynccontextmanager
    async def opened(self, *, positions: int, rows: int) -> AsyncIterator[Roller]:
        """Engine and sandbox for conversations of so many tokens, so many at once. Raises what opening them raises."""
        use_threads(self.recipe.run.threads)
        weights = loaded(self.subject, self.recipe)
        with started_sandbox(self.recipe.sandbox) as sandbox:
            async with opened(weights, self.subject, self.recipe, sandbox, positions=positions, rows=rows) as roller:
                yield roller


def ready(model: str, settings: Sequence[str], runs: Path, context: int | None) -> Ready:
    """context: tokens that a person wants of a conversation, None for no wish. Raises ConfigError for a model, a
    setting or a wish that will not do."""
    subject = find_subject(model, runs)
    recipe = settings_in_force(subject.recipe, settings, {})
    holds = model_facts(subject.model, torch_engine=recipe.runs_torch_engines).positions
    if context is not None and context > holds:
        raise ConfigError(f"--context {context} is more than the {holds} tokens that the model holds; lower it")
    specs = AttemptParts(recipe).specs if recipe.rollout.has_tools else ()
    conversation_of(subject, recipe)
    return Ready(subject=subject, recipe=recipe, specs=specs, holds=holds)
