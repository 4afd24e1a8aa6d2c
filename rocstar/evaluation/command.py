"""`rocstar eval`: runs the evaluations of an EvalSpec, all checked before the first begins, and saves them.

An evaluation saves its answers as they arrive (`recall.py`): the same command, repeated after a kill, asks only the
missing ones. Results are saved here; the caller prints them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from rocstar.cluster import Machines, opened_machines
from rocstar.config.layers import key_of
from rocstar.config.recipe import changed
from rocstar.config.sections import Recipe
from rocstar.config.values import drawable
from rocstar.dialogue.template import SYSTEM
from rocstar.errors import ConfigError
from rocstar.evaluation.benchmark import find_benchmarks
from rocstar.evaluation.chat_client import ChatClient
from rocstar.evaluation.contamination import note_of
from rocstar.evaluation.endpoint import EndpointSolver, ToolStyle
from rocstar.evaluation.evaluate import CIRCUMSTANCES, Evaluation, Protocol, evaluate_policy, name_of, setup_of
from rocstar.evaluation.kinds import ProblemSet, read_benchmark, read_file
from rocstar.evaluation.recall import Recall
from rocstar.evaluation.spec import ENDPOINT_KEY, JUDGE_KEY, OPTIONS, EvalSpec
from rocstar.evaluation.subject import EndpointModel, LocalModel, Subject, find_subject, refuse_unread
from rocstar.parts.modelfolder import identity_of
from rocstar.record.atomic import plain
from rocstar.record.evaluations import RESULT, label_of, model_folder
from rocstar.record.folder import numbered, read_json
from rocstar.rollout.collect import Roller
from rocstar.support.chat_http import check_address
from rocstar.support.screen import Screen, plural
from rocstar.support.watch import RUN, Stall, Watch, Watching

PARALLEL = 32  # requests at once to an endpoint
HOLDS = "holds"
"""Key of a setup: hashes of the model's files. Not part of the evaluation's name, which is constant for a folder."""
OF_WEIGHTS = ("model.", "run.threads", "rollout.engine_rows", "rollout.kv_tokens", "rollout.engine_patience_seconds",
              "rollout.template", "rollout.environment", "rollout.top_k")  # fmt: skip
"""Prefixes of keys about local weights, or their conversation."""
OF_TOOLS = ("rollout.max_turns", "rollout.max_parallel_calls", "rollout.tool_name", "rollout.feedback", "sandbox.tools")
"""Prefixes of keys about tools that run here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEvaluation:
    """One checked evaluation, ready to run."""

    spec: EvalSpec
    subject: Subject
    problem_set: ProblemSet
    protocol: Protocol
    positions: int
    """Tokens of the longest attempt, from `Subject.fitted`."""
    lowered: bool
    """Whether the default token cap was lowered, because it does not fit into the model."""
    setup: Mapping[str, Any]
    finished: Sequence[Path]
    """Folders of earlier runs of the same evaluation, the newest last."""
    folder: Path
    """Folder of this one, perhaps with the journal of a killed start."""

    @property
    def last(self) -> Mapping[str, Any] | None:
        """The newest finished result, if the same versions made it."""
        if not self.finished:
            return None
        result = read_json(self.finished[-1] / RESULT)
        same = all(result["setup"].get(name) == plain(self.setup.get(name)) for name in (*CIRCUMSTANCES, HOLDS))
        return result if same else None


def evaluations(spec: EvalSpec, screen: Screen) -> Iterator[dict[str, Any]]:
    """Yields each result as it is made. If an earlier command was killed after some of its benchmarks, their results
    are reused; after a completed command all are made again, beside the old ones. Raises ConfigError, DataError, and
    RunHalted past the fault budget."""
    sets = _problem_sets(spec)
    _refuse_unread(spec, sets)
    planned = [_planned(spec, problem_set) for problem_set in sets]
    rounds = [len(one.finished) for one in planned]
    for one, finished in zip(planned, rounds, strict=True):
        is_ahead = finished == max(rounds) > min(rounds)  # made once more than this command's others
        result = one.last if is_ahead else None
        if result is None:
            yield _carried_out(one, screen)
        else:
            screen.note(f"{one.problem_set.title} is finished in {one.finished[-1]} and is not made again")
            yield _public(one, result, one.finished[-1])


