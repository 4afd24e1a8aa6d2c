"""Finds the source named on the command line: a run, an evaluation, or a rollout file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocstar.analysis.attempts import Attempt, read_attempts
from rocstar.errors import ConfigError, DataError
from rocstar.record.evaluations import RESULT, SAMPLES, find_evaluation, is_evaluation, label_of, owner_of
from rocstar.record.folder import RunFolder, read_json, step_of
from rocstar.record.journal import read_journal

if TYPE_CHECKING:
    from rocstar.analysis.tokens import Piece

SCORED = 64  # attempts of one learner pass

Entropies = Callable[[list[list[int]], list[list[bool]]], list[list[float]]]
"""(token ids, which are counted) of some rows -> nats of each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    name: str
    """The name that is shown."""
    files: tuple[Path, ...]
    """Files of attempts, in order of their steps; none if a run saved none, which leaves its metrics and
    evaluations."""
    model: Path | None = None
    """Folder of the tokenizer, and of the weights for a learner pass; None if there is none."""
    result: Mapping[str, Any] | None = None
    """The result.json of an evaluation; None for a run."""
    run: RunFolder | None = None
    """The run that is analysed, None for an evaluation."""
    trainer: RunFolder | None = None
    """The run whose checkpoint an evaluation is of; None where it is not known."""

    def temperatures(self) -> Callable[[int], float | None]:
        """Step -> temperature of the distributions whose entropies it recorded. For an evaluation it is the temperature
        of a learner pass: that of its run's last rollouts, not of the evaluation, so that both can be compared. None
        without a run. Raises DataError."""
        owner = self.run or self.trainer
        if owner is None:
            return lambda step: 1.0 if self.result else None
        stages = {
            stage["name"]: float(stage["rollout"]["temperature"])
            for stage in read_json(owner.resolved).get("stage", ())
            if "rollout" in stage
        }
        of_step = {row["step"]: stages.get(row.get("stage")) for row in read_journal(owner.metrics)}
        last = next(reversed(stages.values()), None)
        return lambda step: of_step.get(step) if self.run else last

    def attempts(
        self,
        *,
        tokens: bool,
        entropies: Entropies | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Iterator[Attempt]:
        """All of them, a batch at a time. tokens: with token ids and the entropies that were recorded. entropies:
        computes those of all attempts anew. progress: called with (files read, all files). Raises DataError."""
        for done, file in enumerate(self.files, 1):
            read = read_attempts(file, tokens=tokens)
            yield from read if entropies is None else _scored(read, entropies)
            progress(done, len(self.files))


def find_source(name: str, runs: Path) -> Source:
    """Raises ConfigError if nothing has that name, DataError if it holds no attempts."""
    path = Path(name)
    if path.is_file():
        return Source(name=path.name, files=(path,))
    if is_evaluation(name, runs):
        return evaluation_source(find_evaluation(name, runs), runs)
    run = RunFolder.find(name, runs)
    files = tuple(sorted(run.rollouts.glob("step=*.parquet"), key=step_of))
    steps = run.checkpoint_steps()
    return Source(name=run.name, files=files, model=run.checkpoint(steps[-1]) / "model" if steps else None, run=run)


def evaluation_source(folder: Path, runs: Path) -> Source:
    result = read_json(folder / RESULT)
    if not (folder / SAMPLES).is_file():
        raise DataError(f"{folder} kept no attempts: it has no {SAMPLES}")
    run = owner_of(folder)
    named = Path(result.get("setup", {}).get("model", ""))
    model = run.checkpoint(step_of(folder)) / "model" if run else named  # the run may have been moved
    if run and not step_of(folder):  # a run keeps no checkpoint of what it began with
        named = Path(read_json(run.resolved)["model"]["path"] or "")
    return Source(
        name=label_of(folder, runs),
        files=(folder / SAMPLES,),
        model=next((one for one in (model, named) if (one / "config.json").is_file()), None),
        result=result,
        trainer=run,
    )


def _scored(attempts: Iterable[Attempt], entropies: Entropies) -> Iterator[Attempt]:
    rest = iter(attempts)
    while some := list(islice(rest, SCORED)):
        rows = entropies([list(attempt.token_ids) for attempt in some], [_written(attempt) for attempt in some])
        yield from (replace(attempt, entropies=row) for attempt, row in zip(some, rows, strict=True))


def _written(attempt: Attempt) -> list[bool]:
    mask = [False] * len(attempt.token_ids)
    for turn in attempt.turns:
        mask[turn.start : turn.end] = [True] * (turn.end - turn.start)
    return mask


def piece_of(model: Path | None) -> Piece:
    """The text of one token, remembered. Raises ConfigError without a readable tokenizer in a model folder: the text of
    tokens is needed to find those in a call."""
    from rocstar.dialogue.codec import Codec

    if model is None:
        raise ConfigError("tokens can't be classified without their model's tokenizer, and there is no model folder")
    codec, known = Codec.load(model), {}
    before = codec.encode("a")[-1:]  # a tokenizer of words drops the space that a text begins with

    def piece(token: int) -> str:
        if token not in known:
            known[token] = codec.decode([*before, token])[len(codec.decode(before)) :]
        return str(known[token])

    return piece
