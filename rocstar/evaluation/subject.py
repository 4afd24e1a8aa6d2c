"""A model to look at, from what a person typed: a Hugging Face folder, a run's name, `last`, or RUN@STEP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rocstar.answers.grade import Grader
from rocstar.config import Recipe, RolloutSection
from rocstar.dialogue.codec import Codec
from rocstar.errors import ConfigError
from rocstar.learning.policy import Policy, load_model
from rocstar.recipe import resolved_from_json
from rocstar.rollout.collect import Roller
from rocstar.runs.folder import RunFolder
from rocstar.sandbox.client import SandboxClient
from rocstar.training.assemble import Workshop, make_engine, make_roller

# A model that belongs to no run has no settings of its own: the paper's conversation, with room to think.
FOREIGN = RolloutSection(
    template="paper", max_turns=10, max_response_tokens=4096, feedback_max_chars=1000, engine_rows=64
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    model: Path
    """Hugging Face folder."""
    recipe: Recipe
    """Settings in force: the run's, or defaults with the paper's template."""
    run: RunFolder | None
    """None for a plain model folder."""
    step: int
    """Step of the checkpoint, 0 for a plain model folder."""


def find_subject(name: str, runs: Path) -> Subject:
    """Raises ConfigError when nothing of that name is there."""
    if (Path(name) / "config.json").is_file():
        return Subject(model=Path(name), recipe=Recipe(rollout=FOREIGN), run=None, step=0)
    run_name, _, wanted = name.partition("@")
    run = RunFolder.find(run_name, runs)
    steps = run.checkpoint_steps()
    if not steps:
        raise ConfigError(f"run {run.name} has no checkpoint yet")
    step = int(wanted) if wanted.isdigit() else steps[-1]
    if step not in steps:
        raise ConfigError(f"run {run.name} has no checkpoint of step {wanted}; it has {', '.join(map(str, steps))}")
    return Subject(model=run.checkpoint(step) / "model", recipe=resolved_from_json(run.resolved), run=run, step=step)


@asynccontextmanager
async def opened(subject: Subject, recipe: Recipe, sandbox: SandboxClient) -> AsyncIterator[Roller]:
    """An engine over the subject's weights, ready to make attempts under `recipe`; closed with the context."""
    policy = Policy(load_model(subject.model), Codec.load(subject.model), recipe.rollout.template)
    most = int(policy.model.config.max_position_embeddings)
    positions = min(most, recipe.model.max_positions if subject.run else 2 * recipe.rollout.max_response_tokens)
    workshop = Workshop(
        policy=policy, engine=make_engine(policy, recipe.rollout, positions), sandbox=sandbox, grader=Grader()
    )
    try:
        yield make_roller(workshop, recipe.rollout, recipe.sandbox, recipe.evaluate)
    finally:
        await workshop.close()
