"""`rocstar runs`: look at what runs left behind, compare and draw it, write it in other forms, give its room back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocstar.cli.verbs.common import STYLE, AsJson, Runs, options_of, print_json
from rocstar.cli.verbs.sweep import print_sweep
from rocstar.errors import ConfigError, ContractBroken, Unavailable, first_line
from rocstar.support.exits import failure, need, visible

if TYPE_CHECKING:
    from rocstar.analysis.sources import Source
    from rocstar.record.folder import RunFolder
    from rocstar.record.formats import Feedback

RUN = "A run's name or the start of it, a path, or `last`."
SHOWN = 20  # attempts on the screen unless more are asked for

app = typer.Typer(**STYLE, help="Look at what runs left behind.")
Name = Annotated[str, typer.Argument(metavar="RUN", help=RUN)]


@dataclass(frozen=True, kw_only=True)
class AttemptOptions:
    """The arguments and options by which `rollouts` and `export` choose attempts."""

    name: Annotated[
        str, typer.Argument(metavar="RUN|EVALUATION", help="A run, a name of `evals list`, or a rollout file.")
    ]
    step: Annotated[int | None, typer.Option(help="Attempts of this step only.")] = None
    problem: Annotated[str | None, typer.Option(metavar="ID", help="Of this problem: its id or the start of it.")] = (
        None
    )
    right: Annotated[bool, typer.Option("--right", help="Right ones only.")] = False
    wrong: Annotated[bool, typer.Option("--wrong", help="Wrong ones only.")] = False
    undecided: Annotated[bool, typer.Option("--undecided", help="Those without a verdict only.")] = False
    kept: Annotated[bool, typer.Option("--kept", help="Those that the resampler kept only.")] = False
    dropped: Annotated[bool, typer.Option("--dropped", help="Those that it dropped only.")] = False
    stop: Annotated[str | None, typer.Option(metavar="WHY", help="Ended so: max_tokens, answered, ...")] = None
    error: Annotated[str | None, typer.Option(metavar="CLASS", help="A call failed so: NameError, ...")] = None
    text: Annotated[str | None, typer.Option(metavar="WORDS", help="With these words in question or text.")] = None
    runs: Runs = Path("runs")

    def filter(self) -> dict[str, str]:
        """The filter of table.py that they ask for. Raises ConfigError."""
        from rocstar.types import Stop

        for names in (("right", "wrong", "undecided"), ("kept", "dropped")):
            given = [f"--{name}" for name in names if getattr(self, name)]
            if len(given) > 1:
                raise ConfigError(f"{' and '.join(given)} exclude each other; give one of them")
        if self.stop is not None and self.stop not in list(Stop):
            raise ConfigError(f"--stop {self.stop} is none of {', '.join(Stop)}")
        filters = {
            "step": None if self.step is None else str(self.step),
            "problem": self.problem and f"{self.problem}*",
            "verdict": "right" * self.right + "wrong" * self.wrong + "undecided,none" * self.undecided,
            "kept": "yes" * self.kept + "no" * self.dropped,
            "stop": self.stop,
            "error": self.error,
            "q": self.text,
        }
        return {name: value for name, value in filters.items() if value}


@app.command(name="list")
def list_all(as_json: AsJson = False, runs: Runs = Path("runs")) -> None:
    """All runs, by name."""
    from rocstar.record.folder import closed_folders, list_runs
    from rocstar.record.show import show_or_broken
    from rocstar.support.screen import Screen, plural

    rows, closed = [show_or_broken(folder) for folder in list_runs(runs)], closed_folders(runs)
    if closed:
        Screen().note(f"{plural(len(closed), 'folder')} may not be read by this user: {', '.join(closed)}")
    if as_json:
        print_json({"runs": rows, "may_not_be_read": closed})
    elif rows:
        Screen().runs(rows)
    else:
        Screen().note(f"there are no runs in {runs}")


@app.command()
def show(name: Name, as_json: AsJson = False, runs: Runs = Path("runs")) -> None:
    """One run: how far it came, before against after."""
    from rocstar.record.folder import RunFolder

    print_run(RunFolder.find(name, runs), as_json=as_json)


def print_run(folder: RunFolder, *, as_json: bool) -> None:
    """A run as `runs show` shows it."""
    from rocstar.record.show import show_run
    from rocstar.support.screen import Screen

    shown = show_run(folder)
    print_json(shown) if as_json else Screen().summary(shown)


@app.command()
def sweep(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the sweep.")],
    as_json: AsJson = False,
    runs: Runs = Path("runs"),
) -> None:
    """The runs of a sweep: for each setting the mean, the range and the 95% interval over seeds."""
    print_sweep(name, runs, as_json=as_json)


@app.command()
def end_stage(name: Name, runs: Runs = Path("runs")) -> None:
    """End a run's stage after its step under way, and go on with the next."""
    from rocstar.record.folder import RunFolder
    from rocstar.support.screen import Screen

    folder = RunFolder.find(name, runs)
    Screen().note(f"stage {folder.request_end()} of {folder.name} ends after its step under way")


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=RUN)],
    b: Annotated[str, typer.Argument(metavar="B", help="The other.")],
    metric: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Metrics to compare; may be repeated.")
    ] = None,
    as_json: AsJson = False,
    runs: Runs = Path("runs"),
) -> None:
    """Two runs: settings that differ, where metrics came to (mean of the last ten of as many steps), and their
    evaluations paired problem by problem. Two evaluations of one run: `rocstar compare`.

    Example: rocstar runs compare roc grpo --metric reward/mean"""
    from rocstar.record.differences import metrics_side_by_side, settings_that_differ
    from rocstar.record.folder import RunFolder

    first, second = (RunFolder.find(name, runs) for name in (a, b))
    result = {
        "a": first.name,
        "b": second.name,
        "settings": settings_that_differ(first, second),
        "metrics": metrics_side_by_side(first, second, metric or ()),
        "evaluations": list(_paired(first, second)),
    }
    print_json(result) if as_json else print(visible("\n".join(_compared(result))))


