"""Refuses a setting that a recipe or the command line gives and the run would never read.

Recipes extend others, so a parent's key may lose its use: a cold start in place of random weights leaves the parent's
shape unread, and that is fine. A key is refused when it is given in the same file as the setting that makes it useless
or later (in a child or on the command line), or when that setting has its default. Source: ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rocstar.config.complaint import Layer, Override
from rocstar.config.sections import Recipe, RlStage, Stage, TaskSection
from rocstar.config.tree import Keys, holds
from rocstar.errors import ConfigError
from rocstar.support.plugins import is_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`keys` of `section` are not read where the setting `by` has certain values."""

    section: str
    keys: Sequence[str]
    by: tuple[str, str]
    useless: Callable[[Any], bool]
    own: bool = False
    """Whether the rule is only for keys that a stage gives itself."""
    agrees: Callable[[Any], bool] = lambda holder: False
    """Whether the keys fit this recipe or stage all the same, so that they are not refused."""


RULES = (
    Rule(
        section="data", keys=("families", "pool", "demo_mix"), by=("data", "source"), useless=lambda it: it == "files"
    ),
    Rule(
        section="data",
        keys=("train_files", "test_files", "columns", "max_problems"),
        by=("data", "source"),
        useless=lambda it: it == "arithmetic",
    ),
    Rule(
        section="model",
        keys=(
            *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size"),
            *("rope_theta", "max_positions", "vocab_size", "word_merges"),
        ),
        by=("model", "path"),
        useless=lambda it: it is not None,
    ),
    Rule(section="model", keys=("lora_alpha", "lora_targets"), by=("model", "lora_rank"), useless=lambda it: not it),
    Rule(section="sandbox", keys=("slots", "preload"), by=("sandbox", "urls"), useless=bool),
    Rule(
        section="resample",
        keys=("min_positive", "min_negative"),
        by=("resample", "method"),
        useless=lambda it: it in ("roc", "uniform", "all"),
    ),
    Rule(
        section="resample",
        keys=("repetition_weight", "format_penalty", "format_weight"),
        by=("resample", "method"),
        useless=lambda it: it in ("uniform", "all"),
    ),
    Rule(
        section="resample",
        keys=("failure_floor",),
        by=("resample", "method"),
        useless=lambda it: it in ("roc_release", "uniform", "all"),
    ),
    Rule(
        section="resample",
        keys=("keep",),
        by=("resample", "method"),
        useless=lambda it: it == "all",
        agrees=lambda it: isinstance(it, RlStage) and it.resample.keep == it.rollout.attempts_per_problem,
    ),
    Rule(section="sft", keys=("muon_learning_rate",), by=("sft", "optimizer"), useless=lambda it: it != "muon"),
    Rule(
        section="evaluate", keys=("right_above",), by=("evaluate", "verifier"), useless=lambda it: not is_reference(it)
    ),
    Rule(
        section="rollout",
        keys=("max_parallel_calls", "feedback_max_chars", "feedback_truncate", "feedback_errors"),
        by=("rollout", "max_turns"),
        useless=lambda it: it == 1,
        agrees=lambda it: isinstance(it, Recipe) and bool(it.evaluate.benchmark or it.rollout.environment),
    ),
    Rule(
        section="evaluate",
        keys=("every_steps",),
        by=("evaluate", "problems"),
        useless=lambda it: it == 0,
        agrees=lambda it: isinstance(it, Recipe) and bool(it.evaluate.benchmark),
    ),
    Rule(section="end", keys=("truncated_band",), by=("end", "truncated_share"), useless=lambda it: it is None),
    Rule(
        section="data",
        keys=("drop_solved_age", "drop_solved_problems"),
        by=("data", "drop_solved_attempts"),
        useless=lambda it: it is None,
    ),
    Rule(
        section="data",
        keys=tuple(TaskSection.model_fields),
        by=("sft", "rows_file"),
        useless=lambda it: it is not None,
        own=True,
    ),
)


