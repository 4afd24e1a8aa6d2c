"""A run under way: its parts, how far it is, and what it keeps: checkpoints, evaluations, records, the summary.

Not here: what a stage's step does (`rocstar/train.py`).
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rocstar.answers.grade import Grader
from rocstar.cluster.here import Machines
from rocstar.config.sections import Recipe, RlStage, SftStage, StageRolloutSection
from rocstar.engines.process import EngineSettings, ProcessEngine
from rocstar.engines.torch_engine import TorchEngine
from rocstar.engines.vllm import VllmEngine
from rocstar.errors import ConfigError, RunHalted
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.models import compute_dtype, device_of, name_of_dtype
from rocstar.learning.policy import Policy
from rocstar.learning.sft import SftLearner
from rocstar.learning.threads import in_thread
from rocstar.parts.build import OwnedEngine, make_roller, named_engines, opened_fleet, program_limits
from rocstar.record.atomic import write_atomic, write_json
from rocstar.record.folder import RunFolder, read_json
from rocstar.record.journal import read_journal
from rocstar.record.show import summary_of
from rocstar.record.tracker import RunTracker
from rocstar.rollout.collect import Roller
from rocstar.rollout.fleet import Fleet, Tell
from rocstar.run.alarms import Alarm, Evaluated, alarms
from rocstar.run.checkpoints import Progress, latest, prune, save
from rocstar.run.coldstart import Opened, opening, reopened
from rocstar.run.continued import is_reopened
from rocstar.run.material import Material, fingerprint, positions_of, without_long_prompts
from rocstar.run.meter import Meter
from rocstar.run.probe import probe
from rocstar.run.published import PublishedWeights
from rocstar.run.report import attempt_records, faults_of
from rocstar.run.stages import why_over
from rocstar.run.stopper import Stopper
from rocstar.run.underway import Attempts
from rocstar.sandbox.client import SandboxClient
from rocstar.support.screen import Screen, changed_setting
from rocstar.support.watch import RUN, Patience, Stall, Watch, watching
from rocstar.tools.python import PythonTool
from rocstar.types import BatchRow, Resampled, Weights

TRAINER_PHASES = ("rollout", "learning", "record", "sft")
Learner = SftLearner | GrpoLearner
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Run:
    """What all stages share."""

    material: Material
    folder: RunFolder
    screen: Screen
    stopper: Stopper
    meter: Meter
    policy: Policy
    engine: Fleet
    sandbox: SandboxClient
    grader: Grader
    tracker: RunTracker
    published: PublishedWeights | None
    """Where engines in other processes find the weights; None where there are none."""
    watch: Watch
    progress: Progress
    checkpoint: Path | None
    """Where learner state is restored from: the newest checkpoint."""
    saved_at: float = 0.0
    """Monotonic time of it, seconds."""
    save_seconds: float = 0.0
    """How long writing it took."""
    step_began: float = 0.0
    """Monotonic time at which the step under way began, seconds."""
    probed_at: float = -math.inf
    """Monotonic time at which sandbox and grader were last asked something whose answer is known, seconds."""
    attempts: dict[int, Attempts] = field(default_factory=dict)
    """Of steps of the stage, by their number in it, that were begun and not learnt from."""
    rollout_seconds: float | None = None
    """How long the step before waited for its attempts; None for the first of a stage."""
    stage_rows: list[Mapping[str, Any]] = field(default_factory=list)
    """Metrics of the stage under way, one row a step."""
    evaluated: Sequence[Evaluated] = ()
    """Evaluations of the stage under way."""
    alarmed: set[str] = field(default_factory=set)
    """Names of the alarms that hold."""

    @property
    def recipe(self) -> Recipe:
        return self.material.recipe

    # -- stages -----------------------------------------------------------------------------------------------------

    def stages_left(self) -> Iterator[SftStage | RlStage]:
        """Stages that are not done, each announced as it begins; before the first of kind `rl` see `is_before_rl`."""
        done = self.progress.stage + self.progress.stage_complete
        for number, stage in enumerate(self.recipe.stage):
            if number < done:
                continue
            if self.progress.stage != number:
                version = self.policy.version
                self.progress = Progress(stage=number, step=self.progress.step, policy_version=version)
            yield stage

    def is_before_rl(self) -> bool:
        """Whether no RL has changed the policy yet."""
        before = self.recipe.stage[: self.progress.stage]
        return not self.progress.stage_step and not any(isinstance(stage, RlStage) for stage in before)

    def previous_stage(self) -> SftStage | RlStage | None:
        return self.recipe.stage[self.progress.stage - 1] if self.progress.stage else None

    def announce(self, stage: SftStage | RlStage, detail: str) -> None:
        self.tracker.start_stage(stage.name, stage.kind, stage.steps)
        self.screen.stage(stage.name, detail)

    def roller(self, recipe: Recipe, rollout: StageRolloutSection) -> Roller:
        """Under the run's recipe, or one that differs in what attempts obey."""
        return make_roller(
            recipe,
            rollout,
            codec=self.policy.codec,
            template=self.material.template,
            engine=self.engine,
            sandbox=self.sandbox,
            grader=self.grader,
            note=self.watch.note,
        )

    async def publish(self) -> None:
        """Give the engines the current weights. Raises EngineUnavailable when none takes them."""
        await self.engine.load_weights(self.weights())

    def weights(self) -> Weights:
        """The current ones, where engines can read them. Raises OSError, RunHalted."""
        return self.published.publish(self.policy) if self.published else self.policy.publish()

    async def beside(self, work: Callable[[], T]) -> T:
        """Do `work` of the learner in a thread while the event loop serves attempts under way."""
        return await in_thread(work, device=self.policy.device, break_off=self.stopper.break_off)

    @contextmanager
    def rolling(self, step: int) -> Iterator[None]:
        """While the attempts of a step of the stage are waited for, whoever looks on is told how far they are."""
        began, before = time.monotonic(), self.watch.asked()

        def far(seconds: float) -> str:
            now, attempts = self.watch.asked(), self.attempts.get(step)
            written = now.produced_tokens - before.produced_tokens if now and before else 0
            return attempts.told(seconds, max(0, written), self.rollout_seconds) if attempts else ""

        with self.watch.telling(far):
            yield
        self.attempts.pop(step, None)
        self.rollout_seconds = time.monotonic() - began

    # -- steps ------------------------------------------------------------------------------------------------------

    def steps(self, stage: SftStage | RlStage) -> Iterator[int]:
        """Numbers of the steps of a stage that are not done, from 0. Raises KeyboardInterrupt after a step in which the
        run was asked to stop, and was saved by `done`."""
        self.saved_at = time.monotonic()
        self.stage_rows = [row for row in read_journal(self.folder.metrics) if row["stage"] == stage.name]
        self.rollout_seconds = None
        self.evaluated = self.evaluations()
        self.alarmed = {alarm.name for alarm in self._alarms(stage)}  # told before the checkpoint
        while self.progress.stage_step < stage.steps and not self.progress.stage_complete:
            self.policy.ranks.check()
            self.step_began = time.monotonic()
            yield self.progress.stage_step
            if self.stopper.asked:
                raise KeyboardInterrupt

    @contextmanager
    def saved_when_stopped(self, learner: Learner) -> Iterator[None]:
        """While the context lasts, a Ctrl-C keeps the steps that are done."""
        self.stopper.half_changed = self._is_half_changed
        try:
            yield
        except (KeyboardInterrupt, asyncio.CancelledError):
            unsaved = self.progress.stage_step and self.checkpoint != self.folder.checkpoint(self.progress.step)
            if self.stopper.asked and unsaved and not self._is_half_changed():
                with self.stopper.holding():
                    self.save(learner, complete=False)
            raise
        finally:
            self.stopper.half_changed = lambda: False

    def _is_half_changed(self) -> bool:
        return self.policy.version != self.progress.policy_version or self.policy.ranks.busy

    def done(self, stage: SftStage | RlStage, learner: Learner, metrics: Mapping[str, float]) -> None:
        """A step is done: record it; save now and then, at the stage's end and when asked to stop."""
        with self.stopper.holding():
            self._done(stage, learner, metrics)

    def _done(self, stage: SftStage | RlStage, learner: Learner, metrics: Mapping[str, float]) -> None:
        row = {"stage_step": self.progress.stage_step + 1, **metrics, **self.meter.take()}
        row["step/trainer_cpu_seconds"] = sum(row.get(f"cpu/{phase}", 0.0) for phase in TRAINER_PHASES)
        row["step/seconds"] = time.monotonic() - self.step_began
        row["step/tokens_per_second"] = metrics["step/tokens"] / max(row["step/seconds"], 1e-9)
        self.progress.stage_step += 1
        self.progress.step += 1
        self.progress.policy_version = self.policy.version
        self.tracker.log(self.progress.step, row)
        self.stage_rows.append(row)
        self.screen.step(stage.name, self.progress.stage_step, stage.steps, row)
        if isinstance(stage, RlStage):
            self._raise_alarms(stage)
        over = self._why_over(stage)
        if over:
            self._tell_end(stage, over)
        evaluates = isinstance(stage, RlStage) and self.evaluates_after(self.progress.stage_step)
        if over or evaluates or self._is_checkpoint_due() or self.stopper.asked:
            self.save(learner, complete=over is not None)
        if over:
            self.folder.end_request.unlink(missing_ok=True)  # only now: a kill before this must find it again

    def _raise_alarms(self, stage: RlStage) -> None:
        """Each alarm once while it lasts."""
        found = self._alarms(stage)
        for alarm in found:
            if alarm.name not in self.alarmed:
                self.tracker.event("warning", step=self.progress.step, **asdict(alarm))
                self.screen.note(f"warning: {stage.name}: {alarm.evidence}; {alarm.action}")
        self.alarmed = {alarm.name for alarm in found}

    def _alarms(self, stage: SftStage | RlStage) -> list[Alarm]:
        if not isinstance(stage, RlStage):
            return []
        tools = stage.rollout.max_turns > 1
        return alarms(self.stage_rows, self.evaluated, tools=tools, steps=stage.steps)

    def evaluates_after(self, done: int) -> bool:
        """Whether an evaluation comes after so many steps of an RL stage. The run is saved first: an evaluation that
        takes longer than a step is then gone on with after a kill."""
        every = self.recipe.evaluate.every_steps
        return bool(every and done and done % every == 0)

    def evaluations(self) -> list[Evaluated]:
        """Of the stage under way, from the run folder."""
        steps = range(self.progress.step - self.progress.stage_step, self.progress.step + 1)
        asked = {"during", *(benchmark.name for benchmark in self.material.benchmarks)}
        return [
            Evaluated(name=name, step=step, accuracy=result["accuracy"]["value"])
            for name, step, result in self.folder.evaluations()
            if name in asked and step in steps
        ]

    def _why_over(self, stage: SftStage | RlStage) -> str | None:
        if self.progress.stage_step == stage.steps:
            return f"its {stage.steps} steps are done"
        if self.folder.asks_to_end(stage.name):
            return "a person asked for it"
        return why_over(stage.end, self.stage_rows) if isinstance(stage, RlStage) else None

    def _tell_end(self, stage: SftStage | RlStage, reason: str) -> None:
        steps = self.progress.stage_step
        self.tracker.event("stage_end", name=stage.name, step=self.progress.step, steps=steps, reason=reason)
        if steps < stage.steps:
            self.screen.note(f"{stage.name} is over after {steps} of at most {stage.steps} steps: {reason}")

    def skip(self, stage: RlStage, learner: Learner, reason: str) -> None:
        """Leave a stage out that has nothing to learn from."""
        self.screen.note(f"{stage.name}: {reason}, so the stage is skipped")
        self.tracker.event("stage_skipped", name=stage.name)
        self.progress.stage_step = stage.steps
        self.save(learner, complete=True)

    def record(self, stage: RlStage, chosen: Sequence[Resampled], rows: Sequence[BatchRow], written_by: int) -> None:
        """Keep every attempt of the step under way. Raises RunHalted when too many ended by faults of ours."""
        step = self.progress.step + 1
        if self.recipe.run.save_rollouts:
            with self.meter.phase("record"):
                records = attempt_records(chosen, rows, policy_version=written_by)
                self.tracker.record_attempts(step, records)
        share, first = faults_of(chosen)
        if first:
            self.tracker.event("faults", step=step, share=share, first=first)
        if share > self.recipe.run.fault_budget:
            raise RunHalted(
                f"step {step}: {share:.0%} of the attempts ended by failures outside the model or undecided, "
                f"run.fault_budget allows "
                f"{self.recipe.run.fault_budget:.0%}; the first says: {first}"
            )

    # -- what is kept -----------------------------------------------------------------------------------------------

    def save(self, learner: Learner, *, complete: bool) -> None:
        """Raises RunHalted when an earlier write failed: a checkpoint newer than the record would hide the hole."""
        began = time.monotonic()
        self.watch.note(RUN, "saving")
        self.tracker.flush()
        if self.tracker.failure:
            raise RunHalted(f"{self.tracker.failure} with: rocstar train --resume {self.folder.name}")
        self.progress.stage_complete = complete
        save(self.folder, self.progress, self.policy, learner)
        prune(self.folder, self.recipe.run.keep_checkpoints)
        self.checkpoint = self.folder.checkpoint(self.progress.step)
        self.watch.note(RUN, None)
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - began

    def _is_checkpoint_due(self) -> bool:
        """By time, and by the share of it that writing takes."""
        settings, passed = self.recipe.run, time.monotonic() - self.saved_at
        return passed >= settings.checkpoint_seconds and self.save_seconds <= settings.checkpoint_cost * passed

    async def probe_when_due(self) -> None:
        """Raises RunHalted where the sandbox or the grader gives a wrong result."""
        if time.monotonic() - self.probed_at >= self.recipe.run.probe_seconds:
            await probe(PythonTool(self.sandbox, program_limits(self.recipe.sandbox)), self.grader)
            self.probed_at = time.monotonic()

    def finish(self) -> None:
        """Write the summary."""
        self.tracker.flush()
        write_json(
            self.folder.summary,
            summary_of(self.folder.evaluations(), [*read_journal(self.folder.metrics), self.meter.take()]),
        )