# Sets of problems


def _problem_sets(spec: EvalSpec) -> list[ProblemSet]:
    if spec.data is not None and spec.benchmark is None:
        if spec.data_folder is not None or spec.accept_rows:
            raise ConfigError("--data-folder and --accept-rows belong to --benchmark; leave them out with --data")
        return [read_file(spec.data, spec.columns, spec.answer, spec.limit)]
    if spec.data is not None or spec.benchmark is None:
        raise ConfigError("give either --data FILE or --benchmark NAMES; see rocstar eval --help")
    if spec.question is not None or spec.answer != "answer":
        raise ConfigError("a benchmark names its columns itself; leave out --question and --answer")
    return [
        read_benchmark(one, spec.data_folder, limit=spec.limit, accept=spec.accept_rows)
        for one in find_benchmarks(spec.benchmark)
    ]


def _refuse_unread(spec: EvalSpec, sets: Sequence[ProblemSet]) -> None:
    """Raises ConfigError for options without effect, and for a judge without name or address."""
    for name, value in (("--tools", spec.tools), ("--system", spec.system)):
        if spec.endpoint is None and value is not None:
            raise ConfigError(f"{name} is about an endpoint; leave it out, or name one with --endpoint")
    if spec.endpoint is None and spec.judge is None and spec.parallel is not None:
        raise ConfigError("--parallel is about an endpoint; rollout.engine_rows is how many attempts an engine makes")
    if spec.judge is not None and not any(problem_set.kind.needs_judge for problem_set in sets):
        raise ConfigError("--judge is given, and no benchmark here needs a judge; leave it out")
    for key, option in _changes(spec):
        if spec.endpoint is not None and key.startswith(OF_WEIGHTS):
            raise ConfigError(f"{option} has no effect on an endpoint; leave it out")
        if spec.tools == "none" and key.startswith(OF_TOOLS):
            raise ConfigError(f"{option} has no effect with --tools none; leave it out")
        for problem_set in sets:
            if problem_set.kind.leaves_unread(key):
                raise ConfigError(f"{option} has no effect on benchmark {problem_set.title}; leave it out")
    if spec.judge is not None and spec.judge_model is None:
        raise ConfigError("--judge needs the judge's name there; give it with --judge-model")
    if spec.judge is not None:
        check_address(spec.judge.rstrip("/"))


def _changes(spec: EvalSpec) -> Iterator[tuple[str, str]]:
    """(key, option as the user typed it)."""
    yield from ((key_of(text), text) for text in spec.settings or ())
    yield from ((key_of(text), words) for text, words in spec.options.items())
    if spec.system is not None:
        yield "rollout.preamble", "--system"  # the text around a question too


# Checks that need no model


def _planned(spec: EvalSpec, problem_set: ProblemSet) -> PlannedEvaluation:
    """Raises ConfigError, DataError."""
    subject = _subject(spec, [*problem_set.protocol.settings, *(spec.settings or ())])
    rollout = subject.recipe.rollout
    protocol = Protocol(
        attempts=problem_set.protocol.attempts if spec.n is None else spec.n,
        temperature=problem_set.protocol.temperature if spec.temperature is None else spec.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=subject.recipe.run.seed,
    )
    try:
        drawable(protocol.temperature)
    except ValueError as error:
        raise ConfigError(f"--temperature {error}") from None
    if spec.endpoint is None and (problem := subject.recipe.copies(protocol.attempts, protocol.temperature)):
        raise ConfigError(problem)
    if problem_set.kind.needs_judge and spec.judge is None:
        raise ConfigError(
            f"benchmark {problem_set.title} is scored by a judge; name its endpoint with --judge and --judge-model"
        )
    _refuse_unwritable(next(_places(spec, subject, problem_set.stem)))
    subject, positions = subject.fitted(problem_set.problems, problem_set.kind)
    setup = setup_of(
        subject.recipe,
        subject.recipe.rollout,
        subject.conversation(problem_set.kind),
        problem_set.problems,
        protocol,
        model=subject.name,
        step=subject.step,
        data=problem_set.described,
        engine=subject.engine(),
    )
    if problem_set.kind.needs_judge and spec.judge is not None:
        setup["judge"] = {"endpoint": spec.judge.rstrip("/"), "model": spec.judge_model}
    if isinstance(subject, LocalModel):
        setup[HOLDS] = identity_of(subject.model)
    known = (HOLDS, "model", "step") if subject.run else (HOLDS,)  # a run's folder implies the others
    places = _places(spec, subject, name_of(setup, problem_set.stem, known=known))
    finished: list[Path] = []
    while ((folder := next(places)) / RESULT).exists():
        finished.append(folder)
    return PlannedEvaluation(
        spec=spec,
        subject=subject,
        problem_set=problem_set,
        protocol=protocol,
        positions=positions,
        lowered=subject.recipe.rollout.max_response_tokens < rollout.max_response_tokens,
        setup=setup,
        finished=finished,
        folder=folder,
    )


