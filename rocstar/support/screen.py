"""Output for people: a live step line on a terminal, a plain line per step elsewhere (stderr), and tables (stdout).

Not here: what the numbers are (record/show.py, the trainer's metrics). `STEP_LINE` names the metrics that are shown."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any, TextIO, TypeGuard

from rocstar.support.exits import shortened, visible, with_pages
from rocstar.support.pace import Pace, time_left

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

Metrics = Mapping[str, Any]
TRANSCRIPT_LINES = 14  # two of them and the table fit one screen
TRANSCRIPT_COLUMNS = 110
PIPE_COLUMNS = 200  # most width of a table that is written to a pipe; it is as wide as what it holds
LEAST_COLUMNS = 80  # of a table; a narrower terminal breaks its lines, and no cell is lost
LINE_SECONDS = 1.0  # a log gets at most one progress line a second, and always the last before other output
NAMED = 4  # earlier evaluations of one name
SILENT_SECONDS = 10.0  # after which a log gets a line about the current work
LOOK_SECONDS = 1.0


class Screen(AbstractContextManager["Screen"]):
    """Progress on stderr, results on stdout. Close it (or use it as a context manager) so a live line is released."""

    def __init__(
        self,
        *,
        progress: TextIO | None = None,
        results: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress or sys.stderr
        self._results = results or sys.stdout
        self._clock = clock
        self._live: Live | None = None
        self._held = ""
        self._printed = float("-inf")
        self._said = self._noted = clock()
        self._last = ""
        self._shown = ""
        self._paces: dict[str, Pace] = {}
        self._lock = threading.RLock()

    def stage(self, name: str, detail: str = "") -> None:
        """A stage begins; `detail` describes it in a few words. Its first step is shown at once."""
        self._paces.clear()
        self._printed = float("-inf")
        self.note(f"{name}: {detail}" if detail else name)

    def step(self, stage: str, step: int, total: int, metrics: Metrics, expected: int | None = None) -> None:
        """One step is done: `step` of `total` in this stage. expected: after how many it will probably end."""
        began = self._clock() - metrics.get("step/seconds", 0.0)
        left = self._left(stage, step, expected or total, first=step - 1, began=began)
        self._show(step_line(stage, step, total, metrics) + left, last=step >= total)

    def attempted(self, name: str, done: int, total: int, right: float) -> None:
        """Progress of an evaluation: `done` of `total` problems are attempted, this share of their attempts is
        right (nan: none of them is judged)."""
        left = self._left(name, done, total, first=0, began=self._said)
        found = "none judged" if isnan(right) else f"right {share(right)}"
        self._show(f"{name} {done}/{total} problems  {found}{left}", last=done >= total)

    def counted(self, name: str, done: int, total: int, of: str) -> None:
        """Progress of other work, `done` of `total`; a step line or a note will follow. of: the items counted."""
        left = self._left(name, done, total, first=done - 1, began=self._said)
        self._show(f"{name} {done}/{total} {of}{left}", last=False, seconds=SILENT_SECONDS)

    @contextmanager
    def never_silent(self, doing: Callable[[], str]) -> Iterator[None]:
        """While the context lasts, show what is under way: on a terminal below the live line, in a log when nothing was
        said for SILENT_SECONDS. `doing` is called by a thread; an empty text shows nothing."""
        over = threading.Event()
        thread = threading.Thread(target=self._look_on, args=(over, doing), name="screen", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def working(self) -> str:
        """For `never_silent`, if only the last output is known."""
        return f"working for {self._clock() - self._noted:.0f} s" + (f" since: {self._last}" if self._last else "")

    def look(self, doing: Callable[[], str]) -> None:
        """Show the current work, if it is due."""
        with self._lock:
            text = doing()
            if text and is_live(self._progress):
                self._show_live("\n".join(filter(None, (self._shown, text))))
            elif text and self._clock() - self._said >= SILENT_SECONDS:
                self._tell(text)

    def note(self, sentence: str) -> None:
        """Show a message for the user, above the live line."""
        with self._lock:
            self._last, self._noted = sentence, self._clock()
            self._tell(shortened(with_pages(sentence)))

    def _tell(self, sentence: str) -> None:
        sentence = visible(sentence)
        with self._lock:
            if self._live:
                self._live.console.print(sentence, markup=False, highlight=False)
            else:
                self._release()
                print(sentence, file=self._progress, flush=True)
            self._said = self._clock()

    def summary(self, shown: Mapping[str, Any]) -> None:
        """The summary of a run; `shown`: the result of `record.show.show_run`."""
        self.close()
        summary, transcripts = shown["summary"], shown.get("transcripts") or {}
        if shown.get("state", "finished") != "finished":
            self._print(f"{shown['name']} {_stands(shown)}")
        self._compared(shown["name"], summary)
        if shown.get("evals"):
            self.evaluations(shown["evals"])
        for change in shown.get("changes", ()):
            self._print(changed_setting(change))
        for stage in shown.get("stages", ()):
            if stage.get("ended"):
                most = plural(stage["steps"], "step")
                self._print(f"{stage['name']} ended after {stage['done']} of at most {most}: {stage['ended']}")
        for warning in shown.get("warnings", ()):
            self._print(f"warning at step {warning['step']}: {warning['evidence']}; {warning['action']}")
        if seconds := summary.get("cpu_seconds"):
            phases = "  ".join(f"{phase} {value:.1f}" for phase, value in seconds.items())
            self._print(f"CPU seconds: {phases}  (total {sum(seconds.values()):.1f})")
        for when in ("before", "after"):
            if transcripts.get(when):
                self._print(f"\none attempt {when}:", transcript(transcripts[when]))

    def _compared(self, name: str, summary: Mapping[str, Any]) -> None:
        """Before against after, of what is evaluated: without held-out problems that is benchmarks alone."""
        rows = ((text, form, [summary.get(f"{key}_{w}") for w in ("before", "after")]) for text, key, form in COMPARED)
        found = [row for row in rows if row[2] != [None, None]]
        if not found and not any(summary.get("benchmarks", ())):
            return
        table = _table("", "before", "after")
        for label, form, figures in found:
            table.add_row(label, *(_whole_figure(figure, form) for figure in figures))
        for row in summary.get("benchmarks", ()):
            points = [row[when] for when in ("before", "after")]
            label = f"{row['name']}, steps {points[0]['step']} and {points[1]['step']}"
            table.add_row(label, *(_whole_figure(point["accuracy"], percent) for point in points))
        caption = "sampled: drawn as in training; greedy: always the most likely token; in brackets: 95% interval"
        self._print(f"\n{name}: before and after", caption, table)

    def figures(self, result: Mapping[str, Any]) -> None:
        """An evaluation: one row per number; `{value, interval, n}` with its interval and with the attempts that are
        missing in it, lists and texts left out."""
        self.close()
        table = _table("", "value", "95% interval", "n")
        for name, value in result.items():
            if _is_number(value) or (isinstance(value, Mapping) and _is_number(value.get("value"))):
                of_shares = percent if any(word in name for word in SHARES) else plain_number
                form = str if isinstance(value, int) else of_shares
                label, interval = LABELS.get(name, name.replace("_", " ")), _interval(value, form).strip(" ()")
                if name.startswith("reward/parts/"):  # a number of any scale, under its own name
                    form, label = "{:.3g}".format, name
                table.add_row(label, _value(value, form), interval, _n(value))
        self._print(table)

    def evaluations(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """A list of evaluations (`record.evaluations.row_of`), a row a name: of one that was made after several steps
        the last, and the steps of the newest before it."""
        named: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            named.setdefault(row["evaluation"].partition("@")[0], []).append(row)
        table = _table("evaluation", "right answers", "problems", "also at")
        for *earlier, row in named.values():
            more = f"{len(earlier) - NAMED} more, " if len(earlier) > NAMED else ""
            also = ", ".join(f"@{one['evaluation'].partition('@')[2]}" for one in earlier[-NAMED:])
            figure = row.get("accuracy")
            shown = visible(f"cannot be read: {row['broken']}") if "broken" in row else _whole_figure(figure, percent)
            problems = figure.get("n") if isinstance(figure, Mapping) else None
            table.add_row(visible(row["evaluation"]), shown, f"{problems or ''}", more + also)
        self._print(table)

    def runs(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """A list of runs, each as `show_or_broken` returns it."""
        swept = any(row.get("sweep") for row in rows)
        table = _table("run", *(["sweep"] if swept else []), "started", "state", "steps", "accuracy before", "after")
        for row in rows:
            if "broken" in row:
                table.add_row(visible(row["name"]), *([""] if swept else []), "", "broken")
                continue
            done, steps = (sum(stage[key] for stage in row["stages"]) for key in ("done", "steps"))
            of = f"{done}" if row["finished"] else f"{done}/{steps}"  # a stage may end early by its rule
            accuracies = [_value(row["summary"].get(f"accuracy_{when}"), percent) for when in ("before", "after")]
            started = (row["started"] or "")[:16].replace("T", " ")
            of_sweep = [row["sweep"] or ""] if swept else []
            table.add_row(visible(row["name"]), *of_sweep, started, row["state"], of, *accuracies)
        self._print(table)
        for row in rows:
            if "broken" in row:
                self._print(f"{row['name']} cannot be read: {row['broken']}")
            elif row["reason"]:
                self._print(f"{row['name']} {_stands(row)}")

    def sweep(self, found: Mapping[str, Any]) -> None:
        """The runs of a sweep by settings, as `analysis.sweep.came_to` returns them."""
        table = _table(found["sweep"], "finished", "figure", "mean", "range", "95% interval")
        table.columns[2].justify = "left"
        for row in found["settings"]:
            name = ", ".join(f"{key} = {value}" for key, value in row["settings"].items()) or "all runs"
            finished = f"{row['finished']} of {len(row['runs'])}"
            for figure in row["figures"] or [None]:
                table.add_row(visible(name), finished, *_over_runs(figure))
                name = finished = ""
        self._print(table, "over runs, which differ in their seeds; gain: after less before")

    def close(self) -> None:
        """Leave the last progress line standing and give the terminal back."""
        with self._lock:
            self._release()
            self._shown = ""
            if self._live:
                self._live.stop()
                self._live = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _left(self, name: str, done: int, total: int, *, first: int, began: float) -> str:
        """The remaining time as text. first: items that were done when it began."""
        now = self._clock()
        pace = self._paces.setdefault(name, Pace(first, began))
        pace.seen(done, now)
        if done >= total:
            del self._paces[name]
        return time_left(pace.left(total, now))

    def _look_on(self, over: threading.Event, doing: Callable[[], str]) -> None:
        """Thread `screen`: waits for nothing but time."""
        while not over.wait(LOOK_SECONDS):
            self.look(doing)

    def _show(self, line: str, *, last: bool, seconds: float = LINE_SECONDS) -> None:
        """seconds: how long a log must have been silent; before that the line is delayed or dropped."""
        with self._lock:
            if is_live(self._progress):
                self._shown = line
                self._show_live(line)
                if last:
                    self.close()
                return
            quiet = self._clock() - max(self._printed, self._said if seconds > LINE_SECONDS else float("-inf"))
            if seconds > LINE_SECONDS and quiet < seconds:
                return  # what follows says more
            self._held = line
            if last or quiet >= seconds:
                self._release()

    def _release(self) -> None:
        """Print the delayed line, if there is one."""
        if self._held:
            self._printed = self._said = self._clock()
            print(self._held, file=self._progress, flush=True)
            self._held = ""

    def _show_live(self, line: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            self._live = Live(console=Console(file=self._progress), auto_refresh=False)
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _print(self, *parts: Any) -> None:
        from rich.console import Console

        width = None if self._results.isatty() else PIPE_COLUMNS
        console = Console(file=self._results, highlight=False, markup=False, width=width)
        console.width = max(console.width, LEAST_COLUMNS)
        for part in parts:
            is_text = isinstance(part, str)
            console.print(visible(part) if is_text else part, soft_wrap=is_text)  # a transcript keeps its lines


def is_live(stream: TextIO) -> bool:
    """Whether a line may be redrawn there: on a terminal that can, and not in CI, which keeps a log."""
    return stream.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


def changed_setting(change: Metrics) -> str:
    """A setting that holds from a step of the run on."""
    if change["was"] is None and change["setting"].count(".") == 1:
        return f"after step {change['step']}: {change['setting']} was added ({change['now']})"
    was, now = (json.dumps(change[key]) for key in ("was", "now"))
    return f"after step {change['step']}: {change['setting']} = {now} (before it {was})"


# The step line


def plural(number: int, noun: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


Form = Callable[[float], str]
percent: Form = "{:.1%}".format
round_percent: Form = "{:.0%}".format
plain_number: Form = "{:.1f}".format
whole: Form = "{:.0f}".format
seconds: Form = "{:.1f}s".format


def share(value: float, digits: int = 2) -> str:
    """`.41`: short, and seen to be a share; a value past a billion by its power of ten."""
    if abs(value) >= 1e9:
        return f"{value:.4g}"
    return re.sub(r"^(-?)0\.", r"\1.", f"{value:.{digits}f}")


score: Form = partial(share, digits=3)


def small(value: float) -> str:
    """`1e-6`: one digit and a power of ten."""
    mantissa, _, power = f"{value:.0e}".partition("e")
    return f"{mantissa}e{int(power)}" if value else "0"


STEP_LINE: tuple[tuple[str, str, Form], ...] = (
    ("  loss {}", "loss", score),
    ("  reward {}", "reward/mean", score),
    ("  pass {}", "pass/mean", share),
    ("  kept {}", "roc/kept", whole),
    ("/{}", "roc/attempts", whole),
    (" refilled {}", "refill/groups", whole),
    ("  calls {}", "tool/calls", plain_number),
    (" err {}", "tool/error_rate", round_percent),
    ("  tokens {}", "len/tokens", whole),
    (" cut {}", "len/truncated", round_percent),
    ("  entropy {}", "policy/entropy", share),
    ("  gap {}", "policy/logprob_gap", small),
    ("  {} tokens/s", "step/tokens_per_second", whole),
    ("  trainer {}", "step/trainer_cpu_seconds", seconds),
    (" sandbox {}", "cpu/sandbox", seconds),
)
"""What the step line shows, in this order: text, metric, form. A metric that a step does not have is left out."""


def step_line(stage: str, step: int, total: int, metrics: Metrics) -> str:
    """`stage1 step 12/20  reward .413  pass .41  kept 96/192  calls 1.2 err 9%  ...`, always in this order."""
    shown = (text.format(form(metrics[key])) for text, key, form in STEP_LINE if _is_number(metrics.get(key)))
    return f"{stage} step {step}/{total}" + "".join(shown)


# Tables


COMPARED: tuple[tuple[str, str, Form], ...] = (
    ("right answers, sampled", "accuracy", percent),
    ("right answers, greedy", "greedy", percent),
    ("tool errors in right attempts", "tool_error_share_in_correct", percent),
    ("attempts without the tool", "no_tool_share", percent),
    ("tokens per attempt", "tokens", plain_number),
)
"""Rows of the last table: label, key of `summary` before `_before` and `_after`, form."""

LABELS = {
    "failed_call_share": "calls that failed",
    "failed_call_share_in_correct": "calls of right attempts that failed",
    "tool_error_share_in_correct": "right attempts with a failed call",
    "no_tool_share": "attempts without a call",
    "truncation_share": "attempts cut by the token limit",
    "out_of_turns_share": "attempts cut by the turn limit",
    "agent_failed_share": "attempts whose agent failed",
    "no_room_share": "attempts whose prompt fills the model",
}
"""Figures of an evaluation whose names do not say of what they are shares."""
SHARES = ("accuracy", "greedy", "share", "avg", "pass", "maj", "rate")


def transcript(attempt: str | Mapping[str, Any]) -> str:
    """A transcript for the screen: the question, the text, the verdict; long ones cut in the middle."""
    if isinstance(attempt, str):
        return _cut(attempt)
    parts = [attempt.get("question"), _cut(str(attempt.get("text", ""))), attempt.get("verdict")]
    return "\n".join(f"[{part}]" if part is parts[2] else str(part) for part in parts if part)


def _cut(text: str) -> str:
    most = TRANSCRIPT_COLUMNS
    lines = [line if len(line) <= most else f"{line[: most - 1]}…" for line in text.strip().splitlines()]
    if len(lines) <= TRANSCRIPT_LINES:
        return "\n".join(lines)
    half = TRANSCRIPT_LINES // 2
    return "\n".join([*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]])


def _table(first: str, *others: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _over_runs(figure: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Cells of one figure of a sweep."""
    if figure is None:
        return ("-",) * 4
    label, form = next((label, form) for label, key, form in COMPARED if key == figure["figure"])
    low, high = map(form, figure["range"])
    interval = f"{form(figure['interval'][0])} to {form(figure['interval'][1])}" if figure["interval"] else "-"
    return f"{figure['evaluation']}: {label}", form(figure["mean"]), f"{low} to {high}", interval


