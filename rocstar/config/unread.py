"""Refuses settings that a recipe or the command line gives but the run would never read.

Recipes extend others, so a parent's key may lose its use: a cold start in place of random weights leaves the parent's
shape unread, and that is fine. A key is refused when it is given in the same file as the setting that makes it useless
or later (in a child or on the command line), or when that setting has its default. Source: ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rocstar.config.complaint import Layer, Override
from rocstar.config.sections import Recipe, RlStage, Stage, TaskSection
from rocstar.config.tree import Keys, holds
from rocstar.errors import ConfigError
from rocstar.support.plugins import is_function, is_reference


@dataclass(frozen=True, slots=True)
class Rule:
    """Some keys are not read where the setting `by` has certain values."""

    keys: str
    """With blanks between them."""
    by: str
    useless: Callable[[Any], bool]
    own: bool = False
    """Whether the rule is only for keys that a stage gives itself."""
    agrees: Callable[[Any], bool] = lambda holder: False
    """Whether the keys are valid anyway for this recipe or stage, so that they are not refused."""


def none_of(*methods: str) -> Callable[[Any], bool]:
    """Whether it is another than these and none of the user's own, which may read any key of its section."""
    return lambda it: it not in methods and not is_reference(it)


Unread = tuple[list[Keys], list[Keys], str]
"""Names of an unread setting, the settings that cause it, and the message."""
OF_MADE_UP = "data.families data.pool data.demo_mix"
"""Keys read only for generated problems."""
OF_RANDOM_WEIGHTS = (
    "model.hidden_size model.num_layers model.num_heads model.num_kv_heads model.intermediate_size model.rope_theta "
    "model.max_positions model.vocab_size model.word_merges"
)
"""Keys read only for a model that starts from random weights."""
OF_KINDS = {"sft": "sft", "resample": "rl", "learning": "rl", "end": "rl"}
"""Sections read only for stages of a kind."""
RULES = (
    Rule(OF_MADE_UP, "data.source", lambda it: it == "files"),
    Rule(
        "data.train_files data.test_files data.columns data.max_problems", "data.source", lambda it: it == "arithmetic"
    ),
    Rule(OF_RANDOM_WEIGHTS, "model.path", lambda it: it is not None),
    Rule("model.lora_alpha model.lora_targets", "model.lora_rank", lambda it: not it),
    Rule("sandbox.slots sandbox.preload", "sandbox.urls", bool),
    Rule("resample.min_positive resample.min_negative", "resample.method", none_of("roc_release")),
    Rule(
        "resample.repetition_weight resample.format_penalty resample.format_weight",
        "resample.method",
        none_of("roc", "roc_release"),
    ),
    Rule("resample.failure_floor", "resample.method", none_of("roc")),
    Rule(
        "resample.keep",
        "resample.method",
        lambda it: it == "all",
        agrees=lambda it: isinstance(it, RlStage) and it.resample.keep == it.rollout.attempts_per_problem,
    ),
    Rule("learning.clip_low learning.clip_high", "learning.loss", none_of("grpo", "cispo", "dppo_tv", "gspo")),
    Rule("learning.dual_clip", "learning.loss", none_of("grpo")),
    Rule("learning.gate_right learning.gate_wrong", "learning.loss", none_of("sapo")),
    Rule("learning.normalize_by_std", "learning.advantage", none_of("grpo")),
    Rule("rollout.agent_seconds rollout.agents_at_once", "rollout.agent", lambda it: it is None),
    Rule("rollout.agent_walls rollout.agent_reads", "rollout.agent", lambda it: it is None or is_function(it)),
    Rule("rollout.agent_reads", "rollout.agent_walls", lambda it: not it),
    Rule("rollout.template_options", "rollout.template", lambda it: it in ("paper", "compact")),
    Rule("rollout.max_parallel_calls", "rollout.agent", lambda it: it is not None),
    Rule("sft.muon_learning_rate", "sft.optimizer", lambda it: it != "muon"),
    Rule("evaluate.right_above", "evaluate.verifier", lambda it: not is_reference(it)),
    Rule(
        "rollout.max_parallel_calls rollout.feedback_max_chars rollout.feedback_truncate rollout.feedback_errors",
        "rollout.max_turns",
        lambda it: it == 1,
        agrees=lambda it: isinstance(it, Recipe) and bool(it.evaluate.benchmark or it.rollout.environment),
    ),
    Rule(
        "evaluate.every_steps evaluate.attempts evaluate.temperature evaluate.greedy",
        "evaluate.problems",
        lambda it: it == 0,
        agrees=lambda it: isinstance(it, Recipe) and bool(it.evaluate.benchmark),
    ),
    Rule(
        "end.window",
        "end.reward_gain",
        lambda it: it is None,
        agrees=lambda it: hasattr(it, "end") and (it.end.solved_share or it.end.reward_loss) is not None,
    ),
    Rule("end.truncated_band", "end.truncated_share", lambda it: it is None),
    Rule("data.drop_solved_age data.drop_solved_problems", "data.drop_solved_attempts", lambda it: it is None),
    Rule(
        " ".join(f"data.{name}" for name in TaskSection.model_fields),
        "sft.rows_file",
        lambda it: it is not None,
        own=True,
    ),
)