@asynccontextmanager
async def opened_run(
    material: Material, folder: RunFolder, screen: Screen, machines: Machines, *, resume: bool, stopper: Stopper
) -> AsyncIterator[Run]:
    """A run at its start or where its newest checkpoint left it; its parts are closed with the context."""
    async with AsyncExitStack() as closing:
        _same_problems(material, folder)
        watch = Watch()
        closing.enter_context(screen.never_silent(watch.doing))
        meter = Meter(machines.sandbox, partial(watch.note, RUN))
        progress, checkpoint = _starting_point(material.recipe, folder, screen, resume=resume)
        with meter.phase("cold start"):
            made = _opened_model(material, folder, screen, checkpoint)
        if material.pretrained is None:
            material = without_long_prompts(material, made.codec)
        for told in material.notes:
            screen.note(told)
        recipe = material.recipe
        positions = positions_of(material, made.codec, int(made.model.config.max_position_embeddings))
        ranks = machines.start_ranks()
        closing.callback(ranks.close)
        stopper.break_off = ranks.abandon
        embedded = None if recipe.engine else _embedded(recipe, made, positions, ranks.local_rank)
        policy = Policy(made.model, made.codec, material.template, recipe.model, ranks=ranks)
        if checkpoint is not None:
            policy.restore(checkpoint)
            policy.version = progress.policy_version
        grader = Grader()
        closing.push_async_callback(grader.close)
        tracker = closing.enter_context(RunTracker(folder, decode=policy.codec.decode))
        if resume:
            tracker.event("resumed", step=progress.step, pid=os.getpid())
        # before the engines, so that their start and end are watched too
        closing.enter_context(_watching(watch, recipe, folder, screen, tracker, break_off=ranks.abandon))
        published: PublishedWeights | None = None
        engines: Mapping[str, OwnedEngine] = {"embedded": embedded} if embedded else {}
        if embedded is None:
            published = _published(folder, machines)
            closing.callback(published.close)
            engines = _processes(recipe, policy, published, positions, folder, machines, meter)
        vocab_size, tell = policy.codec.vocab_size, _teller(tracker, screen)
        fleet = await closing.enter_async_context(opened_fleet(recipe, engines, vocab_size=vocab_size, tell=tell))
        watch.load = fleet.load
        yield Run(
            material=material,
            folder=folder,
            screen=screen,
            stopper=stopper,
            meter=meter,
            policy=policy,
            engine=fleet,
            sandbox=machines.sandbox,
            grader=grader,
            tracker=tracker,
            published=published,
            watch=watch,
            progress=progress,
            checkpoint=checkpoint,
        )


