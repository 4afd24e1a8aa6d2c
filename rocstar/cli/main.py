"""The `rocstar` command: verbs, exit codes, and reports of failures. Every heavy import is inside its verb.

stdout is results, stderr is progress. Exit codes are in support/exits.py; verbs of rooms that are useful alone
are in `verbs/`.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core

from rocstar.cli.verbs import (
    analyze,
    answers,
    data,
    doctor,
    evaluate,
    faults,
    model,
    plan,
    recipes,
    replay,
    sandbox,
    serve,
    simulate,
    sweep,
    tool,
    view,
)
from rocstar.cli.verbs import runs as run_verbs
from rocstar.cli.verbs.common import STYLE, AsJson, Settings, print_json, stop, stoppable, tell_next
from rocstar.errors import ConfigError, full_disk, is_disk_full
from rocstar.support.exits import (
    FAILED,
    INTERRUPTED,
    OK,
    USAGE,
    failure,
    need,
    open_closed_streams,
    shortened,
    tell_without_fail,
    visible,
    with_pages,
)
from rocstar.support.signals import answered
from rocstar.support.threads import quiet_torch

if TYPE_CHECKING:
    from rocstar.config.origins import Provenance
    from rocstar.config.sections import Recipe
    from rocstar.record.folder import RunFolder
    from rocstar.run.material import Material
    from rocstar.support.screen import Screen

TRACEBACK = "--traceback"
NOTHING_YET = "stopped before anything was written"
USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # typer has no public name for it


class Verbs(typer.core.TyperGroup):
    """Verbs that end at Ctrl-C with a sentence, also where they have none of their own."""

    def invoke(self, ctx: Any) -> Any:
        with stoppable("stopped; the same command begins again"):
            return super().invoke(ctx)


app = typer.Typer(
    **STYLE,
    cls=Verbs,
    pretty_exceptions_enable=False,
    help="Small language models that learn to reason with a Python tool (GRPO-RoC).",
    epilog="Example: rocstar train recipes/quickstart.toml rollout.max_turns=2",
)
click_command = cache(partial(typer.main.get_command, app))  # a process reads all signatures once: 20 ms of CPU
RunsOrNone = Annotated[
    Path | None, typer.Option("--runs", help="Folder that holds the runs; default: the recipe's run.folder.")
]
RecipeFile = Annotated[str | None, typer.Argument(metavar="RECIPE", help="A TOML recipe.")]
Resume = Annotated[
    str | None,
    typer.Option(metavar="RUN", help="Go on with a run: its name, path or `last`; its last stage may change."),
]
Branch = Annotated[
    str | None,
    typer.Option(metavar="RUN[@STEP]", help="A new run that goes on from a checkpoint of another; stages may change."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check it, print what differs from the defaults, and stop.")]


def main() -> None:
    """Entry point of the `rocstar` command."""
    open_closed_streams()
    tell_without_fail()
    try:
        with answered() as ctrl_c:
            try:
                code = run(sys.argv[1:])
            except BaseException:  # an import that is interrupted may raise anything
                if not ctrl_c.came():
                    raise
                print("rocstar: stopped; the same command begins again", file=sys.stderr)
                code = INTERRUPTED
            if code == INTERRUPTED:
                _leave(code)
    except Exception as error:  # no thread can be started that answers Ctrl-C
        code = _told(error, sys.argv)
    sys.exit(code)


def _leave(code: int) -> NoReturn:
    """Exit without finalizing the interpreter, which takes one to two seconds of CPU once torch is loaded."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Carry out one command line; the exit code. Errors of people and machines end in a sentence on stderr."""
    quiet_torch()  # before anything loads torch, which may be the code that a recipe names
    try:
        code = _exit_code([argument for argument in arguments if argument != TRACEBACK])
        sys.stdout.flush()  # now, so that we report a full disk and not the interpreter as it shuts down
    except Exception as error:
        return _told(error, arguments)
    return code


def _told(error: Exception, arguments: list[str]) -> int:
    """The exit code, once its sentence is told; raises the error where it has none or its traceback is asked for."""
    report = failure(error)
    if report is None or TRACEBACK in arguments:
        raise error
    print(f"rocstar: {shortened(visible(with_pages(report[1])))}", file=sys.stderr)
    return report[0]


def _exit_code(arguments: list[str]) -> int:
    try:
        code = click_command()(arguments, prog_name="rocstar", standalone_mode=False)
    except USAGE_ERROR as error:
        print(_usage_sentence(error), file=sys.stderr)
        return USAGE
    except SystemExit as end:  # of code of the user's own, or of a library
        said = end.code if isinstance(end.code, str) else f"your code, or a library, called sys.exit({end.code})"
        print(f"rocstar: {said}", file=sys.stderr)
        return end.code if isinstance(end.code, int) and end.code else FAILED
    return code if isinstance(code, int) else OK


