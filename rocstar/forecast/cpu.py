"""What a run takes on a machine like this one, worked out from what its parts took in a trial (trial.py); no I/O.

Attempts go through rocstar's simulator with the costs that were fitted to the trial; all else grows with its rows and
tokens. What a policy will write is not known: attempts are as long as demonstrations are at first, and as those that
are right at the end of RL; on the way their share grows step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from statistics import fmean
from typing import TypeVar

from rocstar.config.sections import Recipe, RlStage, SftStage, StageRolloutSection
from rocstar.forecast.carry import step_seconds
from rocstar.forecast.engine_model import EngineModel
from rocstar.forecast.simulate import alike
from rocstar.forecast.workload import PlannedAttempt, TurnLengths

T = TypeVar("T")
RUN, STARTED = "the run", "what it starts"
"""Processes whose memory is planned: the run's own, in which an engine may be; and sandbox, graders, other engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds that grow with an amount of work."""

    fixed: float
    each: float

    def of(self, amount: float) -> float:
        return self.fixed + self.each * amount


def cost_of(points: Sequence[tuple[float, float]]) -> Cost:
    """Through the first and the last of (amount, seconds); nothing is fixed where there is one, or where they say less
    than nothing."""
    (few, less), (many, more) = points[0], points[-1]
    each = (more - less) / (many - few) if many > few else 0.0
    fixed = more - each * many
    return Cost(fixed=fixed, each=each) if each > 0 and fixed >= 0 else Cost(fixed=0.0, each=more / many)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the parts took. Seconds are of the machine's clock, or of CPU where the trial was told so."""

    first: Sequence[PlannedAttempt]
    """What attempts look like before RL, uncut."""
    last: Sequence[PlannedAttempt]
    """What attempts look like after RL, uncut."""
    model: EngineModel
    engines: int
    spread: float
    """What the fit of the engine's costs leaves: root of the mean squared relative error of the attempts' ends."""
    judging: float
    """Seconds for an attempt of an evaluation, beyond making it."""
    learning: Mapping[str, Cost]
    """By RL stage: seconds of a step beyond its attempts, over the tokens of the attempts that are kept."""
    saving: float
    """Seconds for a checkpoint."""
    overlaps: bool
    """Attempts are made beside learning, on other cores."""
    started: float
    """Bytes that sandbox, graders and other engines hold between programs."""
    start: float = 0.0
    """Seconds from the start of the process to the first stage, without demonstrations."""
    made: int = 0
    """Demonstrations in the trial."""
    demonstration: float = 0.0
    """Seconds of making one."""
    sft: Mapping[str, float] = field(default_factory=dict)
    """By SFT stage: seconds of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One part of the run, in its order."""

    name: str
    steps: int = 0
    """0 where it has none."""
    tokens: float = 0.0
    """Learnt from or written in a step."""
    rollout_seconds: float = 0.0
    """Seconds of a step for its attempts."""
    learning_seconds: float = 0.0
    """Seconds of a step for all else."""
    seconds: float
    """Seconds of the whole phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPlan:
    phases: Sequence[Phase]
    memory: Mapping[str, float]
    """By process, bytes: the run's peak (`rocstar.parts.memory`), and what the others hold between programs."""
    spread: float
    """See Measured."""

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)


def plan_cpu(recipe: Recipe, measured: Measured, *, heldout: int, pools: Mapping[str, int], memory: float) -> CpuPlan:
    """heldout: problems of an evaluation. pools: problems by RL stage. memory: of the run's process, bytes."""
    rows = demonstrations(recipe)
    measured_under = recipe.rollouts[-1]  # before and after alike
    phases = [Phase(name="start", seconds=measured.start + rows * measured.demonstration)]
    for place, stage in enumerate(recipe.stage):
        if isinstance(stage, SftStage):
            each = measured.sft[stage.name]
            phases.append(Phase(name=stage.name, steps=stage.steps, learning_seconds=each, seconds=stage.steps * each))
            continue
        if not any(isinstance(earlier, RlStage) for earlier in recipe.stage[:place]):
            phases.append(_evaluation(recipe, measured, measured_under, heldout, measured.first, "before"))
        phases += _rl(recipe, stage, measured, heldout, pools[stage.name])
    reinforced = any(isinstance(stage, RlStage) for stage in recipe.stage)
    lengths = measured.last if reinforced else measured.first
    phases.append(_evaluation(recipe, measured, measured_under, heldout, lengths, "after"))
    phases.append(_saving(recipe, measured.saving, sum(phase.seconds for phase in phases)))
    return CpuPlan(phases=phases, memory={RUN: memory, STARTED: measured.started}, spread=measured.spread)


def demonstrations(recipe: Recipe) -> int:
    """How many demonstrations a task makes for all SFT stages; stages with a rows file need none."""
    made = [stage for stage in recipe.stage if isinstance(stage, SftStage) and stage.sft.rows_file is None]
    return sum(stage.steps * stage.sft.batch_rows for stage in made)