def _paired(a: RunFolder, b: RunFolder) -> Iterator[dict[str, Any]]:
    """Compare each evaluation that both runs have: at the last step that both made it at, else at the last of each,
    which the result says (`step_a`, `step_b`); `refused` says why two can't be compared."""
    from rocstar.errors import DataError
    from rocstar.evaluation.compare import compared, read_kept, refuse_different

    steps_a, steps_b = (_steps_by_name(run) for run in (a, b))
    for name in (name for name in steps_a if name in steps_b):
        shared = sorted({*steps_a[name]} & {*steps_b[name]})[-1:]
        steps = [(shared or steps)[-1] for steps in (steps_a[name], steps_b[name])]
        row = {"name": name, "step_a": steps[0], "step_b": steps[1]}
        try:
            first, second = (
                read_kept(run.evaluation(name, step), f"{run.name}/{name}@{step}")
                for run, step in zip((a, b), steps, strict=True)
            )
            refuse_different(first, second, ())
            found = {key: value for key, value in compared(first, second).items() if key != "table"}
        except (ConfigError, DataError) as error:
            found = {"refused": str(error)}
        yield {**row, **found}


def _steps_by_name(run: RunFolder) -> dict[str, list[int]]:
    """The steps at which each evaluation was made, ascending, by its name."""
    found: dict[str, list[int]] = {}
    for name, step, _ in run.evaluations():
        found.setdefault(name, []).append(step)
    return found


def _compared(result: Mapping[str, Any]) -> Iterator[str]:
    from rocstar.record.differences import LAST_STEPS
    from rocstar.support.screen import plural

    yield f"A {result['a']}, B {result['b']}; metrics are means of the last {LAST_STEPS} of so many steps"
    alone = _alone(result["settings"])
    for name, whose in alone.items():
        yield f"  {name}: only {whose} has it"
    for row in result["settings"]:
        if ".".join(row["setting"].split(".")[:2]) not in alone:
            yield f"  {row['setting']}: {_short(row['a'])} -> {_short(row['b'])}"
    for row in result["metrics"]:
        steps = plural(row["steps"], "step")
        yield f"  {row['stage']} after {steps}, {row['metric']}: {row['a']:.4g} -> {row['b']:.4g}"
    for row in result["evaluations"]:
        same = row["step_a"] == row["step_b"]
        at = f"step {row['step_a']}" if same else f"A at step {row['step_a']}, B at step {row['step_b']}"
        if "refused" in row:
            yield f"  {row['name']}, {at}: not compared, {row['refused']}"
            continue
        low, high = row["difference"]["interval"]
        yield (
            f"  {row['name']}, {at}: {row['a']['accuracy']['value']:.1%} -> {row['b']['accuracy']['value']:.1%}, B - A "
            f"{row['difference']['value']:+.1%} (95%: {low:+.1%} to {high:+.1%}) over {row['problems']} problems, "
            f"p = {row['p_value']:.3g}"
        )