def _usage_sentence(error: Any) -> str:
    message: str = error.format_message()
    if "\n" in message:  # the help page, where no argument was given
        return message
    asks = message.endswith("?")  # whether another name was meant
    page = f"{' See' if asks else '; see'} {error.ctx.command_path} --help" if error.ctx else ""
    return shortened(f"rocstar: {message[:1].lower()}{message[1:].rstrip('.')}{page}")


def _show_version(wanted: bool) -> None:
    if wanted:
        from rocstar.record.identity import version_of

        print(f"rocstar {version_of('rocstar') or '(not installed, so it has no version)'}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[bool, typer.Option(TRACEBACK, help="Show where an error came from (any place).")] = False,
) -> None:
    """Options of every verb; `--traceback` is taken out by `run` and stands here for the help page."""


@app.command()
def train(
    recipe: RecipeFile = None,
    settings: Settings = None,
    resume: Resume = None,
    branch: Branch = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    runs: RunsOrNone = None,
) -> None:
    """Carry out all stages of a recipe, or go on with a run.

    Example: rocstar train recipes/quickstart.toml run.seed=1"""
    if _served():
        return
    given = [recipe, *(settings or [])] if recipe else []
    if resume is not None and branch is not None:
        raise ConfigError("--resume goes on with a run itself and --branch with a copy; give one of them")
    if resume is not None:
        _resume(resume, given, runs or Path("runs"), dry_run=dry_run, as_json=as_json)
    elif branch is not None:
        _branch(branch, given, runs or Path("runs"), dry_run=dry_run, as_json=as_json)
    else:
        _start(recipe, settings or [], kind=None, runs=runs, dry_run=dry_run, as_json=as_json)


@app.command()
def sft(
    recipe: RecipeFile = None,
    settings: Settings = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    runs: RunsOrNone = None,
) -> None:
    """Carry out only the cold-start (sft) stages of a recipe."""
    if _served():
        return
    _start(recipe, settings or [], kind="sft", runs=runs, dry_run=dry_run, as_json=as_json)


# In the order of the help page: a first run, looking at it, talking to it, then what is needed now and then.
app.command(name="eval")(evaluate.evaluate)
app.command()(view.view)
app.command()(serve.chat)
app.command()(serve.serve)
app.command()(evaluate.compare)
app.command()(analyze.analyze)
app.command()(replay.replay)
app.command()(doctor.doctor)
app.command()(faults.faults)
app.command()(sweep.sweep)
app.command()(plan.plan)
app.command()(simulate.simulate)
app.command()(answers.verify)
app.add_typer(run_verbs.app, name="runs")
app.add_typer(evaluate.app, name="evals")
app.add_typer(recipes.app, name="recipes")
app.add_typer(model.app, name="model")
app.add_typer(data.app, name="data")
app.add_typer(answers.app, name="reward")
app.add_typer(tool.app, name="tool")
app.add_typer(sandbox.app, name="sandbox")


# Runs