def _stands(run: Mapping[str, Any]) -> str:
    """The state of a run that is not finished, to follow its name."""
    steps = plural(run["step"], "step")
    if run["state"] == "running":
        return f"is running and has made {steps}"
    return f"{run['state']} after {steps}" + (f": {run['reason']}" if run["reason"] else "")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value(figure: Any, form: Form) -> str:
    """A number or the `value` of a figure; a dash if it is missing."""
    value = figure.get("value") if isinstance(figure, Mapping) else figure
    return form(value) if _is_number(value) else "-"


def _n(figure: Any) -> str:
    """A figure's number of problems, how many attempts it excludes, and how many of its attempts are undecided."""
    if not isinstance(figure, Mapping):
        return ""
    missing = figure.get("missing")
    return f"{figure.get('n', '')}" + (f", {plural(missing, 'attempt')} missing" if missing else "") + _open(figure)


def _whole_figure(figure: Any, form: Form) -> str:
    return f"{_value(figure, form)}{_interval(figure, form)}{_open(figure)}"


def _open(figure: Any) -> str:
    share = figure.get("undecided") if isinstance(figure, Mapping) else None
    return f", {percent(share)} undecided" if share else ""


def _interval(figure: Any, form: Form) -> str:
    interval = figure.get("interval") if isinstance(figure, Mapping) else None
    return " ({} to {})".format(*(form(bound).rstrip("%") for bound in interval)) if interval else ""
