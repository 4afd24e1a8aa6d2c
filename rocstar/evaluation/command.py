"""`rocstar eval`: from an EvalSpec to evaluations that are checked before the first begins, carried out and kept.

What an evaluation has asked is kept in its folder as it comes (`recall.py`): the same command, given again after a
kill, asks only for what is missing. The caller prints results, they are saved here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from rocstar.cluster.here import Machines
from rocstar.cluster.start import opened_machines
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
from rocstar.evaluation.subject import EndpointModel, LocalModel, Subject, find_subject, settings_in_force
from rocstar.parts.modelfolder import identity_of
from rocstar.record.atomic import plain
from rocstar.record.evaluations import RESULT, label_of, model_folder
from rocstar.record.folder import numbered, read_json
from rocstar.rollout.collect import Roller
from rocstar.support.chat_http import check_address
from rocstar.support.screen import Screen
from rocstar.support.watch import RUN, Stall, Watch, Watching

PARALLEL = 32  # requests at once to an endpoint
HOLDS = "holds"
"""Of a setup: what the model's folder holds. Not in the evaluation's name, which is the same for a folder."""
OF_WEIGHTS = ("model.", "run.threads", "rollout.engine_rows", "rollout.kv_tokens", "rollout.engine_patience_seconds",
              "rollout.template", "rollout.environment", "rollout.top_k")  # fmt: skip
"""How keys begin that say something about weights of ours, or about their conversation."""
OF_TOOLS = ("rollout.max_turns", "rollout.max_parallel_calls", "rollout.tool_name", "rollout.feedback", "sandbox.tools")
"""How keys begin that say something about tools that run here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEvaluation:
    """One evaluation that was checked: nothing is left to find out but what the subject says."""

    spec: EvalSpec
    subject: Subject
    asked: ProblemSet
    protocol: Protocol
    positions: int
    """Tokens of the longest attempt, as `Subject.fitted` says."""
    lowered: bool
    """Nobody asked for a cap on tokens, and the usual one does not fit into the model."""
    setup: Mapping[str, Any]
    finished: Sequence[Path]
    """Folders of the same evaluation that was made before, the newest last."""
    folder: Path
    """Folder of this one, with the journal of an earlier start that was killed."""

    @property
    def last(self) -> Mapping[str, Any] | None:
        """The newest finished result, if it was made by the same versions of everything."""
        if not self.finished:
            return None
        result = read_json(self.finished[-1] / RESULT)
        same = all(result["setup"].get(name) == plain(self.setup.get(name)) for name in (*CIRCUMSTANCES, HOLDS))
        return result if same else None


def evaluations(spec: EvalSpec, screen: Screen) -> Iterator[dict[str, Any]]:
    """The result of each, as it is made. Where a command was killed after some of its benchmarks, those are taken as
    they lie there; one that had ended is made again beside. Raises ConfigError, DataError, and RunHalted past the fault
    budget."""
    sets = _problem_sets(spec)
    _refuse_unread(spec, sets)
    planned = [_planned(spec, asked) for asked in sets]
    rounds = [len(one.finished) for one in planned]
    for one, finished in zip(planned, rounds, strict=True):
        is_ahead = finished == max(rounds) > min(rounds)  # made once more than others of this command
        result = one.last if is_ahead else None
        if result is None:
            yield _carried_out(one, screen)
        else:
            screen.note(f"{one.asked.title} is finished in {one.finished[-1]} and is not made again")
            yield _public(one, result, one.finished[-1])


# What is asked


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
    """Raises ConfigError for what the person says and nothing would read, and for a judge without name or address."""
    for name, value in (("--tools", spec.tools), ("--system", spec.system)):
        if spec.endpoint is None and value is not None:
            raise ConfigError(f"{name} is about an endpoint; leave it out, or name one with --endpoint")
    if spec.endpoint is None and spec.judge is None and spec.parallel is not None:
        raise ConfigError("--parallel is about an endpoint; rollout.engine_rows is how many attempts an engine makes")
    if spec.judge is not None and not any(asked.kind.needs_judge for asked in sets):
        raise ConfigError("--judge is given, and nothing that is asked needs a judge; leave it out")
    for key, said in _changes(spec):
        if spec.endpoint is not None and key.startswith(OF_WEIGHTS):
            raise ConfigError(f"{said} says nothing to an endpoint; leave it out")
        if spec.tools == "none" and key.startswith(OF_TOOLS):
            raise ConfigError(f"{said} says nothing where --tools none leaves the tools to the endpoint; leave it out")
        for asked in sets:
            if asked.kind.leaves_unread(key):
                raise ConfigError(f"{said} says nothing to benchmark {asked.title}, which has its own; leave it out")
    if spec.judge is not None and spec.judge_model is None:
        raise ConfigError("--judge needs the judge's name there; give it with --judge-model")
    if spec.judge is not None:
        check_address(spec.judge.rstrip("/"))


