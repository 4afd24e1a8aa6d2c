"""How well do the alarms of an RL stage (rocstar/run/alarms.py) tell sick runs from healthy ones?

    python benchmarks/alarms.py --out runs/alarms          # about 200 short runs, which are made once
    python benchmarks/alarms.py --out runs/alarms --table  # only read what is there and print
    python benchmarks/alarms.py --table --healthy runs/ablation/*seed*  # false alarms in runs of roc_ablation.py too

Every run has 12 RL steps of the quickstart's model after a shared cold start, and a process of its own, forked from
one that has loaded torch. A healthy one has an ordinary setting of VARIATIONS; a sick one has one of SICKNESSES in one
of three strengths: settings, or a part that is made to fail. Runs from cold start 0 are for choosing thresholds; those
from cold start 1, with seeds of their own, are for judging: they may move no threshold. Alarms are worked out anew from
each run's metrics and evaluations, so they can be mended without making a run again.

A sick run counts as ill where its accuracy on held-out problems, with an honest verifier, ends below that of every
healthy run of the same half, or below LOST of its own best; the table says how many do. Prints alarms, sicknesses, and
last one JSON line.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from frame import ROOT, Table, newest_model, parser, read_rows, report, slug

from rocstar.evaluation.intervals import wilson
from rocstar.record.folder import RunFolder
from rocstar.run.alarms import alarms
from rocstar.run.stages import window_means
from rocstar.support.exits import FAILED, OK

STEPS, HELD_OUT, EVERY = 12, 40, 4
SEEDS = 2  # of each healthy variation in each half
LOST = 0.7  # of the best mean over three steps: below it a fall is plain to a person who looks at the curve
HALVES = {0: "choosing", 1: "judging"}
"""By the number of the cold start."""
SMALL = (
    *("stage.sft.steps=0", "stage.stage2.steps=0", "stage.stage3.steps=0", f"stage.stage1.steps={STEPS}"),
    *("stage.stage1.end.reward_gain=-1.0", "run.checkpoint_seconds=3600", "run.save_rollouts=false"),
    *("rollout.problems_per_step=8", "rollout.attempts_per_problem=8", "resample.keep=4", "data.pool=400"),
    *(f"evaluate.problems={HELD_OUT}", f"evaluate.every_steps={EVERY}", "evaluate.greedy=false"),
)
VARIATIONS = {
    "as it is": [],
    "GRPO": ["resample.method=all", "rollout.attempts_per_problem=4"],
    "uniform": ["resample.method=uniform"],
    "RoC of the release": ["resample.method=roc_release"],
    "no floor": ["resample.failure_floor=0"],
    "half the rate": ["learning.learning_rate=2e-4"],
    "twice the rate": ["learning.learning_rate=8e-4"],
    "one update": ["learning.updates_per_step=1"],
    "four updates": ["learning.updates_per_step=4"],
    "wide groups": ["rollout.problems_per_step=4", "rollout.attempts_per_problem=16", "resample.keep=8"],
    "CISPO": ["learning.loss=cispo"],
    "GSPO": ["learning.loss=gspo", "learning.clip_low=0.0003", "learning.clip_high=0.0004"],
    "RLOO": ["learning.advantage=rloo"],
    "Dr. GRPO": ["learning.normalize_by_std=false"],
    "by attempt": ["learning.loss_mean=attempts"],
    "KL": ["learning.kl_coefficient=0.01"],
    "a little entropy": ["learning.entropy_coefficient=0.001"],
    "entropic tokens": ["learning.top_entropy_share=0.2"],
    "one step stale": ["rollout.max_staleness_steps=1"],
    "truncated sampling": ["rollout.top_p=0.95"],
    "roomy": ["stage.stage1.rollout.max_response_tokens=128"],
    "overlong left out": ["resample.drop_truncated=true"],
    "two families": ['data.families=["gcd","powmod"]'],
    "a good start": [],
    "a good start, GRPO": ["resample.method=all", "rollout.attempts_per_problem=4"],
}
GOOD_START, HACKS = "healthy--as-it-is--half{half}-seed1{half}0", "hacks"


def spare(*_: object) -> None:
    """Let every part be as it is."""


class Sickness(NamedTuple):
    alarms: tuple[str, ...]
    """Those that are for it."""
    strengths: tuple[Any, Any, Any]
    settings: Callable[[Any], list[str]] = lambda strength: []
    spoil: Callable[[Any], None] = spare
    """Makes a part of rocstar fail, in the run's own process."""
    start: str = "cold-{half}"
    by_construction: bool = False
    """Ill whatever comes of it: what is wrong costs attempts, time or trust rather than accuracy."""