def _starting_point(recipe: Recipe, folder: RunFolder, screen: Screen, *, resume: bool) -> tuple[Progress, Path | None]:
    """Progress and newest checkpoint. When resuming, the folder's records after that step are removed."""
    progress, checkpoint = (latest(folder) if resume else None) or (Progress(), None)
    if resume:
        folder.rewind(progress.step)
        screen.note(f"going on after step {progress.step}")
        for change in folder.changes:
            if change["step"] == progress.step:
                screen.note(changed_setting(change))
    if progress.stage_complete and is_reopened(folder, recipe.stage[progress.stage].name, progress.step):
        progress.stage_complete = progress.stage_step >= recipe.stage[progress.stage].steps
    return progress, checkpoint


def _opened_model(material: Material, folder: RunFolder, screen: Screen, checkpoint: Path | None) -> Opened:
    """The model and codec of the checkpoint, or those of a new run."""
    if checkpoint is not None:
        return reopened(checkpoint, material, folder.path)
    imitates = any(isinstance(stage, SftStage) for stage in material.recipe.stage)
    screen.stage("cold start" if imitates else "start", _made_first(material, imitates))
    return opening(material, folder.path)


def _made_first(material: Material, imitates: bool) -> str:
    """What a fresh run opens with, in words."""
    parts = ["demonstrations"] * imitates + ["tokenizer"] * (material.pretrained is None) + ["model"]
    return ", ".join(parts)