def _changes(spec: EvalSpec) -> Iterator[tuple[str, str]]:
    """(key, as the person wrote it)."""
    yield from ((_key(text), text) for text in spec.settings or ())
    yield from ((_key(text), words) for text, words in spec.options.items())
    if spec.system is not None:
        yield "rollout.preamble", "--system"  # the words around a question as well


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()


# Everything that needs no model is checked


def _planned(spec: EvalSpec, asked: ProblemSet) -> PlannedEvaluation:
    """Raises ConfigError, DataError."""
    subject = _subject(spec, [*asked.protocol.settings, *(spec.settings or ())])
    rollout = subject.recipe.rollout
    protocol = Protocol(
        attempts=asked.protocol.attempts if spec.n is None else spec.n,
        temperature=asked.protocol.temperature if spec.temperature is None else spec.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=subject.recipe.run.seed,
    )
    try:
        drawable(protocol.temperature)
    except ValueError as error:
        raise ConfigError(f"--temperature {error}") from None
    if spec.endpoint is None and (told := subject.recipe.copies(protocol.attempts, protocol.temperature)):
        raise ConfigError(told)
    if asked.kind.needs_judge and spec.judge is None:
        raise ConfigError(
            f"benchmark {asked.title} is scored by a judge; name its endpoint with --judge and --judge-model"
        )
    _refuse_unwritable(next(_places(spec, subject, asked.stem)))
    subject, positions = subject.fitted(asked.problems, asked.kind)
    setup = setup_of(
        subject.recipe,
        subject.recipe.rollout,
        subject.conversation(asked.kind),
        asked.problems,
        protocol,
        model=subject.name,
        step=subject.step,
        data=asked.described,
        engine=subject.engine(),
    )
    if asked.kind.needs_judge and spec.judge is not None:
        setup["judge"] = {"endpoint": spec.judge.rstrip("/"), "model": spec.judge_model}
    if isinstance(subject, LocalModel):
        setup[HOLDS] = identity_of(subject.model)
    known = (HOLDS, "model", "step") if subject.run else (HOLDS,)  # the folder of a run says the others
    places = _places(spec, subject, name_of(setup, asked.stem, known=known))
    finished: list[Path] = []
    while ((folder := next(places)) / RESULT).exists():
        finished.append(folder)
    return PlannedEvaluation(
        spec=spec,
        subject=subject,
        asked=asked,
        protocol=protocol,
        positions=positions,
        lowered=subject.recipe.rollout.max_response_tokens < rollout.max_response_tokens,
        setup=setup,
        finished=finished,
        folder=folder,
    )


def _subject(spec: EvalSpec, settings: Sequence[str]) -> Subject:
    capped = OPTIONS["max_response_tokens"] in map(_key, (*settings, *spec.options))
    if spec.endpoint is None:
        local = find_subject(spec.model, spec.runs)
        recipe = settings_in_force(local.recipe, settings, spec.options)
        return replace(local, recipe=recipe, capped=capped or local.run is not None)
    if spec.tools not in (None, *get_args(ToolStyle)):
        raise ConfigError(f"--tools {spec.tools} is none of {', '.join(get_args(ToolStyle))}")
    bare = spec.tools == "none"  # an agent lays out its conversation itself
    recipe = settings_in_force(Recipe(), ['rollout.preamble=""', *settings] if bare else settings, spec.options)
    if bare:
        recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"max_turns": 1})})
    usual = None if bare else SYSTEM
    return EndpointModel(
        url=spec.endpoint.rstrip("/"),
        name=spec.model,
        key=_key_in(ENDPOINT_KEY),
        parallel=spec.parallel or PARALLEL,
        tools=cast(ToolStyle, spec.tools or "openai"),
        recipe=recipe,
        capped=capped,
        system=usual if spec.system is None else spec.system or None,
    )


def _key_in(variable: str) -> str | None:
    """The API key that the environment holds; an empty one is none."""
    return os.environ.get(variable) or None


def _places(spec: EvalSpec, subject: Subject, stem: str) -> Iterator[Path]:
    """Folders for an evaluation of that name, the best first."""
    for part in numbered(stem):
        if subject.run:
            yield subject.run.evaluation(part, subject.step)
        else:
            yield model_folder(spec.runs, subject.folder) / part


def _refuse_unwritable(folder: Path) -> None:
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"the result cannot be kept in {folder.parent}: {there} cannot be written to; change --runs")


# Carried out


