"""A run that goes on from a checkpoint, itself (`--resume`) or as a copy (`--branch`): which settings may change there,
and the record of it. The stage under way may get more steps and other settings, later stages may change in any way, and
new ones may be added; finished stages stay unchanged.

run.json keeps `changes`, a row `{step, setting, was, now}` for each setting, or other influence on figures, that
changed at a step. Settings that only place the computation are not among them: they hold for one start. Nor are those
that say where its files lie now, which it keeps if they hold what they held (`same_inputs` of material.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from rocstar.config.recipe import changed, resolved_from_json
from rocstar.config.sections import Recipe, Stage
from rocstar.config.tree import flat
from rocstar.errors import ConfigError
from rocstar.record.atomic import write_json
from rocstar.record.folder import RunFolder, read_json
from rocstar.record.journal import read_journal
from rocstar.support.plugins import HASH
from rocstar.support.screen import plural
from rocstar.support.weights import hash_of, state_of

PLACES = ("cluster.", "engine.", "run.stall_", "run.threads=", "run.fault_budget=")
FIXED = ("kind", "data.", "sft.rows_file", "sft.optimizer", "learning.reset_optimizer")
"""Keys that cannot change once a stage has begun: its data, and the origin of its optimizer state."""
FILES = ("data.train_files", "data.test_files", "model.path")
"""Files and folders of the whole run that may lie elsewhere than when it began."""
REFERENCE = "learning.kl_coefficient"
"""Fixed if 0: the reference weights of the stage's beginning were not kept."""
Change = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """How a run goes on after a step."""

    recipe: Recipe
    changes: Sequence[Change]
    """All changes of the run so far, the new ones last."""
    goes_on: bool
    """Whether the settings extend the run, or say where its files lie now."""
    begun: frozenset[str]
    """Stages that have begun; for the others problems are chosen again, by the weights at their beginning."""
    anew: frozenset[str]
    """Stages that have not begun and whose settings changed; files prepared for them are invalid."""
    unmade: frozenset[str] | None
    """SFT stages whose rows must be made; None if none exist yet."""


def continued(run: RunFolder, step: int | None, settings: Sequence[str], *, flag: str, own: str = "") -> Continued:
    """How `run` goes on after the checkpoint of `step` (None: there is none) under the settings given to `flag`. own: a
    further setting that `flag` takes. Raises ConfigError for settings that cannot change there; DataError."""
    was = resolved_from_json(run.resolved)
    begun = {row["stage"] for row in read_journal(run.metrics) if row["step"] <= (step or 0)}
    alike = [stage.name for stage in was.rollout_stages if stage.data.train_files == was.data.train_files]
    moves = list(_moves(settings, alike, begun))
    settings = [given for given in settings if given not in moves]
    for given in settings:
        if not given.startswith((*PLACES, "stage.", *([own] if own else []))):
            section, _, key = given.partition("=")[0].partition(".")
            over = 0 if step is None else state_of(run.checkpoint(step))["stage"]
            left = was.stage[was.stage.index([stage for stage in was.stage if stage.steps][over]) :]
            names = [stage.name for stage in left if hasattr(getattr(stage, section, None), key)]
            better = f"give it to a stage, as stage.{names[-1]}.{given}, or " if names else ""
            raise ConfigError(
                f"{flag} goes on with the settings of {run.name} and takes no {given!r}; {better}leave that out (only "
                "stage.NAME.KEY of stages that go on, cluster.KEY, engine.NAME.KEY, run.stall_KEY, run.fault_budget, "
                "run.threads"
                f"{own and ' and '}{own.rstrip('=')} may change, and where files lie: {', '.join(FILES)}, run.modules)"
            )
    now = changed(was, [*settings, *moves], {})
    files = dict(zip(FILES, (now.data.train_files, now.data.test_files, [now.model.path or ""]), strict=True))
    files |= {f"stage.{stage.name}.{FILES[0]}": stage.data.train_files for stage in now.rollout_stages}
    for key, place in ((key, place) for key, places in files.items() for place in places):
        if os.path.isabs(place) and not os.path.exists(place):
            raise ConfigError(
                f"{place} of run {run.name} is not there; put it back, or say with {key} where it lies now, unchanged"
            )
    moved = {given.partition("=")[0] for given in moves}
    fresh = [row for row in _differ(was, now, step or 0) if row["setting"] not in moved]
    if step is not None:
        _refuse_what_is_over(run, step, was.stage, now.stage, settings, fresh)
    anew = frozenset({_stage_of(row["setting"]) for row in fresh} - begun)
    rows = {stage.name for stage in now.sft_stages if stage.name not in begun}
    return Continued(
        recipe=now,
        # A branch from before a change has it from its own first step on.
        changes=_merged([*({**row, "step": min(row["step"], step or 0)} for row in run.changes), *fresh]),
        goes_on=bool(fresh or moves),
        begun=frozenset(begun),
        anew=anew,
        unmade=None if step is None else frozenset(n for n in rows if n in anew or not run.sft_rows(n).exists()),
    )


def record(run: RunFolder, continued: Continued) -> None:
    """Record how the run goes on from here. Raises ConfigError while another process writes the run, OSError."""
    with run.locked():
        run.summary.unlink(missing_ok=True)
        pools = (file for file in run.path.glob("pools/*") if file.stem not in continued.begun)
        for file in (*map(run.sft_rows, continued.anew), *pools):
            file.unlink(missing_ok=True)
        if run.problems.exists():
            noted = read_json(run.problems)
            write_json(run.problems, {name: noted[name] for name in noted if name not in continued.anew})
        known = run.identity.get("settings", {})
        kept = known if known != settings_hash(run) else {}  # they were edited by hand, which is told
        # The settings last: after a kill before them, the change can be requested again.
        write_json(run.path / "run.json", {**run.identity, "changes": list(continued.changes), "settings": kept})
        write_json(run.resolved, continued.recipe.resolved())


