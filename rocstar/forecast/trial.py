"""Measures what the parts of a run take on this machine, in a temporary folder: the recipe's own run is opened
with its engines, sandbox, grader and learner, and each part does a little of its work.

A model that has learned nothing would write till its cap, so attempts write what demonstrations show (GuidedEngine).
Not here: what a whole run takes (cpu.py)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, groupby, zip_longest
from math import nan
from statistics import fmean
from tempfile import TemporaryDirectory

from rocstar.cluster.here import Machines
from rocstar.cluster.start import opened_machines
from rocstar.config.sections import Recipe, RlStage, SftStage, StageRolloutSection
from rocstar.errors import RunHalted
from rocstar.evaluation.evaluate import Protocol, evaluate_policy
from rocstar.forecast.cpu import Cost, CpuPlan, Measured, cost_of, demonstrations, drawn, plan_cpu
from rocstar.forecast.fit import Trial, fit
from rocstar.forecast.replay import engine_of
from rocstar.forecast.simulate import alike, simulate
from rocstar.forecast.workload import PlannedAttempt, planned
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.sft import SftLearner
from rocstar.parts.lengths import prompt_tokens
from rocstar.parts.threads import begin_threads
from rocstar.protocols import Engine, ForwardingEngine
from rocstar.record.folder import RunFolder
from rocstar.rollout.carry import RolledStep
from rocstar.rollout.collect import Roller
from rocstar.rollout.kv_scheduler import KvScheduler
from rocstar.run.ahead import StepsAhead, steps_ahead
from rocstar.run.checkpoints import save
from rocstar.run.material import Material, positions_of, read_material, task_of
from rocstar.run.opening import opened_run
from rocstar.run.rows import layouts_of, load_sft_rows, rows_of_layouts, rows_of_step
from rocstar.run.run import Run
from rocstar.run.stopper import Stopper
from rocstar.run.tasks import demonstrations_of
from rocstar.sandbox.daemon.watch import TICKS, descendants, numbers, stat
from rocstar.support.screen import Screen
from rocstar.types import Completion, Finish, Group, Problem, Sampling, SftRow, Trajectory, Verdict

ROWS = 3200  # demonstrations that are made for a stage: what a tokenizer is trained on, and a few
JUDGED = 96  # attempts at demonstrations' own problems
PART_SECONDS = 2.0  # a part that took this long is not measured again at twice the size
UPDATES = 8  # of SFT that are timed, after two that are not
SETTLE_SECONDS = 0.3  # until other processes have reported their CPU time

RlStep = Callable[[Run, RlStage, StepsAhead, GrpoLearner, int], Awaitable[Mapping[str, float]]]
"""Takes one step of an RL stage and returns its metrics: `rocstar.train.rl_step`."""
Shown = Sequence[tuple[SftRow, Problem]]
"""What attempts write, and the problem of each row; another one where a file does not tell."""


def predicted(
    recipe: Recipe, screen: Screen, rl_step: RlStep, *, wall: bool = True, length_share: float = 0.4
) -> CpuPlan:
    """What the recipe takes on the CPUs of this machine, whatever GPUs it has. Raises what opening a run raises.

    rl_step: what a step of the trial runs. wall: seconds by the clock; else of CPU, which other work on the machine
    disturbs less. length_share: see Assumptions; only used where nothing is imitated."""
    begin_threads(recipe, None)
    stages = [stage for stage in recipe.stage if stage.steps]
    model = recipe.model.model_copy(update={"device": "cpu"})
    recipe = recipe.model_copy(update={"stage": stages, "model": model})
    material = read_material(recipe)
    recipe = material.recipe
    material = replace(material, recipe=_shortened(material.recipe))
    with TemporaryDirectory() as place:
        folder = RunFolder.create(material.recipe, place, ())
        with opened_machines(material.recipe, folder.path / "run.json", material.placement) as machines:
            measured = asyncio.run(_measured(recipe, material, folder, machines, screen, rl_step, wall, length_share))
    memory = material.memory.run if material.memory else nan
    pools = {name: len(problems) for name, problems in material.problems.items()}
    return plan_cpu(recipe, measured, heldout=len(material.heldout), pools=pools, memory=memory)


def _shortened(recipe: Recipe) -> Recipe:
    """The recipe with as many demonstrations as a trial needs."""

    def stage(stage: SftStage | RlStage) -> SftStage | RlStage:
        if isinstance(stage, RlStage):
            return stage
        return stage.model_copy(update={"steps": min(stage.steps, -(-ROWS // stage.sft.batch_rows))})

    return recipe.model_copy(update={"stage": [stage(each) for each in recipe.stage]})


async def _measured(
    recipe: Recipe,
    material: Material,
    folder: RunFolder,
    machines: Machines,
    screen: Screen,
    rl_step: RlStep,
    wall: bool,
    length_share: float,
) -> Measured:
    async with opened_run(material, folder, screen, machines, resume=False, stopper=Stopper(screen.note)) as run:
        opened = _since_birth() if wall else run.meter.spent()
        screen.note("trying what its parts take")
        trials = _Trials(run=run, rl_step=rl_step, wall=wall)
        each = await trials.demonstration()
        sft = {stage.name: await trials.sft(stage) for stage in recipe.stage if isinstance(stage, SftStage)}
        measured = await trials.attempts(recipe, trials.shown(length_share))
        made = demonstrations(material.recipe)
        start = opened - made * each
        return replace(measured, start=start, demonstration=each, made=made, sft=sft)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rolled:
    """Attempts of a trial."""

    groups: Sequence[Group]
    trial: Trial
    seconds: float


@dataclass(slots=True, kw_only=True)
class _Trials:
    """An open run whose parts are tried one after the other."""

    run: Run
    rl_step: RlStep
    wall: bool
    rolled: list[Trial] = field(default_factory=list)
    """All attempts so far, for the fit."""
    seed: int = 0
    learner: GrpoLearner | None = None
    """The learner of the last stage that was tried."""

    async def now(self) -> float:
        """Seconds so far, by the clock or of CPU."""
        if self.wall:
            return time.monotonic()
        await asyncio.sleep(SETTLE_SECONDS)
        return self.run.meter.spent()

    @property
    def engines(self) -> int:
        return sum(entry.count for entry in self.run.recipe.engine) or 1

    @property
    def rollout(self) -> StageRolloutSection:
        """The limits with the most room."""
        return max(self.run.recipe.rollouts, key=lambda rollout: rollout.max_response_tokens)

    @property
    def tool_seconds(self) -> float:
        """Mean wait for a tool."""
        waits = [t.tool_seconds for trial in self.rolled for a in trial.attempts for t in a.turns if t.tool_seconds]
        return fmean(waits) if waits else 0.0

    async def demonstration(self) -> float:
        """Seconds of making one; 0 where a task makes none."""
        stages = [s for s in self.run.recipe.stage if isinstance(s, SftStage) and s.sft.rows_file is None]
        began, recipe, template = await self.now(), self.run.recipe, self.run.material.template
        for stage in stages:
            layouts = layouts_of(recipe, stage, template, None, task_of(recipe, stage))
            most = self.run.policy.model.config.max_position_embeddings
            rows_of_layouts(stage.name, layouts, self.run.policy.codec, template, most)
        return (await self.now() - began) / max(1, demonstrations(recipe))

    async def sft(self, stage: SftStage) -> float:
        """Seconds of a step."""
        rows = load_sft_rows(self.run.folder.path, stage.name)
        learner = SftLearner(self.run.policy, stage.sft, steps=stage.steps)
        batches = [rows_of_step(rows, step, stage.sft.batch_rows, 0) for step in range(2 + UPDATES)]
        for batch in batches[:2]:
            learner.update(batch, seed=0)
        began = await self.now()
        for batch in batches[2:]:
            learner.update(batch, seed=0)
        return (await self.now() - began) / UPDATES

    def shown(self, length_share: float) -> Shown:
        """Rows of the last SFT stage; without one, rows of one turn that takes `length_share` of the cap."""
        recipe = self.run.recipe
        own = [problem for some in self.run.material.problems.values() for problem in some]
        problems = own or self.run.material.heldout or [Problem(id="none", question="", answer="0")]
        stage = next((s for s in reversed(recipe.stage) if isinstance(s, SftStage)), None)
        if stage is None:
            return self._unshown(problems, max(1, round(length_share * self.rollout.max_response_tokens)))
        rows = load_sft_rows(self.run.folder.path, stage.name)
        if stage.sft.rows_file is None:
            made = demonstrations_of(task_of(recipe, stage), stage.name, stage.steps * stage.sft.batch_rows)
            problems = [demonstration.problem for demonstration in made]
        return list(zip(rows, cycle(problems), strict=False))

    def _unshown(self, problems: Sequence[Problem], tokens: int) -> Shown:
        conversation, some = self.run.roller(self.rollout).conversation, problems[:JUDGED]
        prompts = [prompt_tokens(problem, conversation) for problem in some]
        rows = [SftRow(token_ids=(0,) * (n + tokens), loss_mask=(False,) * n + (True,) * tokens) for n in prompts]
        return list(zip(rows, some, strict=True))

    async def attempts(self, recipe: Recipe, shown: Shown) -> Measured:
        """All that depends on attempts, and memory after them."""
        judged, right = await self.judged(shown)
        rows = [row for row, _ in shown]
        learning = await self.learning(recipe, drawn(rows, right, share=0.5))
        config = self.run.policy.model.config
        positions = positions_of(self.run.material, self.run.policy.codec, int(config.max_position_embeddings))
        found = fit(engine_of(recipe.resolved(), positions), self.rolled)
        alone = simulate(judged.trial.attempts, alike(found.model, self.engines), KvScheduler())
        below = sum(numbers(pid, "smaps_rollup").get("Pss", 0) for pid in descendants(os.getpid()))
        return Measured(
            first=[_planned_row(row, self.tool_seconds) for row in rows],
            last=[_planned_row(row, self.tool_seconds) for row in right],
            model=found.model,
            engines=self.engines,
            spread=found.spread,
            judging=max(0.0, judged.seconds - alone.makespan) / len(judged.trial.attempts),
            learning=learning,
            saving=await self.saving(),
            overlaps=len(os.sched_getaffinity(0)) > 1,
            started=float(below),
        )

    async def judged(self, shown: Shown) -> tuple[_Rolled, list[SftRow]]:
        """An evaluation on what is shown, and the rows that were right; all where none was."""
        await self._evaluated(shown[:1])  # the first takes longer
        self.rolled.clear()
        rolled = await self._evaluated(shown[:JUDGED])
        verdicts = [group.trajectories[0].outcome for group in rolled.groups]
        right = [row for (row, _), o in zip(shown, verdicts, strict=False) if o and o.verdict is Verdict.RIGHT]
        return rolled, right or [row for row, _ in shown]

    async def _evaluated(self, shown: Shown) -> _Rolled:
        rows, problems = zip(*shown, strict=True)
        began, protocol = await self.now(), Protocol(attempts=1, temperature=1.0)
        found = await evaluate_policy(self._roller(rows), problems, protocol, fault_budget=0.0, setup={})
        found.write(self.run.folder.evaluation("trial", 0), 0)
        return self._kept(found.groups["samples"], await self.now() - began)

    async def learning(self, recipe: Recipe, rows: Sequence[SftRow]) -> dict[str, Cost]:
        """Cost of learning by RL stage; stages whose steps are alike are tried once."""
        found: dict[str, Cost] = {}
        for stage in (stage for stage in recipe.stage if isinstance(stage, RlStage)):
            alike = next((s for s in recipe.stage if s.name in found and _alike(s, stage)), None)
            found[stage.name] = found[alike.name] if alike else await self.step(stage, rows)
        return found

    async def step(self, stage: RlStage, rows: Sequence[SftRow]) -> Cost:
        """Steps of the stage at growing sizes: their attempts for the fit, and what follows them as a cost."""
        rollout, problems = stage.rollout, self.run.material.problems[stage.name]
        folders = self.run.recipe.run.modules
        self.learner = GrpoLearner(self.run.policy, stage.learning, temperature=rollout.temperature, folders=folders)
        points: list[tuple[float, float]] = []
        count, most = 1, min(len(problems), rollout.problems_per_step)
        while True:
            rolled = await self._roll(rows, problems[:count], rollout.attempts_per_problem)
            points.append(await self._learn(stage, rolled.groups))
            if count == most or max(rolled.seconds, points[-1][1]) > PART_SECONDS:
                break
            count = min(most, 2 * count)
        again = [] if len(points) > 1 else [await self._learn(stage, rolled.groups)]
        return cost_of([*points, *again][1:])  # the first takes longer

    async def saving(self) -> float:
        """Seconds of a checkpoint."""
        if self.learner is None:
            return 0.0
        began = await self.now()
        save(self.run.folder, self.run.progress, self.run.policy, self.learner)
        return await self.now() - began

    async def _learn(self, stage: RlStage, groups: Sequence[Group]) -> tuple[float, float]:
        """(tokens of attempts that were kept, seconds) of what follows the attempts of a step."""
        assert isinstance(self.learner, GrpoLearner)
        mixed = [replace(group, trajectories=_mixed(group.trajectories)) for group in groups]

        async def made(step: int) -> RolledStep:
            return RolledStep(groups=mixed)

        began = await self.now()
        async with steps_ahead(made, end=1, ahead=0) as attempts:
            metrics = await self.rl_step(self.run, stage, attempts, self.learner, 0)
        self.run.progress.step += 1
        mean = fmean(t.num_response_tokens for group in groups for t in group.trajectories)
        return metrics["roc/kept"] * mean, await self.now() - began

    async def _roll(self, rows: Sequence[SftRow], problems: Sequence[Problem], attempts: int) -> _Rolled:
        self.seed += 1
        began = await self.now()
        groups = await self._roller(rows).roll(problems, attempts=attempts, seed=self.seed)
        return self._kept(groups, await self.now() - began)

    def _kept(self, groups: Sequence[Group], seconds: float) -> _Rolled:
        """As a trial, its ends stretched so that the last is after `seconds`. Raises RunHalted."""
        made = [trajectory for group in groups for trajectory in group.trajectories]
        if fault := next((trajectory.fault for trajectory in made if trajectory.fault), None):
            raise RunHalted(f"an attempt of the trial ended by a fault of ours: {fault}")
        stretch = seconds / max(trajectory.seconds for trajectory in made)
        attempts = [
            _planned(trajectory, f"{len(self.rolled)}/{number}", self.rollout.max_response_tokens, stretch)
            for number, group in enumerate(groups)
            for trajectory in group.trajectories
        ]
        ends = [trajectory.seconds * stretch for trajectory in made]
        trial = Trial(attempts=attempts, ends=ends, engines=self.engines, scheduler=KvScheduler)
        self.rolled.append(trial)
        return _Rolled(groups=groups, trial=trial, seconds=seconds)

    def _roller(self, rows: Sequence[SftRow]) -> Roller:
        engine = GuidedEngine(self.run.engine, map(turns_of, cycle(rows)))
        return replace(self.run.roller(self.rollout), engine=engine)


def _alike(one: SftStage | RlStage, other: RlStage) -> bool:
    """But for their caps, and for what happens at their beginning."""
    cap = {"rollout": {"max_response_tokens"}, "learning": {"reset_optimizer"}}
    parts = {"rollout", "resample", "learning"}
    first, second = (stage.model_dump(include=parts) for stage in (one, other))
    for section, keys in cap.items():
        for key in keys:
            first[section].pop(key), second[section].pop(key)
    return first == second


def _mixed(attempts: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """Every other one right, so that the group teaches."""
    found = []
    for place, attempt in enumerate(attempts):
        verdict = Verdict.RIGHT if place % 2 else Verdict.WRONG
        outcome = attempt.outcome and replace(attempt.outcome, verdict=verdict, reward=float(place % 2))
        found.append(replace(attempt, outcome=outcome))
    return tuple(found)


def _planned(made: Trajectory, group: str, limit: int, stretch: float) -> PlannedAttempt:
    wait = stretch * made.tool_seconds / max(1, len(made.turns) - 1)
    lengths = [(len(turn.completion.token_ids), len(turn.reply_ids)) for turn in made.turns]
    return planned(group, len(made.prompt_ids), lengths, wait=wait, limit=limit)


def _planned_row(row: SftRow, tool_seconds: float) -> PlannedAttempt:
    lengths = [len(list(run)) for _, run in groupby(row.loss_mask)]  # prompt, turn, reply, turn ...
    turns = zip_longest(lengths[1::2], lengths[2::2], fillvalue=0)  # nothing stands after the last turn
    return planned("", lengths[0], turns, wait=tool_seconds, limit=len(row.token_ids))


def _since_birth() -> float:
    """Seconds since this process began."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat(os.getpid())[19]) / TICKS


