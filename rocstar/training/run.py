"""A run under way: what its stages share, how far it is, and what it keeps: checkpoints, evaluations, the summary.

Not here: what a stage's step does (`rocstar/train.py`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rocstar.config import Recipe, Stage
from rocstar.errors import RunHalted
from rocstar.evaluation.evaluate import Protocol, evaluate_policy
from rocstar.launch import Stopper
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.sft import SftLearner
from rocstar.runs.atomic import write_json
from rocstar.runs.folder import RunFolder
from rocstar.runs.journal import read_journal
from rocstar.runs.show import summary_of
from rocstar.runs.tracker import RunTracker
from rocstar.screen import Screen
from rocstar.training.assemble import Workshop, make_roller, weights_folder
from rocstar.training.checkpoints import Progress, prune, save
from rocstar.training.meter import Meter
from rocstar.training.tasks import Task

TRAINER_PHASES = ("rollout", "learning", "record", "sft")


@dataclass(slots=True, kw_only=True)
class Run:
    """What all stages share."""

    recipe: Recipe
    folder: RunFolder
    screen: Screen
    stopper: Stopper
    meter: Meter
    task: Task
    workshop: Workshop
    tracker: RunTracker
    progress: Progress
    checkpoint: Path | None
    """Where learner state is restored from: the newest checkpoint."""
    saved_at: float = 0.0
    """Monotonic time of it, seconds."""

    @property
    def stages_done(self) -> int:
        return self.progress.stage + self.progress.stage_complete

    def rl_before(self, number: int) -> bool:
        """Whether RL has changed the policy before stage `number` starts or goes on."""
        under_way = self.progress.stage == number and self.progress.stage_step > 0
        return under_way or any(stage.kind == "rl" for stage in self.recipe.stage[:number])

    def enter(self, number: int, stage: Stage) -> None:
        if self.progress.stage != number:
            self.progress = Progress(stage=number, step=self.progress.step, policy_version=self.workshop.policy.version)
        self.tracker.start_stage(stage.name, stage.kind, stage.steps)
        self.saved_at = time.monotonic()

    async def repeat(
        self,
        stage: Stage,
        learner: SftLearner | GrpoLearner,
        step: Callable[[int], Awaitable[Mapping[str, float]]],
    ) -> None:
        """Run a stage's steps from where it stands; save now and then, at its end and when asked to stop."""
        while self.progress.stage_step < stage.steps:
            metrics = {**await step(self.progress.stage_step), **self.meter.take()}
            metrics["step/trainer_cpu_seconds"] = sum(metrics.get(f"cpu/{phase}", 0.0) for phase in TRAINER_PHASES)
            self.progress.stage_step += 1
            self.progress.step += 1
            self.progress.policy_version = self.workshop.policy.version
            self.tracker.log(self.progress.step, {"stage_step": self.progress.stage_step, **metrics})
            self.screen.step(stage.name, self.progress.stage_step, stage.steps, metrics)
            done = self.progress.stage_step == stage.steps
            due = time.monotonic() - self.saved_at >= self.recipe.run.checkpoint_seconds
            if done or due or self.stopper.asked:
                self.save(learner, complete=done)
            if self.stopper.asked:
                raise KeyboardInterrupt

    def save(self, learner: SftLearner | GrpoLearner, *, complete: bool) -> None:
        """Raises RunHalted when an earlier write failed: a checkpoint newer than the record would hide the hole."""
        self.tracker.flush()
        if self.tracker.failure:
            raise RunHalted(f"{self.tracker.failure} with: rocstar train --resume {self.folder.name}")
        self.progress.stage_complete = complete
        save(self.folder, self.progress, self.workshop.policy, learner)
        prune(self.folder, self.recipe.run.keep_checkpoints)
        self.checkpoint = self.folder.checkpoint(self.progress.step)
        self.saved_at = time.monotonic()

    async def evaluate(self, name: str, stage: Stage) -> None:
        """Evaluate on the held-out problems with the settings of `stage`, once."""
        problems = self.task.heldout()
        folder = self.folder.evaluation(name, self.progress.step)
        if not problems or (folder / "result.json").exists():
            return
        self.screen.stage(name, f"evaluation on {len(problems)} held-out problems")
        with self.meter.phase("evaluation"):
            weights = self.workshop.policy.publish(weights_folder(self.folder.path))
            await self.workshop.engine.load_weights(weights)
            roller = make_roller(self.workshop, stage.rollout, stage.sandbox, stage.evaluate)
            protocol = Protocol(
                attempts=stage.evaluate.attempts,
                temperature=stage.evaluate.temperature,
                greedy=stage.evaluate.greedy,
                seed=self.recipe.run.seed,
            )
            await evaluate_policy(roller, problems, protocol, folder=folder, step=self.progress.step)

    def finish(self) -> None:
        """Write the summary."""
        self.tracker.flush()
        results = {name: result for name, _, result in self.folder.evaluations()}
        summary = summary_of(results, [*read_journal(self.folder.metrics), self.meter.take()])
        write_json(self.folder.summary, summary)