def within(attempts: Sequence[PlannedAttempt], rollout: StageRolloutSection) -> list[PlannedAttempt]:
    """Cut by these limits, as an environment would."""
    return [_cut(attempt, rollout.max_response_tokens, rollout.max_turns) for attempt in attempts]


def drawn(first: Sequence[T], last: Sequence[T], *, share: float) -> list[T]:
    """As many as both have, this share of them of the last, evenly spread."""
    kinds = cycle(first), cycle(last)
    return [next(kinds[int((n + 1) * share) > int(n * share)]) for n in range(len(first) + len(last))]


def workload(lengths: Sequence[PlannedAttempt], groups: int, attempts: int) -> list[PlannedAttempt]:
    """Attempts in groups that share their prompt, as long as `lengths` in turn."""
    drawn = list(islice(cycle(lengths), groups * attempts))
    return [
        replace(attempt, group=str(place // attempts), prompt_tokens=drawn[place - place % attempts].prompt_tokens)
        for place, attempt in enumerate(drawn)
    ]


def _cut(attempt: PlannedAttempt, cap: int, most: int) -> PlannedAttempt:
    left = cap
    turns: list[TurnLengths] = []
    for turn in attempt.turns[:most]:
        sampled = min(turn.sampled_tokens, left)
        left -= sampled
        ends = len(turns) + 1 == min(most, len(attempt.turns)) or left <= turn.reply_tokens
        turns.append(TurnLengths(sampled, 0, 0.0) if ends else turn)
        if ends:
            break
        left -= turn.reply_tokens
    return replace(attempt, turns=tuple(turns), limit=cap)


def _made(measured: Measured, work: Sequence[PlannedAttempt], carry_over: float = 0.0) -> float:
    """Seconds of these attempts, all at once."""
    return step_seconds(work, carry_over, alike(measured.model, measured.engines)) if work else 0.0


def _rl(recipe: Recipe, stage: RlStage, measured: Measured, heldout: int, pool: int) -> Iterator[Phase]:
    rollout, attempts = stage.rollout, stage.rollout.attempts_per_problem
    lengths = drawn(measured.first, measured.last, share=_share(recipe, stage))
    pool = min(pool, stage.data.drop_solved_problems or pool)
    problems = min(rollout.problems_per_step, pool)
    if (tried := stage.data.drop_solved_attempts) is not None:
        at_once = max(1, rollout.problems_per_step * attempts // tried)
        batch = workload(within(lengths, rollout), min(at_once, pool), tried)
        yield Phase(name=f"{stage.name}: pool", seconds=_made(measured, batch) * max(1.0, pool / at_once))
    work = workload(within(lengths, rollout), problems, attempts)
    kept = problems * (attempts if stage.resample.method == "all" else stage.resample.keep)
    tokens = fmean(attempt.response_tokens for attempt in work)
    making, learning = _made(measured, work, rollout.carry_over), measured.learning[stage.name].of(kept * tokens)
    together = max(making, learning) if rollout.max_staleness_steps and measured.overlaps else making + learning
    yield Phase(
        name=stage.name,
        steps=stage.steps,
        tokens=len(work) * tokens,
        rollout_seconds=making,
        learning_seconds=learning,
        seconds=stage.steps * together,
    )
    if (every := recipe.evaluate.every_steps) and (times := (stage.steps - (stage is recipe.stage[-1])) // every):
        one = _evaluation(recipe, measured, rollout, heldout, lengths, f"{stage.name}: evaluations")
        yield replace(one, seconds=times * one.seconds)


def _share(recipe: Recipe, stage: RlStage) -> float:
    """Share of RL's steps that are done in the middle of the stage."""
    steps = [(each.name, each.steps) for each in recipe.stage if isinstance(each, RlStage)]
    before = sum(count for _, count in steps[: [name for name, _ in steps].index(stage.name)])
    return (before + stage.steps / 2) / sum(count for _, count in steps)


def _evaluation(
    recipe: Recipe,
    measured: Measured,
    rollout: StageRolloutSection,
    heldout: int,
    lengths: Sequence[PlannedAttempt],
    name: str,
) -> Phase:
    """The sampled attempts at all problems, then the greedy ones."""
    parts = [recipe.evaluate.attempts, *([1] if recipe.evaluate.greedy else [])]
    work = [workload(within(lengths, rollout), heldout, attempts) for attempts in parts]
    return Phase(name=name, seconds=sum(_made(measured, part) + len(part) * measured.judging for part in work))


def _saving(recipe: Recipe, one: float, seconds: float) -> Phase:
    """Checkpoints at stages' ends and by time."""
    apart = max(recipe.run.checkpoint_seconds, one / max(recipe.run.checkpoint_cost, 1e-9))
    return Phase(name="checkpoints", seconds=one * (len(recipe.stage) + seconds / apart))