def settings_hash(run: RunFolder) -> dict[str, str]:
    """What run.json keeps of the settings, to notice that they were edited by hand."""
    return {run.resolved.name: hash_of([run.resolved])[:HASH]}


def note_surroundings(run: RunFolder, now: Mapping[str, Any], step: int) -> list[str]:
    """Keep in run.json what figures depend on besides settings and problems; returns the names that changed after
    `step` and were not restored, since later steps are made again."""
    identity = run.identity
    was = dict(flat({name: identity.get(name) or {} for name in now}))
    fresh = [
        {"step": step, "setting": name, "was": was[name], "now": value}
        for name, value in flat(now)
        if was.get(name, value) != value
    ]
    merged = _merged([*run.changes, *fresh])
    write_json(run.path / "run.json", {**identity, **now, "changes": merged})
    current = {row["setting"] for row in merged if row["step"] == step}
    return [row["setting"] for row in fresh if row["setting"] in current]


def made_again(run: RunFolder, step: int) -> str:
    """Describes the steps after the checkpoint of `step` (0: there is none) that are repeated; empty if none are."""
    last = max((row["step"] for row in read_journal(run.metrics)), default=0)
    if last <= step:
        return ""
    steps = f"step {last} is" if last == step + 1 else f"steps {step + 1} to {last} are"
    return f"; {steps} made again: " + (f"the last checkpoint is of step {step}" if step else "there is no checkpoint")


def is_reopened(run: RunFolder, stage: str, step: int) -> bool:
    """Whether a stage that was over at `step` goes on there."""
    return any(row["step"] == step and row["setting"].startswith(f"stage.{stage}.") for row in run.changes)


def _moves(settings: Sequence[str], alike: Sequence[str], begun: Set[str]) -> Iterator[str]:
    """The settings that say where files lie now: of the run, and so of stages with `alike` files, or of a begun
    stage."""
    of_begun = tuple(f"stage.{name}.{FILES[0]}" for name in begun)
    keys = [given.partition("=")[0] for given in settings]
    for key, given in zip(keys, settings, strict=True):
        if key in (*FILES, "run.modules", *of_begun):
            yield given
        if key == FILES[0]:
            yield from (f"stage.{name}.{given}" for name in alike if f"stage.{name}.{key}" not in keys)


def _differ(was: Recipe, now: Recipe, step: int) -> Iterator[Change]:
    known = {stage.name for stage in was.stage}
    before, after = (dict(flat(recipe.resolved())) for recipe in (was, now))
    for key in sorted({*before, *after}):
        if key.startswith("stage.") and _stage_of(key) in known and before.get(key) != after.get(key):
            yield {"step": step, "setting": key, "was": before.get(key), "now": after.get(key)}
    for stage in now.stage:
        if stage.name not in known:
            summary = f"{stage.kind}, {plural(stage.steps, 'step')}"
            yield {"step": step, "setting": f"stage.{stage.name}", "was": None, "now": summary}


def _stage_of(setting: str) -> str:
    return setting.split(".")[1]


def _merged(rows: Sequence[Change]) -> list[Change]:
    """Merge several changes of a setting at one step."""
    merged: dict[tuple[int, str], Change] = {}
    for row in rows:
        key = row["step"], row["setting"]
        merged[key] = {**row, "was": merged[key]["was"]} if key in merged else row
    return [row for row in merged.values() if row["was"] != row["now"]]


def _refuse_what_is_over(
    run: RunFolder,
    step: int,
    was: Sequence[Stage],
    now: Sequence[Stage],
    settings: Sequence[str],
    fresh: Sequence[Change],
) -> None:
    state, names = state_of(run.checkpoint(step)), [stage.name for stage in now]
    under_way = [stage for stage in was if stage.steps][state["stage"]].name
    for given in settings:
        if given.startswith("stage.") and names.index(_stage_of(given)) < names.index(under_way):
            raise ConfigError(
                f"stage {_stage_of(given)} was over at step {step}, so {given!r} would change nothing; leave it out"
            )
    own, stage, done = f"stage.{under_way}.", now[names.index(under_way)], state["stage_step"]
    mine = [given for given in settings if given.startswith(own)]
    changes = [row for row in fresh if row["setting"].startswith(own)]
    if not mine:
        return
    if stage.steps <= done:
        raise ConfigError(
            f"stage {stage.name} has made its {plural(done, 'step')} at step {step} of the run, so {mine[0]!r} would "
            f"change nothing; give it more steps with {own}steps=NUMBER, or add a stage with stage.NAME.kind=rl and "
            "stage.NAME.steps=NUMBER"
        )
    if state["stage_complete"] and not is_reopened(run, stage.name, step) and not changes:
        raise ConfigError(
            f"stage {stage.name} was over at step {step} under this very setting, {mine[0]!r}; change one"
        )
    for setting, was_set in ((row["setting"].removeprefix(own), row["was"]) for row in changes):
        if done and (setting.startswith(FIXED) or (setting == REFERENCE and not was_set)):  # none: it was skipped
            raise ConfigError(
                f"{own}{setting} cannot change at step {step}, because stage {stage.name} has begun with it; leave it "
                "out, or add a stage with stage.NAME.kind=rl and stage.NAME.steps=NUMBER"
            )