def _same_problems(material: Material, folder: RunFolder) -> None:
    """Note what a run learns from; refuse to go on with something else. (A branch notes the stages
    that had begun.)"""
    found = fingerprint(material)
    noted = read_json(folder.problems) if folder.problems.exists() else {}
    changed = [name for name in found if noted.get(name, found[name]) != found[name]]
    if changed:
        raise ConfigError(
            f"run {folder.name} began with other problems ({', '.join(changed)}); put its files back as they were, or "
            "start a new run"
        )
    write_json(folder.problems, {**noted, **found})


def _tell_stall(folder: RunFolder, screen: Screen, tracker: RunTracker, stall: Stall, stacks: str) -> None:
    """On the screen, in events.jsonl, and with the stacks in a file of its own. Called by the watching thread."""
    file = folder.next_log("stall")
    write_atomic(file, f"{stall.report()}\n\n{stacks}".encode())
    tracker.event("stall", seconds=round(stall.seconds), phase=stall.phase, waiting=stall.counts, log=file.name)
    screen.note(f"{stall.report()}\n  where everything stands: {file}")


def _watching(
    watch: Watch,
    recipe: Recipe,
    folder: RunFolder,
    screen: Screen,
    tracker: RunTracker,
    *,
    break_off: Callable[[], None],
) -> AbstractContextManager[None]:
    """Report stalls of the run, and say how to continue it where one ends it."""
    report = partial(_tell_stall, folder, screen, tracker)
    remedy = f"continue with: rocstar train --resume {folder.name}"
    return watching(watch, Patience.of_run(recipe.run), report, remedy=remedy, break_off=break_off)


