"""From the words of a command line to evaluations that can be carried out, all checked before the first begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rocstar.config import Recipe
from rocstar.errors import ConfigError
from rocstar.evaluation.asked import Asked, AskedEndpoint, AskedWeights
from rocstar.evaluation.benchmark import find_benchmarks
from rocstar.evaluation.chat_client import check_address
from rocstar.evaluation.command import JudgeEndpoint, PlannedEvaluation, evaluate, kept, prepare
from rocstar.evaluation.endpoint import ToolStyle
from rocstar.evaluation.evaluate import Protocol
from rocstar.evaluation.source import BenchmarkRows, ProblemFile, ProblemSource
from rocstar.evaluation.subject import find_subject, settings_in_force
from rocstar.screen import Screen

PARALLEL = 32  # requests at once to an endpoint
OPENAI: ToolStyle = "openai"
OF_WEIGHTS = ("model.", "run.threads", "rollout.engine_rows", "rollout.kv_tokens", "rollout.engine_patience_seconds",
              "rollout.template", "rollout.environment", "rollout.top_k")  # fmt: skip
"""How keys begin that say something about weights of ours, or about their conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the command line says, None where it is silent; docs/evaluation.md has the words."""

    model: str
    settings: Sequence[str]
    options: dict[str, str]
    """As `recipe.changed` takes them."""
    data: str | None
    question: Sequence[str] | None
    answer: str
    benchmark: str | None
    data_folder: Path | None
    accept_rows: bool
    limit: int | None
    attempts: int | None
    temperature: float | None
    endpoint: str | None
    endpoint_key: str | None
    tools: str | None
    parallel: int | None
    judge: str | None
    judge_model: str | None
    judge_key: str | None
    runs: Path


def evaluations(given: Given, screen: Screen) -> Iterator[dict[str, Any]]:
    """The result of each, as it is made. Where a command was killed after some of its benchmarks, those are taken as
    they lie there; one that had ended is made again beside. Raises ConfigError, DataError, and RunHalted past the fault
    budget."""
    sources = _sources(given)
    _refuse_unread(given, sources)
    judge = _judge(given)
    prepared = [prepare(_plan(source, given, judge)) for source in sources]
    ahead = _ahead([len(one.finished) for one in prepared])
    for one, is_ahead in zip(prepared, ahead, strict=True):
        result = one.last if is_ahead else None
        yield evaluate(one, screen) if result is None else kept(one, result, screen)


def _ahead(rounds: Sequence[int]) -> list[bool]:
    """Which of a command's evaluations were made once more than others of it: 1 1 0 -> the first two; 1 1 -> none."""
    return [finished == max(rounds) > min(rounds) for finished in rounds]


def _sources(given: Given) -> list[ProblemSource]:
    if given.data is not None and given.benchmark is None:
        if given.data_folder is not None or given.accept_rows:
            raise ConfigError("--data-folder and --accept-rows belong to --benchmark; leave them out with --data")
        columns = given.question or ["question"]
        return [ProblemFile(path=given.data, question=columns, answer=given.answer, limit=given.limit)]
    if given.data is not None or given.benchmark is None:
        raise ConfigError("give either --data FILE or --benchmark NAMES; see rocstar eval --help")
    if given.question is not None or given.answer != "answer":
        raise ConfigError("a benchmark names its columns itself; leave out --question and --answer")
    return [
        BenchmarkRows(one, given.data_folder, limit=given.limit, accept=given.accept_rows)
        for one in find_benchmarks(given.benchmark)
    ]


def _refuse_unread(given: Given, sources: Sequence[ProblemSource]) -> None:
    """Raises ConfigError for what the person says and nothing would read."""
    if given.endpoint is None and given.tools is not None:
        raise ConfigError("--tools is about an endpoint; leave it out, or name one with --endpoint")
    if given.endpoint is None and given.judge is None and given.parallel is not None:
        raise ConfigError("--parallel is about an endpoint; rollout.engine_rows is how many attempts an engine makes")
    kinds = [source.kind for source in sources]
    if given.judge is not None and not any(kind and kind.needs_judge for kind in kinds):
        raise ConfigError("--judge is given, and nothing that is asked needs a judge; leave it out")
    for key, said in _changes(given):
        if given.endpoint is not None and key.startswith(OF_WEIGHTS):
            raise ConfigError(f"{said} says nothing to an endpoint; leave it out")
        for source, kind in zip(sources, kinds, strict=True):
            if kind is not None and kind.leaves_unread(key):
                raise ConfigError(f"{said} says nothing to benchmark {source.title}, which has its own; leave it out")


def _changes(given: Given) -> Iterator[tuple[str, str]]:
    """(key, as the person wrote it)."""
    yield from ((text.partition("=")[0].strip(), text) for text in given.settings)
    yield from ((text.partition("=")[0].strip(), words) for text, words in given.options.items())


def _plan(source: ProblemSource, given: Given, judge: JudgeEndpoint | None) -> PlannedEvaluation:
    asked = _asked(given, [*source.protocol.settings, *given.settings])
    rollout = asked.recipe.rollout
    protocol = Protocol(
        attempts=source.protocol.attempts if given.attempts is None else given.attempts,
        temperature=source.protocol.temperature if given.temperature is None else given.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=asked.recipe.run.seed,
    )
    needs = source.kind is not None and source.kind.needs_judge
    return PlannedEvaluation(asked=asked, source=source, protocol=protocol, judge=judge if needs else None)


def _asked(given: Given, settings: Sequence[str]) -> Asked:
    if given.endpoint is None:
        subject = find_subject(given.model, given.runs)
        recipe = settings_in_force(subject.recipe, settings, given.options)
        return AskedWeights(subject=subject, recipe=recipe, runs=given.runs)
    return AskedEndpoint(
        url=given.endpoint.rstrip("/"),
        model=given.model,
        key=given.endpoint_key,
        parallel=given.parallel or PARALLEL,
        tools=_style(given.tools or OPENAI),
        recipe=settings_in_force(Recipe(), settings, given.options),
        runs=given.runs,
    )


def _judge(given: Given) -> JudgeEndpoint | None:
    if given.judge is None:
        return None
    if given.judge_model is None:
        raise ConfigError("--judge needs the judge's name there; give it with --judge-model")
    url = given.judge.rstrip("/")
    check_address(url)
    return JudgeEndpoint(url=url, model=given.judge_model, key=given.judge_key, parallel=given.parallel or PARALLEL)


def _style(name: str) -> ToolStyle:
    for style in get_args(ToolStyle):
        if name == style:
            found: ToolStyle = style
            return found
    raise ConfigError(f"--tools {name} is none of {', '.join(get_args(ToolStyle))}")