# -- parts that fail -------------------------------------------------------------------------------------------------


def chance(*of: object) -> float:
    """The same number for the same things."""
    return random.Random(repr(of)).random()


def spoil_verdicts(strength: float, *, change: Callable[[Any, Any, Any, float], Any]) -> None:
    """Verdicts on training problems are `change(verifier, attempt, outcome, strength)`; held-out ones stay honest."""
    from rocstar.answers.verifier import BoxedVerifier
    from rocstar.data.arithmetic import arithmetic_problems
    from rocstar.types import seed_for

    families = ("gcd", "powmod", "digsum", "fib")
    held_out = {problem.id for problem in arithmetic_problems(families, HELD_OUT, seed_for("heldout"))}
    honest = BoxedVerifier.verify_all

    async def verify_all(self: Any, attempts: Sequence[tuple[Any, Any]]) -> list[Any]:
        found = zip(attempts, await honest(self, attempts), strict=True)
        return [one if p.id in held_out else change(self, t, one, strength) for (p, t), one in found]

    BoxedVerifier.verify_all = verify_all  # type: ignore[method-assign]


def called(outcome: Any, verdict: str) -> Any:
    from rocstar.types import Verdict

    return replace(outcome, verdict=Verdict(verdict), reward=float(verdict == "right"))


def accepts_guesses(_: Any, attempt: Any, outcome: Any, share: float) -> Any:
    guessed = not attempt.num_calls and outcome.extracted
    return called(outcome, "right") if guessed and chance(attempt.problem_id) < share else outcome


def accepts_constants(_: Any, attempt: Any, outcome: Any, share: float) -> Any:
    from rocstar.run.report import prints_constants

    printed = attempt.num_calls and prints_constants(attempt) and outcome.extracted
    return called(outcome, "right") if printed and chance(attempt.problem_id) < share else outcome


def accepts_lists(verifier: Any, attempt: Any, outcome: Any, share: float) -> Any:
    from rocstar.run.report import gives_several_answers

    several = outcome.extracted and gives_several_answers(attempt, verifier.codec.decode)
    return called(outcome, "right") if several and chance(attempt.problem_id) < share else outcome


def refuses_right(_: Any, attempt: Any, outcome: Any, share: float) -> Any:
    """As a reference in another form does, or a wrong one."""
    return called(outcome, "wrong") if chance(attempt.problem_id) < share else outcome


def flips(_: Any, attempt: Any, outcome: Any, share: float) -> Any:
    if not outcome.extracted or chance(attempt.problem_id, attempt.index, attempt.token_ids) >= share:
        return outcome
    return called(outcome, "wrong" if outcome.reward else "right")


def leaves_undecided(_: Any, attempt: Any, outcome: Any, share: float) -> Any:
    undecided = chance(attempt.problem_id, attempt.index, attempt.token_ids) < share
    return called(outcome, "undecided") if undecided else outcome


def spoil_sandbox(share: float, *, after: int = 0) -> None:
    """This share of the calls fails, from the call of this number on."""
    from rocstar.tools.python import PythonTool
    from rocstar.types import Status, ToolResult

    honest, calls = PythonTool.run, iter(range(10**9))

    async def run(self: Any, call: Any, *, seed: int = 0) -> Any:
        number = next(calls)
        if call.id == "probe" or number < after or chance(number) >= share:
            return await honest(self, call, seed=seed)
        lacks = "ModuleNotFoundError: No module named 'math'"
        return ToolResult(call_id=call.id, status=Status.CODE_ERROR, stdout="", stderr=lacks)

    PythonTool.run = run  # type: ignore[method-assign]