def _subject(spec: EvalSpec, settings: Sequence[str]) -> Subject:
    capped = OPTIONS["max_response_tokens"] in map(key_of, (*settings, *spec.options))
    if spec.endpoint is None:
        local = find_subject(spec.model, spec.runs, settings, spec.options, spec.answer)
        return replace(local, capped=capped or local.run is not None)
    if spec.tools not in (None, *get_args(ToolStyle)):
        raise ConfigError(f"--tools {spec.tools} is none of {', '.join(get_args(ToolStyle))}")
    bare = spec.tools == "none"  # an agent builds its own conversation
    given = ['rollout.preamble=""', *settings] if bare else settings
    refuse_unread(given, spec.options)
    recipe = changed(Recipe(), given, spec.options)
    if bare:
        recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"max_turns": 1})})
    return EndpointModel(
        url=spec.endpoint.rstrip("/"),
        name=spec.model,
        key=os.environ.get(ENDPOINT_KEY) or None,  # empty counts as none
        parallel=spec.parallel or PARALLEL,
        tools=cast(ToolStyle, spec.tools or "openai"),
        recipe=recipe,
        capped=capped,
        system=(None if bare else SYSTEM) if spec.system is None else spec.system or None,
    )


def _places(spec: EvalSpec, subject: Subject, stem: str) -> Iterator[Path]:
    """Candidate folders for an evaluation of that name, in order of preference."""
    for part in numbered(stem):
        if subject.run:
            yield subject.run.evaluation(part, subject.step)
        else:
            yield model_folder(spec.runs, subject.folder) / part


def _refuse_unwritable(folder: Path) -> None:
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"the result cannot be kept in {folder.parent}: {there} cannot be written to; change --runs")


# Running


def _carried_out(planned: PlannedEvaluation, screen: Screen) -> dict[str, Any]:
    """Its figures: avg@k, pass@k, maj@k with 95% intervals clustered by problem, lengths and tool use, and the
    benchmark's own; docs/evaluation.md says where they are saved. Raises RunHalted past the fault budget."""
    subject, problem_set = planned.subject, planned.problem_set
    with Recall(planned.folder, name_of(planned.setup, problem_set.stem)) as recall:
        weights = Path(subject.name) / "config.json"  # an endpoint has none, and machines never read it then
        calls = subject.recipe.calls_tools and not problem_set.kind.one_turn
        with opened_machines(subject.recipe, weights, subject.placement, calls=calls) as machines:
            screen.stage("eval", _said(planned))
            if planned.lowered:
                screen.note(
                    f"at most {subject.recipe.rollout.max_response_tokens:,} tokens an attempt, because the longest "
                    f"prompt leaves no more of the {planned.positions:,} positions of the model; "
                    "--max-response-tokens sets another cap"
                )
            if recall.found:
                screen.note(f"{recall.found} answers exist from an earlier start; only missing ones are requested")
            evaluation = asyncio.run(_evaluated(planned, recall, machines, screen))
        note = note_of(subject.run, subject.step, (one.question for one in problem_set.problems), problem_set.title)
        evaluation = replace(evaluation, result={**evaluation.result, "contamination": note})
        evaluation.write(planned.folder, subject.step, subject.version)
        recall.forget()
    _tell_kept(evaluation, planned, screen)
    return _public(planned, evaluation.result, planned.folder)