def _served() -> bool:
    """Whether torchrun started this process to learn along with rank 0; that is then done."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["RANK"] == "0":
        return False
    from rocstar.learning.ranks import serve_rank

    serve_rank(os.environ)
    return True


def _start(
    path: str | None, settings: list[str], *, kind: str | None, runs: Path | None, dry_run: bool, as_json: bool
) -> None:
    from rocstar.config.layers import read_layers
    from rocstar.config.origins import provenances
    from rocstar.config.recipe import load_recipe, recipe_text
    from rocstar.config.sections import Recipe
    from rocstar.record.folder import RunFolder, free_place, refuse_place
    from rocstar.record.trackers import refuse_absent

    if path is None or ("=" in path and not Path(path).exists()):
        raise ConfigError("give a recipe first, as in: rocstar train recipes/quickstart.toml section.key=value")
    given = settings if runs is None else [*settings, f"run.folder={runs}"]
    recipe = load_recipe(path, given)
    stages = [stage for stage in recipe.stage if kind in (None, stage.kind)]
    if not stages:
        raise ConfigError(f"{path} has no [[stage]]{f' of kind {kind}' if kind else ''}, so there is nothing to do")
    recipe = recipe.model_copy(update={"stage": stages})
    # All errors are found before the folder is created.
    refuse_absent(recipe.run.trackers)
    refuse_place(recipe.run.folder, recipe.run.name)
    material = _material(recipe, None, dry_run)
    counted = {stage.name: stage for stage in material.recipe.stage}
    recipe = recipe.model_copy(update={"stage": [counted.get(stage.name, stage) for stage in recipe.stage]})
    if dry_run:
        place = free_place(recipe.run.folder, recipe.run.name)
        layers = read_layers(Path(path), Recipe)
        differs = provenances(recipe, given, otherwise="derived from the others", layers=layers)
        _print_given(recipe, material, differs, place, as_json=as_json)
        return
    text = recipe_text(path, settings)
    folder = RunFolder.create(recipe, recipe.run.folder, sys.argv, recipe_text=text)
    material = replace(material, recipe=material.recipe.settled())  # as a resumed run reads it
    _carry_out(material, folder, resume=False, as_json=as_json)


def _resume(name: str, settings: list[str], runs: Path, *, dry_run: bool, as_json: bool) -> None:
    """Under the run's own settings, which decide what it computes, but for stages that are not over or are given more
    steps. Others may be `cluster.*` and `engine.*`, which say where, and `run.stall_*`, for how long nothing may move.
    """
    from rocstar.config.origins import provenances
    from rocstar.record.folder import RunFolder
    from rocstar.run.continued import continued, record

    folder = RunFolder.find(name, runs)
    made = continued(folder, max(folder.checkpoint_steps(), default=None), settings, flag="--resume")
    if folder.summary.exists() and not made.goes_on and not dry_run:
        print(
            f"run {folder.name} is finished, so there is nothing to go on with; stage.NAME.steps=NUMBER makes "
            "more steps of its last stage",
            file=sys.stderr,
        )
        _show_result(folder, as_json=as_json)
        return
    material = _material(made.recipe, made.unmade, dry_run)
    from rocstar.run.material import same_inputs  # after what it needs was found to be there

    same_inputs(material, folder, made.anew)
    if dry_run:
        given = provenances(made.recipe, settings, otherwise=f"run {folder.name}")
        _print_given(made.recipe, material, given, folder.path, as_json=as_json)
        return
    if made.goes_on:
        record(folder, made)
    _carry_out(material, folder, resume=True, as_json=as_json)


def _branch(name: str, settings: list[str], runs: Path, *, dry_run: bool, as_json: bool) -> None:
    """A run of its own from a checkpoint on, under that run's settings; those of stages that go on may differ."""
    from rocstar.config.origins import provenances
    from rocstar.record.folder import RunFolder, fill_branch, find_checkpoint, free_place
    from rocstar.run.continued import continued

    source, step = find_checkpoint(name, runs)
    made = continued(source, step, settings, flag="--branch", own="run.name=")
    material = _material(made.recipe, made.unmade, dry_run)
    from rocstar.run.material import same_inputs  # as in `_resume`

    same_inputs(material, source, {stage.name for stage in made.recipe.stage} - made.begun)
    if dry_run:
        given = provenances(made.recipe, settings, otherwise=f"run {source.name}")
        place = free_place(source.path.parent, made.recipe.run.name)
        _print_given(made.recipe, material, given, place, as_json=as_json)
        return
    fill = partial(fill_branch, source=source, step=step, anew=made.anew, changes=made.changes)
    text = f"# branch of {source.name} at step {step}: {settings}\n{source.recipe_text()}"
    folder = RunFolder.create(made.recipe, source.path.parent, sys.argv, recipe_text=text, fill=fill)
    _carry_out(material, folder, resume=True, as_json=as_json)


def _material(recipe: Recipe, rows: Set[str] | None, dry_run: bool) -> Material:
    """As `read_material`, which is heavy to load; a dry run tries the sandbox only after it has printed what it found.
    Raises SandboxDown."""
    if not dry_run:
        need("train")
    from rocstar.cluster import refuse_weak_sandbox
    from rocstar.run.material import read_material
    from rocstar.support.screen import Screen

    reading, began = "reading the data and counting the tokens of its prompts", time.monotonic()
    with (
        stoppable(NOTHING_YET),
        Screen() as screen,
        screen.never_silent(lambda: f"{reading} for {time.monotonic() - began:.0f} s"),
    ):
        material = read_material(recipe, rows=rows)
        if not dry_run:
            refuse_weak_sandbox(recipe.cluster, recipe.sandbox)
        return material


