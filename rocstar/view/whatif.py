"""What another resampler or another penalty would have chosen of a recorded group, by training's own functions:
a method with the run's seed gives the choice that was made; other settings give the one that would have been. Methods
and advantages of the user's own are refused: neither a run folder nor a URL may name code that this page loads.

The chance of being kept is counted over DRAWS choices with other seeds, for every method alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from rocstar.config.sections import LearningSection, ResampleSection
from rocstar.learning.advantages import ADVANTAGES, GroupAdvantages, advantage_of, kept_advantages
from rocstar.learning.quality import penalty
from rocstar.learning.resample import METHODS, resample, seed_of_choice
from rocstar.protocols import Resampler
from rocstar.record.folder import RunFolder, read_json
from rocstar.record.rollouts import trajectory_of
from rocstar.record.table import BadFilter
from rocstar.types import Group, Problem, Resampled, seed_for

Settings = TypeVar("Settings", bound=ResampleSection)
DRAWS = 1000  # an error of at most 1.6 points


class TriedSettings(ResampleSection):
    """What a URL may change."""

    weight_errors: float = Field(default=1.0, ge=0, le=100)
    """Of failed calls; always 1 in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """A group as a run recorded it, with what its choice followed from."""

    group: Group
    settings: ResampleSection
    advantage: GroupAdvantages
    seed: int
    """The seed of the choice."""

    def choice(self) -> Resampled:
        """The choice that training made."""
        return resample(self.group, random.Random(self.seed), self.settings)

    def another(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """The choice under other settings: fields of `[resample]`, and the weight of failed calls. Raises BadFilter."""
        settings = _changed(self.settings, asked)
        plain = [penalty(trajectory, settings) for trajectory in self.group.trajectories]
        penalties = [replace(one, errors=one.errors * settings.weight_errors) for one in plain]
        siblings = self._siblings(partial(resample, settings=settings, penalties=penalties))
        used = settings.model_dump(exclude={"weight_errors"})
        return {"settings": used, "weight_errors": settings.weight_errors, "siblings": siblings}

    def _siblings(self, choose: Resampler) -> list[dict[str, Any]]:
        made = choose(self.group, random.Random(self.seed))
        learnt = kept_advantages(made, self.advantage)
        drawn = random.Random(seed_for(self.seed, "chances"))
        kept = [[choice.kept for choice in choose(self.group, drawn).choices] for _ in range(DRAWS)]
        return [
            {
                "kept": choice.kept,
                "reason": str(choice.reason),
                "weight": choice.weight,
                "penalty": {**asdict(choice.penalty), "total": choice.penalty.total},
                "advantage": learnt.get(choice.index),
                "chance": sum(draw[place] for draw in kept) / len(kept),
            }
            for place, choice in enumerate(made.choices)
        ]


Read = Callable[[bool], Sequence[Mapping[str, Any]]]
"""(with token ids) -> rows of the siblings in their order, decoded."""


def recorded_group(
    run: RunFolder, stage: str, step: int, problem: Problem, read: Read, *, repeats: bool
) -> RecordedGroup:
    """repeats: repetition will be asked about, which follows from tokens. Raises BadFilter where the run lacks the
    stage."""
    settings = read_json(run.resolved)
    found = next((one for one in settings.get("stage", []) if one.get("name") == stage and "resample" in one), None)
    if found is None:
        raise BadFilter(f"the run has no stage {stage} that resamples")
    used = _built_in(ResampleSection.model_validate(found["resample"]))
    learning = LearningSection(
        advantage=found["learning"].get("advantage", "grpo"), normalize_by_std=found["learning"]["normalize_by_std"]
    )
    if learning.over_batch or learning.advantage not in ADVANTAGES:
        form = f"{learning.advantage}, over the whole step" if learning.over_batch else learning.advantage
        raise BadFilter(f"the run's advantages are {form}, which this page does not compute from a group's rewards")
    rows = read(repeats or used.repetition_weight > 0)
    return RecordedGroup(
        group=Group(problem=problem, trajectories=tuple(trajectory_of(row) for row in rows)),
        settings=used,
        advantage=advantage_of(learning),
        seed=seed_of_choice(settings["run"]["seed"], step, problem.id),
    )


def _changed(settings: ResampleSection, asked: Mapping[str, str]) -> TriedSettings:
    given = {name: asked[name] for name in TriedSettings.model_fields if asked.get(name)}
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings}
    try:
        return _built_in(TriedSettings.model_validate_strings({**texts, **given}))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BadFilter(f"{place}: {first['msg']}" if place else str(first["msg"])) from None


def _built_in(settings: Settings) -> Settings:
    """Raises BadFilter for a method of the user's own."""
    if settings.method not in METHODS:
        raise BadFilter(f"resample.method is {settings.method}, code of its own, which this page does not load")
    return settings