def _said(planned: PlannedEvaluation) -> str:
    problems, protocol, recipe = planned.problem_set.problems, planned.protocol, planned.subject.recipe
    twice = len(problems) - len({problem.id for problem in problems})
    repeats = f" ({twice} of them repeat a question)" if twice else ""
    words, tools = planned.subject.said
    attempts, turns = plural(protocol.attempts, "attempt"), plural(recipe.rollout.max_turns, "turn")
    return (
        f"{len(problems)} problems{repeats} x {attempts} at temperature {protocol.temperature:g}, "
        f"{words}, at most {recipe.rollout.max_response_tokens} tokens and {turns}, "
        f"{'one turn without tools' if planned.problem_set.kind.one_turn else tools}, "
        f"verifier {recipe.evaluate.verifier}"
    )


async def _evaluated(planned: PlannedEvaluation, recall: Recall, machines: Machines, screen: Screen) -> Evaluation:
    spec, subject, kind = planned.spec, planned.subject, planned.problem_set.kind
    watch = Watch(timeout_seconds=subject.recipe.sandbox.timeout_seconds)

    def tell(stall: Stall, stacks: str) -> None:
        screen.note(f"{stall.report()}\n\n{stacks}")

    async with AsyncExitStack() as closing:
        judge = None
        if kind.needs_judge:
            assert spec.judge is not None and spec.judge_model is not None
            parallel = spec.parallel or PARALLEL
            judge = ChatClient(spec.judge, spec.judge_model, key=os.environ.get(JUDGE_KEY) or None, parallel=parallel)
            judge.first = recall.first
            closing.push_async_callback(judge.close)
        attempts = len(planned.problem_set.problems) * planned.protocol.attempts
        usual: Roller | EndpointSolver = await closing.enter_async_context(
            subject.opened(planned.positions, machines.sandbox, attempts=attempts, start_server=machines.start_server)
        )
        if isinstance(usual, EndpointSolver):
            usual.client.first = recall.first
        solver = kind.solver(usual, recall, judge)
        if isinstance(solver, Roller):
            watch.load = solver.engine.load
            watch.note(RUN, "evaluation")
            closing.enter_context(screen.never_silent(watch.doing))
            closing.enter_context(Watching(watch, subject.recipe.run, tell))
            solver = replace(solver, note=watch.note)
        return await evaluate_policy(
            solver,
            planned.problem_set.problems,
            planned.protocol,
            fault_budget=subject.recipe.run.fault_budget,
            setup=planned.setup,
            progress=screen.attempted,
            recall=recall,
        )


def _tell_kept(evaluation: Evaluation, planned: PlannedEvaluation, screen: Screen) -> None:
    if planned.finished:
        before = read_json(planned.finished[0] / RESULT)["setup"].get(HOLDS)
        other = ", of other weights or with another tokenizer" if before not in (None, planned.setup.get(HOLDS)) else ""
        screen.note(f"the same evaluation was made before{other}, in {planned.finished[0]}; this one is kept beside it")
    if missing := evaluation.result["environment_failed"]:
        counts = f"{missing} of {evaluation.result['attempts']} attempts"
        screen.note(f"{counts} ended by failures outside the model and are in none of the figures")
    screen.note(f"saved as {label_of(planned.folder, planned.spec.runs)} in {planned.folder}")


def _public(planned: PlannedEvaluation, result: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The result for the user: the run folder's `accuracy` and `greedy` appear here as avg@n."""
    return {
        "evaluation": label_of(folder, planned.spec.runs),
        "model": planned.subject.name,
        "data": planned.problem_set.title,
        "saved": str(folder),
        **{name: value for name, value in result.items() if name not in ("accuracy", "greedy", "transcripts")},
    }