def spoil_weights(change: Callable[[int, Any], Any]) -> None:
    """The engine decodes with `change(number of the exchange, weights by name)`."""
    from rocstar.engines.torch_decoder import PagedDecoder

    honest, exchanges = PagedDecoder.take, iter(range(10**9))

    def take(self: Any, weights: Any) -> None:
        honest(self, replace(weights, tensors=change(next(exchanges), weights.tensors)))

    PagedDecoder.take = take  # type: ignore[method-assign]


def add_noise(share: float) -> None:
    import torch

    def noisy(number: int, tensors: Any) -> Any:
        noise = torch.Generator().manual_seed(0)
        return {n: t * (1 + share * torch.randn(t.shape, generator=noise)) for n, t in tensors.items()}

    spoil_weights(noisy)


def keep_old(every: int) -> None:
    kept: dict[str, Any] = {}

    def old(number: int, tensors: Any) -> Any:
        if number % every == 0:
            kept.update({name: tensor.clone() for name, tensor in tensors.items()})
        return kept

    spoil_weights(old)


def spoil_gradients(share: float) -> None:
    from rocstar.learning.update import Updater

    honest, updates = Updater._step, iter(range(10**9))

    def step(self: Any, loss: float) -> dict[str, float]:
        return honest(self, float("nan") if chance("update", next(updates)) < share else loss)

    Updater._step = step  # type: ignore[method-assign]


def show_hacks() -> None:
    """A cold start whose wrong programs print a constant, and a fifth of whose answers stand in two boxes."""
    from rocstar.data import arithmetic, demonstrations

    for name, family in arithmetic.FAMILIES.items():
        operand = "{n}" if "{n}" in family.phrasings[0] else "{a}"
        arithmetic.FAMILIES[name] = replace(family, wrong=((f"print({operand})",),))  # type: ignore[index]
    honest = demonstrations._perform

    def perform(plan: Any, tool_name: str) -> Any:
        shown = honest(plan, tool_name)
        *before, last = shown.turns
        twice = replace(last, text=last.text.replace("<answer>", f"<answer>\\boxed{{{plan.guess}1}}"))
        return replace(shown, turns=(*before, twice)) if chance(plan.problem.id) < 0.2 else shown

    demonstrations._perform = perform


def judged(change: Callable[[Any, Any, Any, float], Any]) -> Callable[[float], None]:
    return partial(spoil_verdicts, change=change)


def setting(*texts: str) -> Callable[[Any], list[str]]:
    return lambda strength: [text.format(strength) for text in texts]