def refuse_unread(found: Iterable[Unread], layers: Sequence[Layer], changes: Sequence[Override]) -> None:
    """found: in the recipe made from `layers`, parents first, and then `changes`. Raises ConfigError."""
    for names, by, reason in found:
        levels = {keys: _level(keys, layers, changes) for keys in (*names, *by)}
        keys = max(names, key=levels.__getitem__)
        if levels[keys] >= max(0, *(levels[each] for each in by)):
            raise ConfigError(f"{_place(keys, levels[keys], layers, changes)}: {'.'.join(keys)} {reason}")


def unread(recipe: Recipe) -> Iterator[Unread]:
    stages: list[tuple[Keys, list[Any]]] = [(("stage", stage.name), [stage]) for stage in recipe.stage]
    for rule in RULES:
        for entry, holders in stages if rule.own else [((), [recipe, *recipe.stage]), *stages]:
            section, _, name = rule.by.partition(".")
            sections = [getattr(holder, section, None) for holder in holders]
            values = [getattr(section, name) for section in sections if hasattr(section, name)]
            if values and all(map(rule.useless, values)) and not any(map(rule.agrees, holders)):
                reason = f"is not read where {rule.by} is {values[0]!r}; leave it out or change {rule.by}"
                for key in rule.keys.split():
                    yield [(*entry, *key.split("."))], [(section, name), (*entry, section, name)], reason
    kinds: list[Keys] = [("stage", stage.name, "kind") for stage in recipe.stage]
    for section, kind in OF_KINDS.items():
        if kinds and not any(section in type(stage).model_fields for stage in recipe.stage):
            reason = f"is not read where no stage has the kind {kind!r}; leave it out or add such a stage"
            for name in type(getattr(recipe, section)).model_fields:
                yield [(section, name)], kinds, reason
    if recipe.evaluate.problems and recipe.data.source == "files" and not recipe.data.test_files:
        reason = "is not read where data.test_files is empty; leave it out or give data.test_files"
        yield [("evaluate", "problems")], [("data", "source"), ("data", "test_files")], reason
    # A child that only shortens stages may leave its parent's warm-up and rhythm as they are.
    for stage, section, warmup_steps, updates in _warm_ups(recipe.stage):
        if warmup_steps > updates:
            reason = (
                f"is {warmup_steps} and stage {stage} ends after {updates} updates, so its learning rate never rises "
                f"to its value; lower the one or raise stage.{stage}.steps"
            )
            names: list[Keys] = [(section, "warmup_steps"), ("stage", stage, section, "warmup_steps")]
            yield names, [("stage", stage, "steps")], reason


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