def _print_given(
    recipe: Recipe, material: Material, settings: Iterable[Provenance], place: Path, *, as_json: bool
) -> None:
    """Print the result of `--dry-run`: settings that are not defaults, each with its source; as JSON also all in force.
    Then try the sandbox. place: the run's folder. Raises SandboxDown."""
    from rocstar.cluster import refuse_weak_sandbox
    from rocstar.config.origins import ABSENT, of_environment
    from rocstar.parts.memory import beside_what_is_there
    from rocstar.run.material import few_problems, first_prompt

    given = [*settings, *of_environment(os.environ)]
    prompt = first_prompt(material)
    tools = [spec.name for spec in material.parts.shown_specs]
    if as_json:
        memory = material.memory and {**asdict(material.memory), "run": material.memory.run}
        print_json(
            {
                "settings": recipe.resolved(),
                "differs": given,
                "memory": memory,
                "placement": [asdict(process) for process in material.placement.processes],
                "tools": tools,
                "first_prompt": prompt,
                "run_folder": str(place),
            }
        )
    else:
        for one in given:
            before = "" if one["default"] in (ABSENT, None) else f"default {json.dumps(one['default'])}; "
            print(f"{one['key']} = {json.dumps(one['value'], ensure_ascii=False)}  ({before}{one['source']})")
        print(f"{len(given)} settings differ from their defaults; --json prints all that are in force", file=sys.stderr)
        order = ", then ".join(f"{stage.name} ({stage.kind})" for stage in recipe.stage)
        print(f"stages in order: {order or 'none'}; run folder: {place}", file=sys.stderr)
        if tools:
            print(f"tools of the model: {', '.join(tools)}", file=sys.stderr)
        if prompt is not None:
            print(f"the first prompt, as the model will read it:\n{prompt}", file=sys.stderr)
    if material.placement.gpu_bytes:
        print(material.placement.table(), file=sys.stderr)
    if material.memory:
        print(f"memory of this machine: {beside_what_is_there(material.memory)}", file=sys.stderr)
    few = (few_problems(stage, len(material.problems[stage.name])) for stage in material.recipe.rollout_stages)
    for note in (*material.notes, *filter(None, few)):
        print(note, file=sys.stderr)
    if 0 < len(material.heldout) < recipe.evaluate.problems:
        asked = f"fewer than evaluate.problems = {recipe.evaluate.problems}; all of them are asked"
        print(f"{len(material.heldout)} problems are held out, {asked}", file=sys.stderr)
    refuse_weak_sandbox(recipe.cluster, recipe.sandbox)


def _carry_out(material: Material, folder: RunFolder, *, resume: bool, as_json: bool) -> None:
    from rocstar.support.screen import Screen

    go_on = f"continue with: rocstar train --resume {folder.argument}"
    try:
        with stoppable(lambda: f"stopped; {_kept(folder)}; {go_on}"), Screen() as screen:
            screen.note(f"run folder: {folder.path}")
            launch(material, folder, screen, resume=resume)
    except OSError as error:
        if not is_disk_full(error):
            raise
        stop(FAILED, f"{full_disk(error)}; free some space, then {go_on}")
    _show_result(folder, as_json=as_json)


def launch(material: Material, folder: RunFolder, screen: Screen, *, resume: bool) -> None:
    """Carry out a recipe's stages in `folder`, which is locked meanwhile: machines first, and only then slow imports.
    Raises KeyboardInterrupt when asked to stop, after saving unsaved progress. Other errors are recorded in the run's
    events."""
    import asyncio

    from rocstar.cluster import opened_machines
    from rocstar.record.trackers import tracked
    from rocstar.support.child import uncollected

    recipe = material.recipe
    identity, trackers = folder.path.resolve() / "run.json", recipe.run.trackers
    with (
        folder.locked(),  # first: a start that is refused must not send steps of the run that goes on
        tracked(folder, trackers, screen.note),
        _failure_noted(folder),
        opened_machines(recipe, identity, material.placement) as machines,
    ):
        with uncollected():
            from rocstar.run.stopper import Stopper
            from rocstar.train import train

        stopper = Stopper(screen.note)
        with stopper.installed():
            asyncio.run(train(material, folder, screen, machines, resume=resume, stopper=stopper))


@contextmanager
def _failure_noted(folder: RunFolder) -> Iterator[None]:
    from rocstar.record.show import note_failure

    try:
        yield
    except Exception as error:
        report = failure(error)
        with suppress(OSError):  # a full disk may be what ended it
            note_failure(folder, report[1] if report else f"a fault of rocstar itself: {type(error).__name__}: {error}")
        raise


def _show_result(folder: RunFolder, *, as_json: bool) -> None:
    run_verbs.print_run(folder, as_json=as_json)
    where = folder.argument
    tell_next(f"rocstar view {where}", f"rocstar runs rollouts {where} --wrong", f"rocstar chat {where}")


def _kept(folder: RunFolder) -> str:
    """Describes the saved progress of a run."""
    from rocstar.record.journal import read_journal

    saved = max(folder.checkpoint_steps(), default=0)
    again = len(read_journal(folder.metrics)) - saved
    if not saved:
        return "no step is saved yet"
    return f"step {saved} is saved" + (f" and {again} later ones are made again" if again > 0 else "")