def _carried_out(planned: PlannedEvaluation, screen: Screen) -> dict[str, Any]:
    """Its figures: avg@k, pass@k, maj@k with 95% intervals clustered by problem, lengths and tool use, and the
    benchmark's own; docs/evaluation.md says where they are kept. Raises RunHalted past the fault budget."""
    subject, asked = planned.subject, planned.asked
    with Recall(planned.folder, name_of(planned.setup, asked.stem)) as recall:
        weights = Path(subject.name) / "config.json"  # an endpoint has none, and no machine that looks for them
        with opened_machines(subject.recipe, weights, subject.placement) as machines:
            screen.stage("eval", _said(planned))
            if planned.lowered:
                screen.note(
                    f"at most {subject.recipe.rollout.max_response_tokens:,} tokens an attempt, because the longest "
                    f"prompt leaves no more of the {planned.positions:,} positions of the model; "
                    "--max-response-tokens sets another cap"
                )
            if recall.found:
                screen.note(f"{recall.found} answers are there from an earlier start; only what is missing is asked")
            made = asyncio.run(_evaluated(planned, recall, machines, screen))
        questions = (problem.question for problem in asked.problems)
        note = note_of(subject.run, subject.step, questions, asked.title)
        made = replace(made, result={**made.result, "contamination": note})
        made.write(planned.folder, subject.step)
        recall.forget()
    _tell_kept(made, planned, screen)
    return _public(planned, made.result, planned.folder)


def _said(planned: PlannedEvaluation) -> str:
    problems, protocol, recipe = planned.asked.problems, planned.protocol, planned.subject.recipe
    twice = len(problems) - len({problem.id for problem in problems})
    repeats = f" ({twice} of them repeat a question)" if twice else ""
    words, tools = planned.subject.said
    return (
        f"{len(problems)} problems{repeats} x {protocol.attempts} attempts at temperature {protocol.temperature:g}, "
        f"{words}, at most {recipe.rollout.max_response_tokens} tokens and {recipe.rollout.max_turns} turns, "
        f"{'one turn without tools' if planned.asked.kind.one_turn else tools}, verifier {recipe.evaluate.verifier}"
    )


async def _evaluated(planned: PlannedEvaluation, recall: Recall, machines: Machines, screen: Screen) -> Evaluation:
    spec, subject, kind, watch = planned.spec, planned.subject, planned.asked.kind, Watch()

    def tell(stall: Stall, stacks: str) -> None:
        screen.note(f"{stall.report()}\n\n{stacks}")

    async with AsyncExitStack() as closing:
        judge = None
        if kind.needs_judge:
            assert spec.judge is not None and spec.judge_model is not None
            parallel = spec.parallel or PARALLEL
            judge = ChatClient(spec.judge, spec.judge_model, key=_key_in(JUDGE_KEY), parallel=parallel)
            closing.push_async_callback(judge.close)
        attempts = len(planned.asked.problems) * planned.protocol.attempts
        opened = subject.opened(
            planned.positions, machines.sandbox, attempts=attempts, start_server=machines.start_server
        )
        usual: Roller | EndpointSolver = await closing.enter_async_context(opened)
        solver = kind.solver(usual, recall, judge)
        if isinstance(solver, Roller):
            watch.load = solver.engine.load
            watch.note(RUN, "evaluation")
            closing.enter_context(screen.never_silent(watch.doing))
            closing.enter_context(Watching(watch, subject.recipe.run, tell))
            solver = replace(solver, note=watch.note)
        return await evaluate_policy(
            solver,
            planned.asked.problems,
            planned.protocol,
            fault_budget=subject.recipe.run.fault_budget,
            setup=planned.setup,
            said=screen.attempted,
            recall=recall,
        )


def _tell_kept(made: Evaluation, planned: PlannedEvaluation, screen: Screen) -> None:
    if planned.finished:
        held = read_json(planned.finished[0] / RESULT)["setup"].get(HOLDS)
        other = ", of other weights or with another tokenizer" if held not in (None, planned.setup.get(HOLDS)) else ""
        screen.note(f"the same evaluation was made before{other}, in {planned.finished[0]}; this one is kept beside it")
    if missing := made.result["environment_failed"]:
        attempts = made.result["attempts"]
        screen.note(
            f"{missing} of {attempts} attempts ended by failures outside the model and are in none of the figures"
        )
    screen.note(f"saved as {label_of(planned.folder, planned.spec.runs)} in {planned.folder}")


def _public(planned: PlannedEvaluation, result: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What a person asked for: `accuracy` and `greedy` are run-folder names for figures that stand here as avg@n."""
    return {
        "evaluation": label_of(folder, planned.spec.runs),
        "model": planned.subject.name,
        "data": planned.asked.title,
        "saved": str(folder),
        **{name: value for name, value in result.items() if name not in ("accuracy", "greedy", "transcripts")},
    }