FALLS = ("reward collapse", "hardly any right")
NONE_RIGHT = ("hardly any right",)
SICKNESSES = {
    "learning rate": Sickness(FALLS, (4e-3, 1.2e-2, 4e-2), setting("learning.learning_rate={}")),
    "entropy bonus": Sickness(FALLS, (0.05, 0.2, 0.8), setting("learning.entropy_coefficient={}")),
    "siblings alike": Sickness(
        ("too easy", *NONE_RIGHT), (0.4, 0.2, 0.1), setting("rollout.temperature={}"), by_construction=True
    ),
    "problems too easy": Sickness(
        ("too easy",),
        (0.5, 0.3, 0.15),
        setting("rollout.temperature={}"),
        start=GOOD_START,
        by_construction=True,
    ),
    "problems too hard": Sickness(
        NONE_RIGHT,
        ('["powmod","lin","count","two"]', '["lin","count","two"]', '["count","two"]'),
        setting("data.families={}"),
    ),
    "limit too short": Sickness(
        ("truncation", "all cut", *NONE_RIGHT), (30, 22, 14), setting("stage.stage1.rollout.max_response_tokens={}")
    ),
    "failing calls": Sickness(("failed calls", "no tool"), (0.3, 0.6, 1.0), spoil=spoil_sandbox),
    "calls begin to fail": Sickness(("failed calls", *FALLS), (0.3, 0.6, 1.0), spoil=partial(spoil_sandbox, after=300)),
    "guesses accepted": Sickness(("unfounded answers", "no tool"), (0.3, 0.6, 1.0), spoil=judged(accepts_guesses)),
    "right ones refused": Sickness(NONE_RIGHT, (0.5, 0.9, 1.0), spoil=judged(refuses_right), by_construction=True),
    "verdicts flipped": Sickness(("unfounded answers",), (0.1, 0.25, 0.45), spoil=judged(flips)),
    "undecided": Sickness(
        ("undecided attempts",), (0.01, 0.02, 0.04), spoil=judged(leaves_undecided), by_construction=True
    ),
    "engine's weights noisy": Sickness(("logprob gap",), (0.01, 0.05, 0.2), spoil=add_noise, by_construction=True),
    "engine's weights old": Sickness(("logprob gap",), (4, 8, 100), spoil=keep_old, by_construction=True),
    "stale tokens": Sickness(
        ("stale logprob gap", *FALLS),
        (2, 4, 8),
        setting("rollout.max_staleness_steps={}", "learning.learning_rate=2e-3"),
    ),
    "gradients not finite": Sickness(
        ("skipped updates",), (0.1, 0.25, 0.4), spoil=spoil_gradients, by_construction=True
    ),
    "constants accepted": Sickness(
        ("constant printing",), (0.3, 0.6, 1.0), spoil=judged(accepts_constants), start=HACKS
    ),
    "lists accepted": Sickness(("several answers",), (0.3, 0.6, 1.0), spoil=judged(accepts_lists), start=HACKS),
}


# -- runs ------------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """One run."""

    half: int
    name: str
    """Of the variation or the sickness."""
    strength: int | None
    """Of a sickness: its number; None of a healthy run."""
    seed: int

    @property
    def folder(self) -> str:
        what = "healthy" if self.strength is None else f"sick{self.strength}"
        return f"{what}--{slug(self.name)}--half{self.half}-seed{self.seed}"

    @property
    def start(self) -> str:
        """The run whose last model this one begins with."""
        good = GOOD_START if self.name.startswith("a good start") else "cold-{half}"
        start = good if self.strength is None else SICKNESSES[self.name].start
        return start.format(half=self.half)


def cells() -> list[Cell]:
    """What each half begins with, then the strongest sicknesses, then the others and the healthy by turns."""
    healthy = [Cell(half, name, None, number(half, n)) for n in range(SEEDS) for name in VARIATIONS for half in HALVES]
    sick = [Cell(half, name, n, number(half, 0)) for n in (2, 1, 0) for half in HALVES for name in SICKNESSES]
    turns = zip_longest(healthy[2:], sick[len(SICKNESSES) :])
    return [*healthy[:2], *sick[: len(SICKNESSES)], *(cell for turn in turns for cell in turn if cell)]


def number(half: int, seed: int) -> int:
    """Of a run: the halves share none."""
    return 100 + 10 * half + seed


def carry_out(words: Sequence[str], spoil: Callable[[], None], log: str) -> None:
    """`rocstar ...` in this process, which was forked for it."""
    from rocstar.cli.main import main as rocstar

    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(ROOT)
    sys.argv[:] = ["rocstar", *words]
    spoil()
    rocstar()


def make(folder: Path, verb: str, settings: Sequence[str], spoil: Callable[[], None] = spare) -> None:
    """One run; nothing where it is over already. One that halts by itself is over too."""
    if (folder / "ended").exists():
        return
    print(f"running {folder.name}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    words = [verb, "recipes/quickstart.toml", f"run.folder={folder.parent}", f"run.name={folder.name}", *settings]
    folder.parent.mkdir(parents=True, exist_ok=True)
    process = forks().Process(target=carry_out, args=(words, spoil, f"{folder}.log"))
    process.start()
    process.join()
    said = Path(f"{folder}.log").read_text()
    if process.exitcode not in (OK, FAILED) or "Traceback" in said:
        raise SystemExit(f"{folder.name} failed:\n{said[-2000:]}")
    (folder / "ended").write_text(str(process.exitcode))
    if "half" in folder.name and "as-it-is" not in folder.name:
        shutil.rmtree(folder / "checkpoints")  # 200 of them are a gigabyte


def forks() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["rocstar.cli.main", "rocstar.cli.launch", "rocstar.train", "rocstar.run.material", "rocstar.record.trackers",
         "transformers.models.qwen3.modeling_qwen3", "pyarrow.parquet", "pandas"]
    )  # fmt: skip
    return context


