"""A run under way: its parts, its progress, its records, and its seconds by phase.

Not here: how it is opened (`opening.py`), the steps of a stage (`steps.py`), and what a step does (`rocstar/train.py`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rocstar.answers.grade import Grader
from rocstar.config.sections import Recipe, Stage, StageRolloutSection
from rocstar.errors import RunHalted
from rocstar.learning.policy import Policy
from rocstar.learning.update import Updater
from rocstar.parts.build import AttemptParts
from rocstar.record.atomic import write_json
from rocstar.record.folder import RunFolder
from rocstar.record.journal import read_journal
from rocstar.record.show import summary_of
from rocstar.record.tracker import RunTracker
from rocstar.rollout.collect import Roller
from rocstar.rollout.fleet import Fleet
from rocstar.run.calls import FinishedCalls
from rocstar.run.checkpoints import Checkpoints, Progress
from rocstar.run.published import PublishedWeights
from rocstar.run.report import attempt_records, failed_agents, faults_of, reason_to_halt
from rocstar.run.stopper import Stopper, in_thread
from rocstar.sandbox.client import SandboxClient
from rocstar.support.screen import Screen, plural
from rocstar.support.watch import Watch
from rocstar.types import BatchRow, Resampled, Weights

if TYPE_CHECKING:
    from rocstar.run.material import Material

T = TypeVar("T")
CPU, WALL = "cpu/", "seconds/"


class Meter:
    """Collects wall time, CPU seconds of this process, and of the sandbox separately, until they are taken into a row
    of metrics. Also reports the beginning and end of each phase."""

    def __init__(self, sandbox: SandboxClient, note: Callable[[str | None], None] = lambda phase: None) -> None:
        """note: called with each phase as it begins, and with None at its end."""
        self._sandbox, self._note = sandbox, note
        self._before = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._wall: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """All time inside the context, and all CPU of this process, belongs to `name`."""
        before, began = time.process_time(), time.monotonic()
        self._note(name)
        try:
            yield
        finally:
            self._note(None)
            self._seconds[name] += time.process_time() - before
            self._wall[name] += time.monotonic() - began

    def take(self) -> dict[str, float]:
        """`cpu/<phase>` seconds since the last call, `cpu/sandbox` among them, and `seconds/<phase>` of wall time."""
        now = self._sandbox.usage().cpu_seconds
        self._seconds["sandbox"] += now - self._before
        self._before = now
        taken = {CPU + name: round(seconds, 4) for name, seconds in self._seconds.items()}
        taken |= {WALL + name: round(seconds, 4) for name, seconds in self._wall.items()}
        self._seconds.clear()
        self._wall.clear()
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """State shared by all stages. Only `checkpoints` changes during the run."""

    material: Material
    policy: Policy
    engine: Fleet
    published: PublishedWeights | None
    """Publishes weights for engines in other processes; None if there are none."""
    sandbox: SandboxClient
    grader: Grader
    probe_when_due: Callable[[], Awaitable[None]]
    """Regularly sends the sandbox and the grader work with known results."""
    checkpoints: Checkpoints
    """The run's progress, and its saved state."""
    calls: FinishedCalls | None
    """Finished calls of agents in unsaved steps; None for attempts without an agent."""
    folder: RunFolder
    tracker: RunTracker
    screen: Screen
    meter: Meter
    watch: Watch
    stopper: Stopper

    @property
    def recipe(self) -> Recipe:
        return self.material.recipe

    @property
    def progress(self) -> Progress:
        return self.checkpoints.progress

    # -- stages -----------------------------------------------------------------------------------------------------

    def stages_left(self) -> Iterator[Stage]:
        """Stages that are not done; each begins when it is yielded."""
        done = self.progress.stage + self.progress.stage_complete
        for number, stage in enumerate(self.recipe.stage):
            if number < done:
                continue
            if self.progress.stage != number:
                begun = Progress(stage=number, step=self.progress.step, policy_version=self.policy.version)
                self.checkpoints.progress = begun
            yield stage

    def is_before_rl(self) -> bool:
        """Whether no stage has changed the policy by its own attempts yet."""
        return not self.progress.stage_step and not any(
            stage.rollouts for stage in self.recipe.stage[: self.progress.stage]
        )

    def previous_stage(self) -> Stage | None:
        return self.recipe.stage[self.progress.stage - 1] if self.progress.stage else None

    def announce(self, stage: Stage, detail: str) -> None:
        """Report the beginning of a stage."""
        self.tracker.start_stage(stage.name, stage.kind, stage.steps)
        self.screen.stage(stage.name, detail)

    def skip(self, stage: Stage, learner: Updater, reason: str) -> None:
        """Skip a stage that has nothing to learn from."""
        self.screen.note(f"{stage.name}: {reason}, so the stage is skipped")
        self.tracker.event("stage_skipped", name=stage.name)
        self.save(learner, complete=True)

    # -- parts ------------------------------------------------------------------------------------------------------

    def roller(self, rollout: StageRolloutSection, parts: AttemptParts | None = None) -> Roller:
        """Makes attempts under these limits. parts: those of another recipe; None: of the run's own."""
        return (parts or self.material.parts).roller(
            rollout,
            codec=self.policy.codec,
            template=self.material.template,
            engine=self.engine,
            sandbox=self.sandbox,
            grader=self.grader,
            note=self.watch.note,
        )

    async def turn_to_learners(self) -> None:
        """If engines and learners share GPUs in turns, put engines to sleep until weights are next published."""
        if self.material.placement.colocate:
            await self.engine.sleep()

    async def publish(self) -> None:
        """Give the engines the current weights. Raises EngineUnavailable when none takes them."""
        await self.turn_to_learners()
        await self.give(self.weights(), self.progress.step)

    async def give(self, weights: Weights, step: int) -> dict[str, float]:
        """Give the engines the weights after a step; `weights/*` metrics. Raises EngineUnavailable when none takes
        them, OSError."""
        began = time.monotonic() - (self.published.seconds if self.published else 0.0)
        if self.calls:
            self.calls.written_by(weights, step)
        await self.engine.load_weights(weights)
        if weights.sender and self.published and not self.engine.is_whole:  # returning engines find them in a folder
            self.engine.keep(self.published.publish(self.policy, sent=False))
        if not self.published:
            return {}
        return {"weights/seconds": time.monotonic() - began, "weights/bytes": float(self.published.bytes)}

    def weights(self) -> Weights:
        """The current weights, for engines; engines that come back find them in a folder. Raises OSError, RunHalted."""
        if self.published is None:
            return self.policy.publish()
        return self.published.publish(self.policy, sent=self.engine.is_whole)

    async def beside(self, work: Callable[[], T]) -> T:
        """Do `work` of the learner in a thread while the event loop serves attempts under way."""
        return await in_thread(work, inside=self.policy.on_device(), break_off=self.stopper.break_off)

    def is_half_changed(self) -> bool:
        """Whether a step has changed the weights and is not done yet."""
        return self.policy.version != self.progress.policy_version or self.policy.ranks.busy

    # -- records ----------------------------------------------------------------------------------------------------

    def save(self, learner: Updater, *, complete: bool) -> None:
        """Raises RunHalted when an earlier write failed: a checkpoint newer than the record would hide the hole."""
        with self.meter.phase("saving"):
            self.tracker.flush()
            if self.tracker.failure:
                raise RunHalted(f"{self.tracker.failure} with: rocstar train --resume {self.folder.argument}")
            self.checkpoints.write(self.policy, learner, complete=complete)
            if self.calls:
                self.calls.forget(None if complete else self.progress.step)

    def record(self, chosen: Sequence[Resampled], rows: Sequence[BatchRow], written_by: int) -> None:
        """Keep every attempt of the step under way. Raises RunHalted when too many ended by service failures."""
        step = self.progress.step + 1
        if self.recipe.run.save_rollouts:
            with self.meter.phase("record"):
                records = attempt_records(chosen, rows, policy_version=written_by)
                self.tracker.record_attempts(step, records)
        groups = [one.group for one in chosen]
        share, first = faults = faults_of(groups)
        if first:
            self.tracker.event("faults", step=step, share=share, first=first)
        failed, message = failures = failed_agents(groups)
        if message:
            self.tracker.event("agent_failures", step=step, share=failed, first=message)
        if why := reason_to_halt(faults, failures, self.recipe.run.fault_budget):
            raise RunHalted(f"step {step}: {why}; mend that and run: rocstar train --resume {self.folder.argument}")

    def tell_calls(self, step: int) -> None:
        """Report how many finished calls a step reused from before a kill."""
        if self.calls and (there := self.calls.engines[step].there):
            taken = self.calls.engines[step].taken
            self.tracker.event("calls_taken", step=step, taken=taken, there=there)
            self.screen.note(f"step {step}: {taken} of the {plural(there, 'finished call')} on record were reused")

    def finish(self) -> None:
        """Write the summary."""
        self.tracker.flush()
        rows = [*read_journal(self.folder.metrics), self.meter.take()]
        write_json(self.folder.summary, summary_of(self.folder.evaluations(), rows))
        if self.calls:
            self.calls.close()
