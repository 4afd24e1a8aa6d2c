"""`rocstar eval`: a model or run against a file of problems. Results are printed by the caller and saved here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rocstar.config import Recipe
from rocstar.data.files import columns_of, load_problems
from rocstar.data.rows import fingerprint, read_rows
from rocstar.errors import ConfigError
from rocstar.evaluation.evaluate import Evaluation, Protocol, evaluate_policy
from rocstar.evaluation.setup import name_of, setup_of
from rocstar.evaluation.subject import Subject, find_subject, loaded, opened, positions_of, settings_in_force
from rocstar.learning.models import compute_dtype, device_of, name_of_dtype
from rocstar.learning.threads import use_threads
from rocstar.machines import Machines, opened_machines
from rocstar.rollout.collect import Roller
from rocstar.runs.folder import claim, numbered
from rocstar.screen import Screen
from rocstar.types import Problem
from rocstar.watch import Patience, Stall, Watch, watching


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file of problems, and how it is read."""

    path: str
    question: Sequence[str]
    """Columns, joined by a space."""
    answer: str
    limit: int | None
    """Read only the first so many rows."""

    def problems(self) -> list[Problem]:
        """Raises DataError."""
        return load_problems(self.path, question=self.question, answer=self.answer, limit=self.limit)

    def described(self) -> dict[str, Any]:
        """For the `setup` of a result; the columns are those that were found."""
        found = fingerprint(self.path)
        _, row = next(iter(read_rows(self.path)))
        columns = columns_of(row, self.path, tuple(self.question), self.answer)
        return {
            "path": str(Path(self.path).resolve()) if found else self.path,
            "sha256": found[0] if found else None,
            "question": list(columns.question),
            "answer": columns.answer,
            "limit": self.limit,
        }

    @property
    def stem(self) -> str:
        return Path(self.path).name.split(".")[0]


def evaluate(
    *,
    model: str,
    source: Source,
    attempts: int,
    temperature: float,
    settings: Sequence[str],
    options: dict[str, str],
    runs: Path,
    screen: Screen,
) -> dict[str, Any]:
    """Figures of `attempts` per problem: avg@k, pass@k, maj@k with 95% intervals clustered by problem, lengths and tool
    use; docs/evaluation.md says where they are kept.

    settings, options: changes of the run's recipe, or of the defaults for a plain model (`recipe.changed`). Everything
    that needs no model is checked first. Raises ConfigError, DataError, and RunHalted past the fault budget."""
    subject = find_subject(model, runs)
    problems = source.problems()
    recipe = settings_in_force(subject, settings, options)
    _refuse_unwritable(next(_places(subject, runs, source.stem)))
    positions = positions_of(subject, recipe, problems)
    rollout = recipe.rollout
    protocol = Protocol(
        attempts=attempts,
        temperature=temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=recipe.run.seed,
    )
    with opened_machines(recipe, subject.model.resolve() / "config.json", learns=False) as machines:
        screen.stage("eval", _said(recipe, problems, attempts))
        made = asyncio.run(_evaluate(subject, recipe, problems, positions, protocol, machines, source, screen))
    folder = _kept(made, subject, runs, source.stem, screen)
    return {"model": str(subject.model), "data": source.path, "saved": str(folder), **_public(made)}


def _said(recipe: Recipe, problems: Sequence[Problem], attempts: int) -> str:
    rollout, twice = recipe.rollout, len(problems) - len({problem.id for problem in problems})
    repeats = f" ({twice} of them repeat a question)" if twice else ""
    return (
        f"{len(problems)} problems{repeats} x {attempts} attempts, template {rollout.template}, at most "
        f"{rollout.max_response_tokens} tokens and {rollout.max_turns} turns, tools {', '.join(recipe.sandbox.tools)}, "
        f"verifier {recipe.evaluate.verifier}"
    )


async def _evaluate(
    subject: Subject,
    recipe: Recipe,
    problems: list[Problem],
    positions: int,
    protocol: Protocol,
    machines: Machines,
    source: Source,
    screen: Screen,
) -> Evaluation:
    use_threads(recipe.run.threads)
    device, rows, tokens = device_of(recipe.model), recipe.rollout.engine_rows, recipe.rollout.kv_tokens
    model = None if recipe.engine else loaded(subject, recipe)
    async with opened(
        model,
        subject,
        recipe,
        machines.sandbox,
        positions=positions,
        rows=rows,
        kv_tokens=tokens,
        start_server=machines.start_server,
    ) as roller:
        engine = {"device": device.type, "dtype": name_of_dtype(compute_dtype(recipe.model, device))}
        setup = _setup(subject, recipe, problems, protocol, roller, source, engine)
        budget, watch = recipe.run.fault_budget, Watch()
        watch.load = roller.engine.load

        def tell(stall: Stall, stacks: str) -> None:
            screen.note(f"{stall.report()}\n\n{stacks}")

        with watching(watch, Patience.of_run(recipe.run), tell):
            watched = replace(roller, note=watch.note)
            return await evaluate_policy(
                watched, problems, protocol, fault_budget=budget, setup=setup, said=screen.attempted
            )


def _setup(
    subject: Subject,
    recipe: Recipe,
    problems: list[Problem],
    protocol: Protocol,
    roller: Roller,
    source: Source,
    engine: dict[str, str],
) -> dict[str, Any]:
    return setup_of(
        recipe,
        recipe.rollout,
        roller.conversation,
        problems,
        protocol,
        model=str(subject.model.resolve()),
        step=subject.step,
        data=source.described(),
        engine=engine,
    )


def _kept(made: Evaluation, subject: Subject, runs: Path, stem: str, screen: Screen) -> Path:
    """Where it was written: a place of its own, also when the same evaluation was made before."""
    name = name_of(made.result["setup"], stem, known=("model", "step") if subject.run else ())
    first = next(_places(subject, runs, name))
    folder = claim(_places(subject, runs, name))
    made.write(folder, subject.step)
    if folder != first:
        screen.note(f"the same evaluation was made before, in {first}; this one is kept beside it")
    if missing := made.result["environment_failed"]:
        attempts = made.result["attempts"]
        screen.note(f"{missing} of {attempts} attempts ended by faults of ours and are in none of the figures")
    screen.note(f"saved in {folder}")
    return folder


def _places(subject: Subject, runs: Path, name: str) -> Iterator[Path]:
    """Folders for an evaluation of that name, the best first."""
    for part in numbered(name):
        if subject.run:
            yield subject.run.evaluation(part, subject.step)
        else:
            yield runs / "evals" / subject.model.resolve().name / part


def _refuse_unwritable(folder: Path) -> None:
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"the result cannot be kept in {folder.parent}: {there} cannot be written to; change --runs")


def _public(made: Evaluation) -> dict[str, Any]:
    """What a person asked for: `accuracy` and `greedy` are run-folder names for figures that stand here as avg@n."""
    return {k: v for k, v in made.result.items() if k not in ("accuracy", "greedy", "transcripts")}