def refuse_unread(recipe: Recipe, layers: Sequence[Layer], changes: Sequence[Override]) -> None:
    """`recipe` is what `layers`, parents first, and then `changes` made. Raises ConfigError."""
    stages: list[tuple[Keys, list[Any]]] = [(("stage", stage.name), [stage]) for stage in recipe.stage]
    for rule in RULES:
        for entry, holders in stages if rule.own else [((), [recipe, *recipe.stage]), *stages]:
            sections = [getattr(holder, rule.by[0], None) for holder in holders]
            values = [getattr(section, rule.by[1]) for section in sections if hasattr(section, rule.by[1])]
            if values and all(map(rule.useless, values)) and not any(map(rule.agrees, holders)):
                _refuse_given(rule, entry, values[0], layers, changes)
    _refuse_long_warm_ups(recipe.stage, layers, changes)
    _refuse_rare_evaluations(recipe.stage, recipe.evaluate.every_steps, layers, changes)


def _refuse_rare_evaluations(
    stages: Sequence[Stage], every: int, layers: Sequence[Layer], changes: Sequence[Override]
) -> None:
    """A child that only shortens stages may leave its parent's rhythm as it is."""
    steps = {stage.name: stage.steps for stage in stages if isinstance(stage, RlStage)}
    keys = ("evaluate", "every_steps")
    level = _level(keys, layers, changes)
    by = max((_level(("stage", name, "steps"), layers, changes) for name in steps), default=0)
    if steps and every > max(steps.values()) and level >= max(by, 0):
        raise ConfigError(
            f"{_place(keys, level, layers, changes)}: evaluate.every_steps is {every} and no RL stage has more than "
            f"{max(steps.values())} steps, so nothing would be evaluated between; lower it, or leave it out"
        )


def _refuse_long_warm_ups(stages: Sequence[Stage], layers: Sequence[Layer], changes: Sequence[Override]) -> None:
    """A child that only shortens a stage may leave its parent's warm-up as it is."""
    for stage, section, warmup_steps, updates in _warm_ups(stages):
        given = [(section, "warmup_steps"), ("stage", stage, section, "warmup_steps")]
        keys = max(given, key=lambda keys: _level(keys, layers, changes))
        level, by = (_level(keys, layers, changes) for keys in (keys, ("stage", stage, "steps")))
        if warmup_steps > updates and level >= max(by, 0):
            raise ConfigError(
                f"{_place(keys, level, layers, changes)}: {'.'.join(keys)} is {warmup_steps} and stage {stage} ends "
                f"after {updates} updates, so its learning rate never rises to its value; lower the one or raise "
                f"stage.{stage}.steps"
            )


def _warm_ups(stages: Sequence[Stage]) -> Iterator[tuple[str, str, int, int]]:
    """(stage, section, its warmup_steps, updates by the end of the stage). Stages that hand their optimizer on share a
    warm-up, so only the last of them must see its end."""
    updates = 0
    made = [stage for stage in stages if stage.steps > 0]  # stages of epochs are checked later
    for stage, following in zip_longest(made, made[1:]):
        updates += stage.updates
        if following is None or not following.takes_optimizer_of(stage):
            yield stage.name, stage.learner_section, stage.learner.warmup_steps, updates
            updates = 0


def _refuse_given(rule: Rule, entry: Keys, value: Any, layers: Sequence[Layer], changes: Sequence[Override]) -> None:
    by = max(_level(keys, layers, changes) for keys in (rule.by, (*entry, *rule.by)))
    for key in rule.keys:
        keys = (*entry, rule.section, key)
        level = _level(keys, layers, changes)
        if level >= max(by, 0):
            decider = ".".join(rule.by)
            raise ConfigError(
                f"{_place(keys, level, layers, changes)}: {'.'.join(keys)} is not read where {decider} is {value!r}; "
                f"leave it out or change {decider}"
            )


def _level(keys: Keys, layers: Sequence[Layer], changes: Sequence[Override]) -> int:
    """The last file that gives a setting, by number; the command line comes after them all. -1: none."""
    if any(_gives(change, keys) for change in changes):
        return len(layers)
    return max((number for number, layer in enumerate(layers) if holds(layer.table, keys)), default=-1)


def _gives(change: Override, keys: Keys) -> bool:
    """`data.columns.question=x` gives data.columns; `model={path="x"}` gives model.path."""
    shorter = min(len(keys), len(change.keys))
    if change.keys[:shorter] != keys[:shorter] or change.value is None:
        return False
    return holds(change.value, keys[shorter:])


def _place(keys: Keys, level: int, layers: Sequence[Layer], changes: Sequence[Override]) -> str:
    if level == len(layers):
        return f"override {next(change.text for change in reversed(changes) if _gives(change, keys))!r}"
    return f"{layers[level].path} line {layers[level].line_of(keys)}"