# An engine that computes as the real one and writes what demonstrations show


def turns_of(row: SftRow) -> list[tuple[int, ...]]:
    """The token ids of each turn that the assistant writes, in order."""
    runs = groupby(zip(row.token_ids, row.loss_mask, strict=True), key=lambda pair: pair[1])
    return [tuple(token for token, _ in run) for mine, run in runs if mine]


@dataclass(slots=True)
class _GuidedSession:
    turns: Sequence[tuple[int, ...]]
    """What it writes."""
    sampled: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Where its completions begin, and what the engine had sampled there."""


class GuidedEngine(ForwardingEngine):
    """An engine that computes as `engine` does and writes the turns of demonstrations, which a model that has learned
    nothing would not write. So the attempts of a trial are as long, and call their tools, as those to come.

    `engine` samples as many tokens as the next turn has, and is given its own tokens as the conversation goes on, so
    its caches stay valid. Sessions take `rows` in the order in which they come."""

    def __init__(self, engine: Engine, rows: Iterator[Sequence[tuple[int, ...]]]) -> None:
        super().__init__(engine)
        self._rows = rows
        self._sessions: dict[str, _GuidedSession] = {}

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = _GuidedSession(next(self._rows))
        number = len(session.sampled)
        planned = session.turns[number] if number < len(session.turns) else sampling.stop_token_ids[:1]
        ids = list(token_ids)
        for start, own in session.sampled:
            ids[start : start + len(own)] = own
        asked = replace(sampling, max_new_tokens=min(len(planned), sampling.max_new_tokens), stop_token_ids=())
        found = await super().generate(ids, asked, request_id=request_id, session_id=session_id)
        session.sampled.append((len(ids), found.token_ids))
        written = planned[: len(found.token_ids)]
        finish = Finish.STOP if len(written) == len(planned) else found.finish
        return replace(found, token_ids=written, finish=finish)

    async def close_session(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        await super().close_session(session_id)
