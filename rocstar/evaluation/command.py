"""`rocstar eval`: a subject against a file of problems or a benchmark. The caller prints results, they are saved here.

What an evaluation has asked is kept in its folder as it comes (`recall.py`): the same command, given again after a
kill, asks only for what is missing."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rocstar.cluster.here import Machines
from rocstar.cluster.start import opened_machines
from rocstar.errors import ConfigError
from rocstar.evaluation.asked import Asked, Judging
from rocstar.evaluation.chat_client import ChatClient, EndpointJudge
from rocstar.evaluation.evaluate import Evaluation, Protocol, evaluate_policy
from rocstar.evaluation.recall import Recall
from rocstar.evaluation.setup import CIRCUMSTANCES, name_of, setup_of
from rocstar.evaluation.source import ProblemSource
from rocstar.record.atomic import plain
from rocstar.record.evaluations import label_of
from rocstar.rollout.collect import Roller
from rocstar.support.screen import Screen
from rocstar.support.watch import RUN, Patience, Stall, Watch, watching
from rocstar.types import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeEndpoint:
    """Who judges a benchmark that needs a judge."""

    url: str
    model: str
    key: str | None
    parallel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One evaluation that was checked, with the place of its result: nothing is left to find out but what the subject
    says."""

    asked: Asked
    source: ProblemSource
    protocol: Protocol
    judge: JudgeEndpoint | None
    problems: Sequence[Problem]
    positions: int
    """Tokens of the longest attempt, as `Asked.fitted`."""
    lowered: bool
    """Nobody asked for a cap on tokens, and the usual one does not fit into the model."""
    setup: Mapping[str, Any]
    finished: Sequence[Path]
    """Where the same evaluation lies that was made before, the newest last."""
    folder: Path
    """Where this one goes, or went on until it was killed."""

    @property
    def last(self) -> Mapping[str, Any] | None:
        """The newest finished result, if it was made by the same versions of everything."""
        if not self.finished:
            return None
        result: Mapping[str, Any] = json.loads((self.finished[-1] / "result.json").read_text())
        same = all(result["setup"].get(name) == plain(self.setup[name]) for name in CIRCUMSTANCES)
        return result if same else None


def prepare(asked: Asked, source: ProblemSource, protocol: Protocol, judge: JudgeEndpoint | None) -> Prepared:
    """Everything that needs no model is checked. Raises ConfigError, DataError."""
    problems = source.problems()
    _refuse_missing_judge(source, judge)
    _refuse_unwritable(next(asked.places(source.stem)))
    cap = asked.recipe.rollout.max_response_tokens
    asked, positions = asked.fitted(problems, source.kind)
    setup = _setup(asked, source, protocol, judge, problems)
    places = asked.places(name_of(setup, source.stem, known=asked.known))
    finished: list[Path] = []
    while ((folder := next(places)) / "result.json").exists():
        finished.append(folder)
    return Prepared(
        asked=asked,
        source=source,
        protocol=protocol,
        judge=judge,
        problems=problems,
        positions=positions,
        lowered=asked.recipe.rollout.max_response_tokens < cap,
        setup=setup,
        finished=finished,
        folder=folder,
    )


def _setup(
    asked: Asked,
    source: ProblemSource,
    protocol: Protocol,
    judge: JudgeEndpoint | None,
    problems: Sequence[Problem],
) -> dict[str, Any]:
    recipe = asked.recipe
    made = setup_of(
        recipe,
        recipe.rollout,
        asked.conversation(source.kind),
        problems,
        protocol,
        model=asked.name,
        step=asked.step,
        data=source.described(),
        engine=asked.engine(),
    )
    return {**made, **({"judge": {"endpoint": judge.url, "model": judge.model}} if judge else {})}


def kept(prepared: Prepared, result: Mapping[str, Any], screen: Screen) -> dict[str, Any]:
    """A finished evaluation as it lies there."""
    screen.note(f"{prepared.source.title} is finished in {prepared.finished[-1]} and is not made again")
    return _told(prepared, result, prepared.finished[-1])


