"""From the words of a command line to evaluations that can be carried out, all checked before the first begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rocstar.config.sections import Recipe
from rocstar.dialogue.markup import SYSTEM
from rocstar.errors import ConfigError
from rocstar.evaluation.asked import Asked, AskedEndpoint, AskedWeights
from rocstar.evaluation.benchmark import find_benchmarks
from rocstar.evaluation.chat_client import check_address
from rocstar.evaluation.command import JudgeEndpoint, Prepared, evaluate, kept, prepare
from rocstar.evaluation.endpoint import ToolStyle
from rocstar.evaluation.evaluate import Protocol
from rocstar.evaluation.source import BenchmarkRows, ProblemFile, ProblemSource
from rocstar.evaluation.subject import find_subject, settings_in_force
from rocstar.support.screen import Screen

PARALLEL = 32  # requests at once to an endpoint
OPENAI: ToolStyle = "openai"
CAP = "rollout.max_response_tokens"
OF_WEIGHTS = ("model.", "run.threads", "rollout.engine_rows", "rollout.kv_tokens", "rollout.engine_patience_seconds",
              "rollout.template", "rollout.environment", "rollout.top_k")  # fmt: skip
"""How keys begin that say something about weights of ours, or about their conversation."""
OF_TOOLS = ("rollout.max_turns", "rollout.max_parallel_calls", "rollout.tool_name", "rollout.feedback", "sandbox.tools")
"""How keys begin that say something about tools that run here."""
OPTIONS = {
    "max_turns": "rollout.max_turns",
    "max_response_tokens": CAP,
    "template": "rollout.template",
    "verifier": "evaluate.verifier",
}
"""Settings of the recipe that have an option: its name, and the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the command line says, None where it is silent; docs/evaluation.md has the words."""

    model: str
    settings: Sequence[str] | None = None
    data: str | None = None
    question: Sequence[str] | None = None
    answer: str = "answer"
    benchmark: str | None = None
    data_folder: Path | None = None
    accept_rows: bool = False
    limit: int | None = None
    n: int | None = None
    temperature: float | None = None
    max_turns: int | None = None
    max_response_tokens: int | None = None
    template: str | None = None
    verifier: str | None = None
    endpoint: str | None = None
    endpoint_key: str | None = None
    tools: str | None = None
    system: str | None = None
    """Empty for no system message."""
    parallel: int | None = None
    judge: str | None = None
    judge_model: str | None = None
    judge_key: str | None = None
    runs: Path

    @property
    def options(self) -> dict[str, str]:
        """Settings of the recipe that were typed as options, as `recipe.changed` takes them."""
        typed = {name: getattr(self, name) for name in OPTIONS}
        return {
            f"{OPTIONS[name]}={value}": f"--{name.replace('_', '-')} {value}"
            for name, value in typed.items()
            if value is not None
        }


def evaluations(given: Given, screen: Screen) -> Iterator[dict[str, Any]]:
    """The result of each, as it is made. Where a command was killed after some of its benchmarks, those are taken as
    they lie there; one that had ended is made again beside. Raises ConfigError, DataError, and RunHalted past the fault
    budget."""
    sources = _sources(given)
    _refuse_unread(given, sources)
    judge = _judge(given)
    prepared = [_prepared(source, given, judge) for source in sources]
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
    for name, value in (("--tools", given.tools), ("--system", given.system)):
        if given.endpoint is None and value is not None:
            raise ConfigError(f"{name} is about an endpoint; leave it out, or name one with --endpoint")
    if given.endpoint is None and given.judge is None and given.parallel is not None:
        raise ConfigError("--parallel is about an endpoint; rollout.engine_rows is how many attempts an engine makes")
    kinds = [source.kind for source in sources]
    if given.judge is not None and not any(kind and kind.needs_judge for kind in kinds):
        raise ConfigError("--judge is given, and nothing that is asked needs a judge; leave it out")
    for key, said in _changes(given):
        if given.endpoint is not None and key.startswith(OF_WEIGHTS):
            raise ConfigError(f"{said} says nothing to an endpoint; leave it out")
        if given.tools == "none" and key.startswith(OF_TOOLS):
            raise ConfigError(f"{said} says nothing where --tools none leaves the tools to the endpoint; leave it out")
        for source, kind in zip(sources, kinds, strict=True):
            if kind is not None and kind.leaves_unread(key):
                raise ConfigError(f"{said} says nothing to benchmark {source.title}, which has its own; leave it out")


def _changes(given: Given) -> Iterator[tuple[str, str]]:
    """(key, as the person wrote it)."""
    yield from ((_key(text), text) for text in given.settings or ())
    yield from ((_key(text), words) for text, words in given.options.items())
    if given.system is not None:
        yield "rollout.preamble", "--system"  # the words around a question as well


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()


def _prepared(source: ProblemSource, given: Given, judge: JudgeEndpoint | None) -> Prepared:
    asked = _asked(given, [*source.protocol.settings, *(given.settings or ())])
    rollout = asked.recipe.rollout
    protocol = Protocol(
        attempts=source.protocol.attempts if given.n is None else given.n,
        temperature=source.protocol.temperature if given.temperature is None else given.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=asked.recipe.run.seed,
    )
    needs = source.kind is not None and source.kind.needs_judge
    return prepare(asked, source, protocol, judge if needs else None)


def _asked(given: Given, settings: Sequence[str]) -> Asked:
    capped = CAP in map(_key, (*settings, *given.options))
    if given.endpoint is None:
        subject = find_subject(given.model, given.runs)
        recipe = settings_in_force(subject.recipe, settings, given.options)
        return AskedWeights(subject=subject, recipe=recipe, runs=given.runs, capped=capped or subject.run is not None)
    tools = _style(given.tools or OPENAI)
    bare = tools == "none"  # an agent lays out its conversation itself
    recipe = settings_in_force(Recipe(), ['rollout.preamble=""', *settings] if bare else settings, given.options)
    if bare:
        recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"max_turns": 1})})
    usual = None if bare else SYSTEM
    return AskedEndpoint(
        url=given.endpoint.rstrip("/"),
        model=given.model,
        key=given.endpoint_key,
        parallel=given.parallel or PARALLEL,
        tools=tools,
        recipe=recipe,
        runs=given.runs,
        capped=capped,
        system=usual if given.system is None else given.system or None,
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
