"""A model to look at, from what a person typed: a Hugging Face folder, a run's name, `last`, or RUN@STEP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.answers.grade import Grader
from rocstar.config import Recipe
from rocstar.dialogue.codec import Codec
from rocstar.engines.torch_engine import TorchEngine
from rocstar.errors import ConfigError
from rocstar.lengths import positions_needed
from rocstar.modelfolder import model_facts
from rocstar.parts import environment_of, make_conversation, make_roller, template_of
from rocstar.recipe import resolved_from_json
from rocstar.rollout.collect import Roller
from rocstar.runs.folder import RunFolder
from rocstar.sandbox.client import SandboxClient
from rocstar.types import Problem


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
        return Subject(model=Path(name), recipe=Recipe(), run=None, step=0)
    run_name, _, wanted = name.partition("@")
    run = RunFolder.find(run_name, runs)
    steps = run.checkpoint_steps()
    if not steps:
        raise ConfigError(f"run {run.name} has no checkpoint yet")
    step = int(wanted) if wanted.isdigit() else steps[-1]
    if step not in steps:
        raise ConfigError(f"run {run.name} has no checkpoint of step {wanted}; it has {', '.join(map(str, steps))}")
    return Subject(model=run.checkpoint(step) / "model", recipe=resolved_from_json(run.resolved), run=run, step=step)


def positions_of(subject: Subject, recipe: Recipe, problems: Sequence[Problem]) -> int:
    """Tokens of the longest attempt, found without the model's weights. Raises ConfigError where the model holds less,
    and for a model folder, a template or a tool that will not do."""
    codec, facts = Codec.load(subject.model), model_facts(subject.model)
    return positions_needed(
        problems,
        make_conversation(recipe, codec, template_of(recipe, subject.model), SandboxClient(slots=1, preload=())),
        response_tokens=recipe.rollout.max_response_tokens,
        model_positions=facts.positions,
        environment=environment_of(recipe),
    )


@asynccontextmanager
async def opened(
    model: Any, subject: Subject, recipe: Recipe, sandbox: SandboxClient, problems: Sequence[Problem], *, rows: int
) -> AsyncIterator[Roller]:
    """An engine over `model`, the subject's weights, ready to attempt these problems under `recipe`, `rows` at once;
    closed with the context. Raises ConfigError where the longest of them and the cap do not fit into the model."""
    codec, template, grader = Codec.load(subject.model), template_of(recipe, subject.model), Grader()
    engine = TorchEngine(model, rows=rows, positions=positions_of(subject, recipe, problems))
    try:
        yield make_roller(
            recipe, recipe.rollout, codec=codec, template=template, engine=engine, sandbox=sandbox, grader=grader
        )
    finally:
        await engine.close()
        await grader.close()