def evaluate(prepared: Prepared, screen: Screen) -> dict[str, Any]:
    """Figures of an evaluation: avg@k, pass@k, maj@k with 95% intervals clustered by problem, lengths and tool use, and
    the benchmark's own; docs/evaluation.md says where they are kept. Raises ConfigError, DataError, and RunHalted past
    the fault budget."""
    asked, folder = prepared.asked, prepared.folder
    recall = Recall(folder)
    try:
        with opened_machines(asked.recipe, asked.proof, learns=False) as machines:
            screen.stage("eval", _said(prepared))
            if prepared.lowered:
                screen.note(_said_cap(prepared))
            if recall.found:
                screen.note(f"{recall.found} answers are there from an earlier start; only what is missing is asked")
            made = asyncio.run(_evaluate(prepared, recall, machines, screen))
        note = asked.contamination(prepared.problems, prepared.source.title)
        made = replace(made, result={**made.result, "contamination": note})
        made.write(folder, asked.step)
        recall.forget()
    finally:
        recall.close()
    _tell_kept(made, prepared, screen)
    return _told(prepared, made.result, folder)


def _said(prepared: Prepared) -> str:
    asked, problems, protocol = prepared.asked, prepared.problems, prepared.protocol
    twice = len(problems) - len({problem.id for problem in problems})
    repeats = f" ({twice} of them repeat a question)" if twice else ""
    rollout, one_turn = asked.recipe.rollout, prepared.source.kind is not None and prepared.source.kind.one_turn
    words, tools = asked.said
    return (
        f"{len(problems)} problems{repeats} x {protocol.attempts} attempts at temperature {protocol.temperature:g}, "
        f"{words}, at most {rollout.max_response_tokens} tokens and {rollout.max_turns} turns, "
        f"{'one turn without tools' if one_turn else tools}, verifier {asked.recipe.evaluate.verifier}"
    )


def _said_cap(prepared: Prepared) -> str:
    cap = prepared.asked.recipe.rollout.max_response_tokens
    return (
        f"at most {cap:,} tokens an attempt, because the longest prompt leaves no more of the {prepared.positions:,} "
        "positions of the model; --max-response-tokens sets another cap"
    )


async def _evaluate(prepared: Prepared, recall: Recall, machines: Machines, screen: Screen) -> Evaluation:
    recipe, judged_by, watch = prepared.asked.recipe, prepared.judge, Watch()

    def tell(stall: Stall, stacks: str) -> None:
        screen.note(f"{stall.report()}\n\n{stacks}")

    async with AsyncExitStack() as closing:
        judge = None
        if judged_by:
            client = ChatClient(judged_by.url, judged_by.model, key=judged_by.key, parallel=judged_by.parallel)
            closing.push_async_callback(client.close)
            judge = EndpointJudge(client)
        judging = Judging(kind=prepared.source.kind, recall=recall, judge=judge)
        solver, load = await closing.enter_async_context(prepared.asked.opened(prepared.positions, machines, judging))
        if isinstance(solver, Roller) and load is not None:
            watch.load = load
            watch.note(RUN, "evaluation")
            closing.enter_context(screen.never_silent(watch.doing))
            closing.enter_context(watching(watch, Patience.of_run(recipe.run), tell))
            solver = replace(solver, note=watch.note)
        return await evaluate_policy(
            solver,
            prepared.problems,
            prepared.protocol,
            fault_budget=recipe.run.fault_budget,
            setup=prepared.setup,
            said=screen.attempted,
            recall=recall,
            figures=getattr(solver.verifier, "figures", lambda groups: {}),
        )


def _tell_kept(made: Evaluation, prepared: Prepared, screen: Screen) -> None:
    if prepared.finished:
        screen.note(f"the same evaluation was made before, in {prepared.finished[0]}; this one is kept beside it")
    if missing := made.result["environment_failed"]:
        attempts = made.result["attempts"]
        screen.note(
            f"{missing} of {attempts} attempts ended by failures outside the model and are in none of the figures"
        )
    screen.note(f"saved as {label_of(prepared.folder, prepared.asked.runs)} in {prepared.folder}")


def _refuse_missing_judge(source: ProblemSource, judge: JudgeEndpoint | None) -> None:
    if source.kind is not None and source.kind.needs_judge and judge is None:
        raise ConfigError(
            f"benchmark {source.title} is scored by a judge; name its endpoint with --judge and --judge-model"
        )


def _refuse_unwritable(folder: Path) -> None:
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"the result cannot be kept in {folder.parent}: {there} cannot be written to; change --runs")


def _told(prepared: Prepared, result: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What a person asked for: `accuracy` and `greedy` are run-folder names for figures that stand here as avg@n."""
    public = {name: value for name, value in result.items() if name not in ("accuracy", "greedy", "transcripts")}
    label = label_of(folder, prepared.asked.runs)
    return {
        "evaluation": label,
        "model": prepared.asked.name,
        "data": prepared.source.title,
        "saved": str(folder),
        **public,
    }