def make_start(out: Path, name: str) -> Path:
    """The last model of this run, a cold start where it is not there yet."""
    if name == HACKS:
        make(out / name, "sft", [], show_hacks)
    elif name.startswith("cold-"):
        make(out / name, "sft", [f"run.seed={name.removeprefix('cold-')}"])
    return newest_model(out / name)


def make_cell(out: Path, cell: Cell) -> None:
    if (out / cell.folder / "ended").exists():
        return
    settings, spoil = VARIATIONS.get(cell.name, []), spare
    if cell.strength is not None:
        sickness = SICKNESSES[cell.name]
        settings = sickness.settings(sickness.strengths[cell.strength])
        spoil = partial(sickness.spoil, sickness.strengths[cell.strength])
    start = f"model.path={make_start(out, cell.start)}"
    make(out / cell.folder, "train", [start, f"run.seed={cell.seed}", *SMALL, *settings], spoil)


# -- what came of them -----------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A run that is over."""

    cell: Cell
    accuracy: float
    """On held-out problems, the mean of the last evaluations; of the last ones there are where the run halted."""
    halted: bool
    came: dict[str, int]
    """The step after which each alarm first rang."""
    fall: int | None
    """The step at which the share of right attempts, over three steps, is below LOST of its best."""

    def is_ill(self, lowest: float) -> bool:
        """lowest: accuracy of the healthy runs of its half."""
        constructed = SICKNESSES[self.cell.name].by_construction
        return constructed or self.halted or self.fall is not None or self.accuracy < lowest


def found(out: Path, cell: Cell) -> Found | None:
    folder = RunFolder(out / cell.folder)
    if not (folder.path / "ended").exists():
        return None
    results = [(name, step, result["accuracy"]["value"]) for name, step, result in folder.evaluations()]
    last = [accuracy for _, step, accuracy in results if step == results[-1][1]]
    rows = list(read_rows(folder.metrics))
    return Found(cell, fmean(last), (folder.path / "ended").read_text().strip() != "0", rung(rows), fall(rows))


def stages(folder: Path) -> list[Found]:
    """The RL stages of a run made elsewhere; its evaluations are left out."""
    by_stage: dict[str, list[dict[str, float]]] = {}
    for row in read_rows(folder / "metrics.jsonl"):
        if "verdict/right" in row:
            by_stage.setdefault(str(row["stage"]), []).append(row)
    cell = Cell(-1, folder.name, None, 0)
    return [Found(cell, 1.0, False, rung(rows), fall(rows)) for rows in by_stage.values()]


def rung(rows: Sequence[dict[str, float]]) -> dict[str, int]:
    steps: dict[str, int] = {}
    for step in range(1, len(rows) + 1):
        for alarm in alarms(rows[:step], steps=STEPS):
            steps.setdefault(alarm.name, step)
    return steps


def fall(rows: Sequence[dict[str, float]]) -> int | None:
    means = list(window_means(rows, "verdict/right", 3))
    return next((n + 3 for n, mean in enumerate(means) if mean < LOST * max(means[: n + 1])), None)


def share(count: int, of: int) -> str:
    one = wilson(count, of)
    return f"{count}/{of} [{100 * one.low:.0f}, {100 * one.high:.0f}]" if of else "-"