def _alone(settings: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Stages that only one of two runs has, each with that run's letter."""
    kinds = (row for row in settings if row["setting"].startswith("stage.") and row["setting"].endswith(".kind"))
    return {
        row["setting"].removesuffix(".kind"): "A" if row["b"] is None else "B"
        for row in kinds
        if row["a"] is None or row["b"] is None
    }


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@app.command()
@options_of(AttemptOptions)
def rollouts(
    options: AttemptOptions,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = SHOWN,
    full: Annotated[bool, typer.Option("--full", help="Show what was written and what tools said.")] = False,
    as_json: AsJson = False,
) -> None:
    """Attempts that a run or an evaluation kept: all, or those that fit.

    Example: rocstar runs rollouts last --wrong --error NameError --full"""
    from itertools import islice

    from rocstar.record.formats import facts, structured
    from rocstar.record.table import select
    from rocstar.support.screen import Screen
    from rocstar.view.attempt import decoder_of

    asked = options.filter()
    source, feedback = _source(options.name, options.runs)
    with Screen() as screen, screen.never_silent(screen.working):
        rows = list(islice(select(source.files, asked), limit))
        there = _there(source.files, asked) if not rows and not as_json else ""
        decode = decoder_of(source.model) if rows and full and source.model else None
    if as_json:
        shown = [{**facts(row), "messages": structured(row, feedback)} for row in rows]
        print_json({"source": source.name, "attempts": shown})
    elif not rows:
        print(f"{source.name} has no such attempt{there}")
    else:
        print("\n".join(_whole(row, feedback, decode) if full else _line(row) for row in rows))


def _there(files: Sequence[Path], asked: Mapping[str, str]) -> str:
    """A hint where nothing was found: the steps that kept attempts, or the classes of failures that there are."""
    from collections import Counter

    from rocstar.record.call_errors import failures
    from rocstar.record.folder import step_of
    from rocstar.record.table import select

    steps = sorted(step_of(file) for file in files if file.name.startswith("step="))
    if steps and "step" in asked and int(asked["step"]) not in steps:
        return f"; the steps that kept theirs go from {steps[0]} to {steps[-1]}"
    if "error" not in asked:
        return ""
    others = {name: text for name, text in asked.items() if name != "error"} | {"failed": "1.."}
    there = Counter(name for row in select(files, others) for name in failures(row["turns"]))
    counts = ", ".join(f"{name} ({count})" for name, count in there.most_common())
    return f"; existing failures: {counts}" if counts else "; no call failed there"


UNREAD_ANSWERS = {"function": "judged by the reward function", "agent": "rewarded by its agent"}
"""Of attempts whose answer nothing of ours looks for, by the method of their verdict. A function reads the text, whose
end is shown."""


def _line(row: Mapping[str, Any]) -> str:
    from rocstar.dialogue.marked_calls import without_end
    from rocstar.record.call_errors import failures

    errors = ", ".join(failures(row["turns"]))
    graded = row["reward"] not in (None, float(row["verdict"] == "right"))
    verdict = f"{row['verdict'] or 'undecided':9}" + (f" reward {row['reward']:g}" if graded else "")
    answer = row["fault"] or UNREAD_ANSWERS.get(row["method"], "no answer")
    if row["method"] == "function" and row["text"] and not row["fault"]:
        answer += f", {without_end(row['text'][-1])[-60:]!r}" + f" for {row['gold']!r}" * bool(row["gold"])
    if row["extracted"] is not None:
        answer = f"{row['extracted']!r} for {row['gold']!r}"[:80]
    unread = row["stop"] == "max_tokens" and row["turns"] and row["turns"][-1]["results"]
    stop = "max_tokens (no room for the last reply)" if unread else row["stop"]
    return visible(
        f"step {row['step']} {row['problem_id'][:8]} #{row['index']:<3} {verdict} "
        f"{row['reason'] or '':22} {row['calls']} call{'s' * (row['calls'] != 1)}{f' ({errors})' if errors else ''}, "
        f"{row['response_tokens']} tokens, {stop}: {answer}"
    ).replace("\n", " ")


def _whole(row: Mapping[str, Any], feedback: Feedback, decode: Callable[[Sequence[int]], str] | None) -> str:
    """decode: of the first prompt of an agent's attempt, which is not the problem's own."""
    from rocstar.record.formats import as_written, own_messages

    messages = as_written(row, feedback)
    if decode:
        messages[: len(own_messages(row))] = [{"role": "prompt", "content": decode(row["prompt_ids"])}]
    said = (f"[{message['role']}]\n{visible(message['content'])}" for message in messages)
    return "\n".join((_line(row), *said, ""))


@app.command()
@options_of(AttemptOptions)
def export(
    options: AttemptOptions,
    form: Annotated[str, typer.Option("--format", help="messages, trl or csv.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to; default: named after the source.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="How many at most.")] = None,
) -> None:
    """Write attempts for other tools: messages, TRL's rows, or a table without texts.

    Example: rocstar runs export last --right --format trl --out right.jsonl"""
    from itertools import islice

    from rocstar.record.formats import ENDINGS, FORMS
    from rocstar.record.formats import export as write
    from rocstar.record.table import select
    from rocstar.support.screen import Screen, plural

    if form not in FORMS:
        raise ConfigError(f"--format {form} is none of {', '.join(FORMS)}")
    asked = options.filter()
    source, feedback = _source(options.name, options.runs)
    path = out or Path(f"{source.name.replace('/', '-')}-{form}.{ENDINGS[form]}")
    if path.is_dir() or not path.parent.is_dir():
        there = "is a folder" if path.is_dir() else "lies in a folder that is not there"
        raise ConfigError(f"{path} {there}; name a file in a folder that is there with --out")
    if path.exists():
        raise ConfigError(f"{path} is there already; delete it, or give another name with --out")
    with Screen() as screen, screen.never_silent(screen.working):
        count = write(islice(select(source.files, asked), limit), feedback, form, path)
        there = "" if count else _there(source.files, asked)
    if not count:
        print(f"{source.name} has no such attempt{there}", file=sys.stderr)
    print(f"{plural(count, 'attempt')} in {path}")


def _source(name: str, runs: Path) -> tuple[Source, Feedback]:
    """A run or an evaluation that kept attempts, with its model only where an agent wrote the prompts and not a
    template; and its tool results as the model read them. Raises ConfigError and DataError."""
    from rocstar.analysis.sources import find_source
    from rocstar.record.folder import read_json
    from rocstar.record.formats import feedback_of

    need("train")
    source = find_source(name, runs)
    run = source.run or source.trainer
    if run is None and source.result is None:
        raise ConfigError(f"{name} does not say how tool results were shown; give the run or the evaluation it is of")
    if not source.files:
        raise ConfigError(f"run {source.name} kept no attempts (run.save_rollouts was off, or it has no RL step yet)")
    settings = source.result["setup"] if source.result else read_json(run.resolved) if run else {}
    by_agent = (settings.get("rollout") or settings).get("agent")
    return replace(source, model=source.model if by_agent else None), feedback_of(settings)


@app.command()
def track(
    name: Name,
    to: Annotated[str, typer.Option("--to", metavar="TRACKER", help="tensorboard, wandb, trackio or mlflow.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on until standard input is closed.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Send the metrics of a run to a tracker: those that it has not been sent yet.

    Example: rocstar runs track last --to tensorboard"""
    from rocstar.record.folder import RunFolder
    from rocstar.record.trackers import follow as carry_out
    from rocstar.record.trackers import open_sink, run_goes_on

    folder = RunFolder.find(name, runs)
    try:
        with open_sink(to, folder) as log:
            step = carry_out(folder, to, log, run_goes_on(sys.stdin.buffer) if follow else lambda seconds: False)
    except Exception as error:  # a library of theirs may raise anything
        if isinstance(error, ContractBroken) or failure(error) is not None:
            raise
        raise Unavailable(f"{to} failed: {first_line(error)}; --traceback shows where") from error
    print(f"{to} has all steps of {folder.name} up to {step}")


@app.command()
def gc(
    keep: Annotated[int, typer.Option(min=0, help="Checkpoints of each run that stay, the newest.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and stop.")] = False,
    as_json: AsJson = False,
    runs: Runs = Path("runs"),
) -> None:
    """Delete old checkpoints and what kills left half written, of all runs without a writer. Checkpoints of ended
    stages go too, from which `train --branch` could start.

    Example: rocstar runs gc --keep 1 --dry-run"""
    from rich.filesize import decimal

    from rocstar.record.folder import delete, leftovers, list_runs, size_of

    total = 0
    gone: list[str] = []
    left_alone: list[str] = []
    for run in {run.path.resolve(): run for run in list_runs(runs)}.values():  # each once, links apart
        try:
            with run.locked():
                paths = leftovers(run, keep)
                freed = sum(map(size_of, paths))
                if not dry_run:
                    delete(paths)
        except ConfigError as error:
            left_alone.append(str(error))
            continue
        total += freed
        gone += map(str, paths)
    if as_json:
        print_json({"paths": gone, "bytes": total, "left_alone": left_alone, "deleted": not dry_run})
    else:
        print(*(f"left alone: {why}" for why in left_alone), *gone, sep="\n", end="\n" if gone or left_alone else "")
        print(f"{decimal(total)} {'would be freed' if dry_run else 'freed'}")