def _embedded(recipe: Recipe, made: Opened, positions: int, local_rank: int) -> TorchEngine:
    """Over a copy of the model: the learner's own is sharded and changes under way."""
    device = device_of(recipe.model, local_rank)
    model = copy.deepcopy(made.model).to(device=device, dtype=compute_dtype(recipe.model, device))
    rows, tokens = recipe.rollout.engine_rows, recipe.rollout.kv_tokens
    return TorchEngine(model, rows=rows, positions=positions, kv_tokens=tokens, vocab_size=made.codec.vocab_size)


def _teller(tracker: RunTracker, screen: Screen) -> Tell:
    """Events of engines go into the run folder, and those that a person should know to the screen."""

    def tell(event: str, **details: Any) -> None:
        tracker.event(event, **details)
        if event == "engine_lost":
            screen.note(f"engine {details['engine']} was taken out with {details['turns']} turns: {details['reason']}")
        elif event == "engine_back":
            screen.note(f"engine {details['engine']} is back after {details['seconds']:.0f} s")
        elif event == "engine_still_out" and details["tries"] % 5 == 1:  # the journal has every one
            screen.note(f"engine {details['engine']} is still out: {details['reason']}")

    return tell


def _published(folder: RunFolder, machines: Machines) -> PublishedWeights:
    """In memory only where all engines can read it."""
    disk = folder.path.resolve() / "weights"
    return PublishedWeights(disk) if machines.engines_share_memory else PublishedWeights(disk, memory=None)


def _processes(
    recipe: Recipe,
    policy: Policy,
    published: PublishedWeights,
    positions: int,
    folder: RunFolder,
    machines: Machines,
    meter: Meter,
) -> dict[str, ProcessEngine | VllmEngine]:
    """Engines over weights that they read from a folder; the meter counts their CPU time."""
    weights = published.publish(policy)
    assert weights.folder is not None
    settings = EngineSettings(
        folder=weights.folder,
        version=weights.version,
        device=policy.device.type,
        dtype=name_of_dtype(policy.dtype),
        rows=recipe.rollout.engine_rows,
        positions=positions,
        kv_tokens=recipe.rollout.kv_tokens,
        vocab_size=policy.codec.vocab_size,
    )
    engines = named_engines(recipe, settings, folder.path.resolve() / "logs", machines.start_server)
    meter.watch("engines", lambda: sum(engine.cpu_seconds() for engine in engines.values()))
    return engines