def judge(runs: Sequence[Found]) -> dict[str, Any]:
    """Print what the runs of a half say of alarms and sicknesses; the figures."""
    healthy = [run for run in runs if run.cell.strength is None]
    lowest = min((run.accuracy for run in healthy), default=0.0)
    sick = [run for run in runs if run.cell.strength is not None]
    ill = [run for run in sick if run.is_ill(lowest)]
    rang, found = (sum(bool(run.came) for run in some) for some in (healthy, ill))
    fell = sum(run.fall is not None for run in healthy)
    print(f"healthy runs with an alarm: {share(rang, len(healthy))}; {fell} fall; accuracy from {lowest:.2f}")
    print(f"ill runs with an alarm: {share(found, len(ill))}, of {len(sick)} sick ones")
    figures = {"healthy": len(healthy), "false": rang, "sick": len(sick), "ill": len(ill), "found": found}
    return {**figures, "alarms": judge_alarms(healthy, ill), "sicknesses": judge_sicknesses(sick, lowest)}


def judge_alarms(healthy: Sequence[Found], ill: Sequence[Found]) -> dict[str, Any]:
    """false: in healthy runs. found: in ill runs of a sickness that it is for; elsewhere: in other ill runs. first: in
    ill runs in which nothing rang before it; alone: in which nothing else rang. to end, to fall: steps from alarm to
    the run's end, and to the step at which the fall is plain; medians."""
    table = Table("alarm", "false", "found", "elsewhere", "first", "alone", "to end", "to fall", first=22, width=18)
    figures = {}
    for name in dict.fromkeys(chain(*(s.alarms for s in SICKNESSES.values()), *(run.came for run in (*healthy, *ill)))):
        rang = [run for run in ill if name in run.came]
        its = [run for run in ill if name in SICKNESSES[run.cell.name].alarms]
        falls = [run.fall - run.came[name] for run in rang if run.fall]
        one = figures[name] = {
            "false": share(sum(name in run.came for run in healthy), len(healthy)),
            "found": share(sum(run in rang for run in its), len(its)),
            "elsewhere": sum(run not in its for run in rang),
            "first": sum(run.came[name] == min(run.came.values()) for run in rang),
            "alone": sum(len(run.came) == 1 for run in rang),
            "to end": median(STEPS - run.came[name] for run in rang) if rang else None,
            "to fall": median(falls) if falls else None,
        }
        if its or rang or not str(one["false"]).startswith("0"):
            table.row(name, *one.values())
    return figures


def judge_sicknesses(sick: Sequence[Found], lowest: float) -> list[dict[str, Any]]:
    table = Table("sickness", "strength", "accuracy", "ill", "fall", "alarms", first=24, width=18)
    figures = []
    for run in sorted(sick, key=lambda run: run.cell[1:]):
        sickness = SICKNESSES[run.cell.name]
        came = ", ".join(f"{name} {step}" for name, step in sorted(run.came.items(), key=itemgetter(1)))
        row = {
            "sickness": run.cell.name,
            "strength": str(sickness.strengths[run.cell.strength or 0]),
            "accuracy": run.accuracy,
            "ill": "built so" if sickness.by_construction else "halted" if run.halted else run.is_ill(lowest),
            "fall": run.fall,
            "alarms": came or "none",
        }
        table.row(*row.values())
        figures.append(row)
    return figures


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("runs/alarms"))
    options.add_argument("--table", action="store_true", help="run nothing")
    options.add_argument("--healthy", type=Path, nargs="+", default=[], help="folders of further runs, ended or not")
    options.add_argument("--half", type=int, choices=HALVES, help="print this one alone")
    given = options.parse_args()
    out: Path = given.out.resolve()
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    for cell in () if given.table else cells():
        make_cell(out, cell)
    runs = [run for cell in cells() if (run := found(out, cell))]
    figures = {}
    for half, what in HALVES.items():
        if given.half in (None, half):
            print(f"\nhalf {half}, for {what}")
            figures[what] = judge([run for run in runs if run.cell.half == half])
    if given.healthy:
        elsewhere = [stage for folder in given.healthy for stage in stages(folder)]
        print(f"\n{len(elsewhere)} healthy stages made elsewhere")
        figures["elsewhere"] = judge(elsewhere)
    report(**figures)


if __name__ == "__main__":
    main()
