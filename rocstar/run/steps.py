"""The steps of a stage in order: what is recorded, judged and saved after each. The step itself is in
`rocstar/train.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rocstar.config.sections import Stage
from rocstar.errors import RunHalted
from rocstar.learning.update import Updater
from rocstar.record.journal import read_journal
from rocstar.run.alarms import new_alarms
from rocstar.run.run import Run
from rocstar.run.stages import expected_steps, why_over
from rocstar.support.screen import plural

TRAINER_PHASES = ("rollout", "learning", "record", "sft")


class StageSteps:
    """The steps of the stage under way."""

    def __init__(self, run: Run, stage: Stage, learner: Updater) -> None:
        self._run, self._stage, self._learner = run, stage, learner
        self._rows: list[Mapping[str, Any]] = [r for r in read_journal(run.folder.metrics) if r["stage"] == stage.name]
        self._began = 0.0

    def left(self) -> Iterator[int]:
        """Numbers of the steps that are not done; the stage's first step is 0. Raises KeyboardInterrupt after a step in
        which a stop was requested; `done` has saved the run by then."""
        run, progress = self._run, self._run.progress
        run.checkpoints.start_clock()
        while progress.stage_step < self._stage.steps and not progress.stage_complete:
            run.policy.ranks.check()
            self._began = time.monotonic()
            yield progress.stage_step
            if run.stopper.asked:
                raise KeyboardInterrupt

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within this context an evaluation does not count as the step's time."""
        before = time.monotonic()
        yield
        self._began += time.monotonic() - before

    def done(self, metrics: Mapping[str, float]) -> None:
        """Record a finished step; save when due, at the stage's end and when a stop is requested."""
        with self._run.stopper.holding():
            self._done(metrics)

    def _done(self, metrics: Mapping[str, float]) -> None:
        run, stage, progress = self._run, self._stage, self._run.progress
        row = self._row(metrics)
        progress.stage_step += 1
        progress.step += 1
        progress.policy_version = run.policy.version
        run.tracker.log(progress.step, row)
        self._rows.append(row)
        expected = expected_steps(stage.end, stage.steps, self._rows)
        run.screen.step(stage.name, progress.stage_step, stage.steps, row, expected)
        tools = any(rollout.has_tools for rollout in stage.rollouts)
        for alarm in new_alarms(self._rows, tools=tools, steps=stage.steps) if stage.rollouts else ():
            run.tracker.event("warning", step=progress.step, **asdict(alarm))
            run.screen.note(f"warning: {stage.name}: {alarm.evidence}; {alarm.action}")
        over = self._why_over()
        if over and not self._learner.updates and any(r.get("learn/skipped") or r.get("skipped") for r in self._rows):
            said = f"stage {stage.name} learnt nothing: no update of it had a finite gradient"
            raise RunHalted(f"{said}; take a model with sound weights, or correct your loss or reward, and begin again")
        if over:
            steps = progress.stage_step
            run.tracker.event("stage_end", name=stage.name, step=progress.step, steps=steps, reason=over)
            if steps < stage.steps:
                run.screen.note(f"{stage.name} is over after {steps} of at most {plural(stage.steps, 'step')}: {over}")
        # Saved before an evaluation, which may take longer than a step: after a kill the run resumes with it.
        evaluates = stage.rollouts and run.recipe.evaluate.is_due_after(progress.stage_step)
        if over or evaluates or run.checkpoints.is_due() or run.stopper.asked:
            run.save(self._learner, complete=over is not None)
        if over:
            run.folder.end_request.unlink(missing_ok=True)  # only now: a kill before this must find it again

    def _row(self, metrics: Mapping[str, float]) -> dict[str, float]:
        row = {"stage_step": self._run.progress.stage_step + 1, **metrics, **self._run.meter.take()}
        row["step/trainer_cpu_seconds"] = sum(row.get(f"cpu/{phase}", 0.0) for phase in TRAINER_PHASES)
        row["step/seconds"] = time.monotonic() - self._began
        row["step/tokens_per_second"] = metrics["step/tokens"] / max(row["step/seconds"], 1e-9)
        return row

    def _why_over(self) -> str | None:
        stage, run = self._stage, self._run
        if run.progress.stage_step == stage.steps:
            return f"it has made its {plural(stage.steps, 'step')}"
        if run.folder.asks_to_end(stage.name):
            return "a person requested it"
        return why_over(stage.end, self._rows)


@contextmanager
def steps_of(run: Run, stage: Stage, learner: Updater) -> Iterator[StageSteps]:
    """The steps of a stage. Within this context a Ctrl-C keeps finished steps."""
    with run.stopper.finishing(run.is_half_changed):
        try:
            yield StageSteps(run, stage, learner)
        except (KeyboardInterrupt, asyncio.CancelledError):
            unsaved = run.progress.stage_step and not run.checkpoints.is_saved()
            if run.stopper.asked and unsaved and not run.is_half_changed():
                with run.stopper.holding():
                    run.save(learner, complete=False)
            raise
